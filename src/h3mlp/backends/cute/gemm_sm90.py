"""Stage 2 on Hopper: FP8 GEMM on wgmma, with dequantization and SwiGLU in its epilogue.

The problem: h^T = w_q . a_q^T, [2F, H] x [H, M], then y = swiglu(h) of half as many rows. The weights are wgmma's A
operand, 64 rows an instruction, so that the tokens, whose number varies, are its flexible N.

A CTA is persistent: one warp loads tiles by TMA, two warpgroups multiply, each 64 weight rows by ``tile_tokens``.
"""

from dataclasses import dataclass

import cutlass
import cutlass.cute as cute
import cutlass.utils.hopper_helpers as hopper
from cutlass import BFloat16, Float8E4M3FN, Float32, Int32, Uint32, const_expr, pipeline
from cutlass.cute.nvgpu import OperandMajorMode, cpasync, warp, warpgroup
from cutlass.memory import SmemAllocator
from cutlass.tensor_utils import LayoutEnum

from . import epilogue, operands, ptx, schedule

WARPGROUP = 128
CONSUMERS = 2
TILE_ROWS = 64 * CONSUMERS
"""Packed weight rows of a tile: 64, wgmma's M, for each consuming warpgroup."""

WGMMA_K = 32
STAGE_K = 128
"""K of a stage: 128 bytes, the widest swizzle."""

BATCH = 32
"""Tokens whose y leaves at once: the four 8 x 8 matrices of one stmatrix. Two batches are staged at a time."""

PRODUCER_REGISTERS, CONSUMER_REGISTERS = 24, 240
FIRST_BARRIER = 1  # named barriers 1 and 2: one for each consuming warpgroup


@dataclass(frozen=True)
class GemmSm90:
    """One compiled variant; the fields are everything it depends on."""

    hidden: int
    ffn: int
    tile_tokens: int
    stages: int
    cluster_rows: int
    """CTAs of a cluster, along the weight rows. They share the activations, by TMA multicast."""
    promote: bool
    """Add partial sums to FP32 accumulators every ``interval`` of K; otherwise never."""
    interval: int = 256
    group: int = 16

    @property
    def name(self) -> str:
        return f"gemm_sm90_{TILE_ROWS}x{self.tile_tokens}_{'fp32' if self.promote else 'fast'}"

    multiplies_with = "QGMMA"

    @property
    def batches(self) -> int:
        """Parts of a tile's y, which leave one after the other."""
        return self.tile_tokens // BATCH

    @property
    def row_tiles(self) -> int:
        """Tiles of a whole cluster along the weight rows."""
        return -(-2 * self.ffn // (TILE_ROWS * self.cluster_rows))

    def tiled_mma(self) -> cute.TiledMma:
        """One warpgroup: 64 weight rows by a tile of tokens."""
        k_major = OperandMajorMode.K
        return hopper.make_trivial_tiled_mma(
            Float8E4M3FN, Float8E4M3FN, k_major, k_major, Float32, (1, 1, 1), (64, self.tile_tokens)
        )

    def trace(self):
        """The host function and what it is compiled for."""
        return self.launch, operands.stand_ins(self.hidden, self.ffn)

    @cute.jit
    def launch(
        self,
        a_q: cute.Tensor,
        s_row: cute.Tensor,
        w_q: cute.Tensor,
        w_scale: cute.Tensor,
        out: cute.Tensor,
        multiprocessors: Int32,
        stream,
    ):
        w_smem = operands.smem_layout(TILE_ROWS, STAGE_K, self.stages)
        a_smem = operands.smem_layout(self.tile_tokens, STAGE_K, self.stages)
        y_smem = _y_smem()
        w_tma, w_tiles = operands.tma_load(w_q, w_smem, (TILE_ROWS, STAGE_K))
        a_tma, a_tiles = operands.tma_load(a_q, a_smem, (self.tile_tokens, STAGE_K), self.cluster_rows)
        y_tma, y_tiles = cpasync.make_tiled_tma_atom(
            cpasync.CopyBulkTensorTileS2GOp(), out, cute.slice_(y_smem, (None, None, 0)), (BATCH, 32)
        )
        token_tiles = (cute.size(a_q, mode=[0]) + self.tile_tokens - 1) // self.tile_tokens
        tiles = self.row_tiles * token_tiles
        clusters = cutlass.min(multiprocessors // self.cluster_rows, tiles)
        self.kernel(
            w_tma, w_tiles, a_tma, a_tiles, y_tma, y_tiles, s_row, w_scale, w_smem, a_smem, y_smem, token_tiles
        ).launch(
            grid=(self.cluster_rows * clusters, 1, 1),
            block=((CONSUMERS + 1) * WARPGROUP, 1, 1),
            cluster=(self.cluster_rows, 1, 1),
            min_blocks_per_mp=1,
            stream=stream,
            use_pdl=True,
        )

    @cute.kernel
    def kernel(
        self,
        w_tma: cute.CopyAtom,
        w_tiles: cute.Tensor,
        a_tma: cute.CopyAtom,
        a_tiles: cute.Tensor,
        y_tma: cute.CopyAtom,
        y_tiles: cute.Tensor,
        s_row: cute.Tensor,
        w_scale: cute.Tensor,
        w_smem: cute.ComposedLayout,
        a_smem: cute.ComposedLayout,
        y_smem: cute.ComposedLayout,
        token_tiles: Int32,
    ):
        thread = ptx.thread_index()
        warp_index = cute.arch.make_warp_uniform(thread // 32)
        group_index = cute.arch.make_warp_uniform(thread // WARPGROUP)
        if warp_index == 0:
            for tma in (w_tma, a_tma, y_tma):
                cpasync.prefetch_descriptor(tma)

        @cute.struct
        class Storage:
            barriers: cute.struct.MemRange[cutlass.Int64, 2 * self.stages]
            s_row: cute.struct.MemRange[Float32, CONSUMERS * self.tile_tokens]
            w: cute.struct.Align[cute.struct.MemRange[Float8E4M3FN, cute.cosize(w_smem)], 1024]
            a: cute.struct.Align[cute.struct.MemRange[Float8E4M3FN, cute.cosize(a_smem)], 1024]
            y: cute.struct.Align[cute.struct.MemRange[BFloat16, cute.cosize(y_smem)], 1024]

        storage = SmemAllocator().allocate(Storage)
        s_w = storage.w.get_tensor(w_smem.outer, swizzle=w_smem.inner)
        s_a = storage.a.get_tensor(a_smem.outer, swizzle=a_smem.inner)
        s_y = storage.y.get_tensor(y_smem.outer, swizzle=y_smem.inner)
        s_scale = storage.s_row.get_tensor(cute.make_layout((self.tile_tokens, CONSUMERS)))

        warps_that_release = 4 * CONSUMERS * self.cluster_rows
        loads = pipeline.PipelineTmaAsync.create(
            barrier_storage=storage.barriers.data_ptr(),
            num_stages=self.stages,
            producer_group=pipeline.CooperativeGroup(pipeline.Agent.Thread),
            consumer_group=pipeline.CooperativeGroup(pipeline.Agent.Thread, warps_that_release),
            tx_count=(TILE_ROWS + self.tile_tokens) * STAGE_K,
            cta_layout_vmnk=cute.make_layout((1, self.cluster_rows, 1, 1)),
            tidx=thread,
            defer_sync=True,
        )
        cluster = (self.cluster_rows, 1)
        pipeline.pipeline_init_arrive(cluster_shape_mn=cluster, is_relaxed=True)
        rank = cute.arch.make_warp_uniform(cute.arch.block_idx_in_cluster())
        pipeline.pipeline_init_wait(cluster_shape_mn=cluster)

        tiles = schedule.Tiles(self.row_tiles, token_tiles, self.group, self.cluster_rows, rank)
        if group_index == CONSUMERS:
            cute.arch.setmaxregister_decrease(PRODUCER_REGISTERS)
            if warp_index == 4 * CONSUMERS:
                producer = Producer(self, tiles, loads, w_tma, w_tiles, a_tma, a_tiles, s_w, s_a)
                producer.run()
        else:
            cute.arch.setmaxregister_increase(CONSUMER_REGISTERS)
            consumer = Consumer(
                self, tiles, loads, s_w, s_a, s_y, s_scale, s_row, w_scale, y_tma, y_tiles, group_index,
                thread % WARPGROUP,
            )  # fmt: skip
            consumer.run()


class Producer:
    """One warp: fills the stages, in order."""

    def __init__(self, gemm: GemmSm90, tiles: schedule.Tiles, loads, w_tma, w_tiles, a_tma, a_tiles, s_w, s_a):
        self.gemm, self.tiles, self.loads, self.w_tma, self.a_tma = gemm, tiles, loads, w_tma, a_tma
        w_tiles = cute.local_tile(w_tiles, (TILE_ROWS, STAGE_K), (None, None))
        a_tiles = cute.local_tile(a_tiles, (gemm.tile_tokens, STAGE_K), (None, None))
        self.to_w, self.from_w = operands.tma_pair(w_tma, s_w, w_tiles)
        self.to_a, self.from_a = operands.tma_pair(a_tma, s_a, a_tiles, tiles.rank, gemm.cluster_rows)
        self.peers = cutlass.Int16((1 << gemm.cluster_rows) - 1) if gemm.cluster_rows > 1 else None

    @cute.jit
    def run(self):
        gemm, tiles = self.gemm, self.tiles
        early = const_expr(min(gemm.stages, gemm.hidden // STAGE_K))
        row, token = self.tiles.coordinates(tiles.first)
        state = pipeline.make_pipeline_state(pipeline.PipelineUserType.Producer, gemm.stages)
        ahead = state.clone()
        for k in cutlass.range_constexpr(early):  # the weights do not wait for stage 1
            self.load_weights(ahead, row, k)
            ahead.advance()
        cute.arch.griddepcontrol_wait()
        for k in cutlass.range_constexpr(early):
            self.load_activations(state, token, k)
            state.advance()
        state = self.load(state, row, token, early)
        for tile in cutlass.range(tiles.first + tiles.step, tiles.end, tiles.step, unroll=1):
            row, token = self.tiles.coordinates(tile)
            state = self.load(state, row, token, 0)
        self.loads.producer_tail(state)

    @cute.jit
    def load(self, state, row, token, first: cutlass.Constexpr):
        """A tile, from the ``first`` stage on."""
        for k in cutlass.range(first, self.gemm.hidden // STAGE_K, unroll=1):
            self.load_weights(state, row, k)
            self.load_activations(state, token, k)
            state.advance()
        return state

    @cute.jit
    def load_weights(self, state, row, k):
        """Wait for a free stage, say how many bytes it will get, and start those of the weights."""
        ptx.wait(self.loads.consumer_get_barrier(state), state.phase)
        self.loads.sync_object_full.arrive(state.index, None)
        full, w = self.loads.producer_get_barrier(state), self.to_w[(None, state.index)]
        cute.copy(self.w_tma, self.from_w[(None, row, k)], w, tma_bar_ptr=full)

    @cute.jit
    def load_activations(self, state, token, k):
        full, a = self.loads.producer_get_barrier(state), self.to_a[(None, state.index)]
        cute.copy(self.a_tma, self.from_a[(None, token, k)], a, tma_bar_ptr=full, mcast_mask=self.peers)


class Consumer:
    """One warpgroup: 64 weight rows of every tile, of which 32 are outputs' gates and 32 their ups.

    ``partial`` is what wgmma adds to, ``final`` the FP32 sums, ``h`` the finished tile, rounded, on its way out.
    """

    def __init__(
        self,
        gemm: GemmSm90,
        tiles: schedule.Tiles,
        loads,
        s_w,
        s_a,
        s_y,
        s_scale,
        s_row,
        w_scale,
        y_tma,
        y_tiles,
        index,
        thread,
    ):
        self.gemm, self.tiles, self.loads, self.index, self.thread = gemm, tiles, loads, index, thread
        mma = gemm.tiled_mma()
        self.w_blocks = mma.make_fragment_A(mma.get_slice(0).partition_A(s_w))
        self.a_blocks = mma.make_fragment_B(mma.get_slice(0).partition_B(s_a))
        fragment = mma.partition_shape_C((64, gemm.tile_tokens))
        self.partial = cute.make_rmem_tensor(fragment, Float32)
        self.final = cute.make_rmem_tensor(fragment, Float32)
        self.h = cute.make_rmem_tensor((gemm.tile_tokens // 2,), Uint32)
        self.s_row, self.w_scale, self.s_scale = s_row, w_scale, s_scale
        self.token_scales = cute.make_rmem_tensor((-(-gemm.tile_tokens // WARPGROUP),), Float32)
        self.row_scales = cute.make_rmem_tensor((2,), Float32)
        self.y_tma, self.s_y = y_tma, s_y
        self.from_y, self.to_y = operands.tma_pair(y_tma, s_y, cute.local_tile(y_tiles, (BATCH, 32), (None, None)))

    @cute.jit
    def run(self):
        """Every tile. A finished tile is rounded and stored while the next one is multiplied."""
        gemm, tiles = self.gemm, self.tiles
        depth = const_expr(gemm.hidden // STAGE_K)
        step = const_expr(min(gemm.interval // STAGE_K, depth))
        intervals, tail = const_expr(depth // step), const_expr(depth % step)
        with_stores = const_expr(min(gemm.batches, intervals - 1))

        cute.arch.griddepcontrol_wait()
        state = pipeline.make_pipeline_state(pipeline.PipelineUserType.Consumer, gemm.stages)
        row, token = Int32(0), Int32(0)
        for tile in cutlass.range(tiles.first, tiles.end, tiles.step, unroll=1):
            waiting = tile != tiles.first
            next_row, next_token = self.tiles.coordinates(tile)
            behind = state.clone()
            state = self.multiply(state, step, True)
            behind = self.release(behind, step - 1, 1)  # before the 400 cycles of rounding, or loads come late: 2.4%
            if waiting:
                self.round()
            self.load_scales(next_row, next_token)
            self.final.fill(0.0)
            self.release(behind, 1, 0)
            self.promote()
            for batch in cutlass.range_constexpr(with_stores):
                state = self.interval(state, step, waiting, batch, row, token)
            for _ in cutlass.range(intervals - 1 - with_stores, unroll=1):
                state = self.interval(state, step, False, 0, row, token)
            if const_expr(tail > 0):
                state = self.interval(state, tail, False, 0, row, token)
            for batch in cutlass.range_constexpr(with_stores, gemm.batches):
                if waiting:
                    self.store(batch, row, token)
            if const_expr(not gemm.promote):
                self.final.store(self.partial.load())
            row, token = next_row, next_token
        self.round()
        for batch in cutlass.range_constexpr(gemm.batches):
            self.store(batch, row, token)
        if self.thread < 32:
            cute.arch.cp_async_bulk_wait_group(0, read=False)

    @cute.jit
    def interval(self, state, stages: cutlass.Constexpr, waiting, batch: cutlass.Constexpr, row, token):
        """Multiply and promote. While the tensor cores have the whole interval to do, a batch of the finished tile
        leaves, if one is ``waiting``."""
        behind = state.clone()
        state = self.multiply(state, stages, self.gemm.promote)
        if waiting:
            self.store(batch, row, token)
        self.release(behind, stages, 0)
        self.promote()
        return state

    @cute.jit
    def multiply(self, state, stages: cutlass.Constexpr, fresh: cutlass.Constexpr):
        """Issue the products of some stages. ``fresh``: from zero."""
        mma = self.gemm.tiled_mma()
        mma.set(warpgroup.Field.ACCUMULATE, not fresh)
        for _ in cutlass.range_constexpr(stages):
            ptx.wait(self.loads.producer_get_barrier(state), state.phase)
            warpgroup.fence()
            for k in cutlass.range_constexpr(STAGE_K // WGMMA_K):
                w = cute.append_ones(self.w_blocks[(None, self.index, k, state.index)], up_to_rank=2)
                a = cute.append_ones(self.a_blocks[(None, 0, k, state.index)], up_to_rank=2)
                cute.gemm(mma, self.partial, w, a, self.partial)
                mma.set(warpgroup.Field.ACCUMULATE, True)
            warpgroup.commit_group()
            state.advance()
        return state

    @cute.jit
    def release(self, behind, stages: cutlass.Constexpr, pending: cutlass.Constexpr):
        """Give stages back as their products are complete. ``pending``: stages issued after them."""
        for s in cutlass.range_constexpr(stages):
            warpgroup.wait_group(pending + stages - 1 - s)
            self.loads.consumer_release(behind)
            behind.advance()
        return behind

    @cute.jit
    def promote(self):
        """The partial sums, complete, to FP32."""
        if const_expr(self.gemm.promote):
            for i in cutlass.range_constexpr(cute.size(self.final)):
                self.final[i] = self.final[i] + self.partial[i]

    @cute.jit
    def load_scales(self, row, token):
        """s_row of the tile's tokens, one or two a thread, and w_scale of this thread's gate and up rows."""
        gemm, token_scales, row_scales = self.gemm, self.token_scales, self.row_scales
        for i in cutlass.range_constexpr(cute.size(token_scales)):
            within = self.thread + i * WARPGROUP
            index = token * gemm.tile_tokens + within
            token_scales[i] = Float32(0.0)
            if within < gemm.tile_tokens and index < cute.size(self.s_row):
                token_scales[i] = self.s_row[index]
        first = row * TILE_ROWS + self.index * 64 + self.thread // 32 * 16 + self.thread % 32 // 4
        for i in cutlass.range_constexpr(2):
            row_scales[i] = Float32(0.0)
            if first + 8 * i < 2 * gemm.ffn:
                row_scales[i] = self.w_scale[first + 8 * i]

    @cute.jit
    def round(self):
        """``final`` to ``h``: half the registers, so that ``final`` is free for the next tile."""
        s_scale = self.s_scale
        if self.thread < 32:
            cute.arch.cp_async_bulk_wait_group(0, read=True)  # both slots of s_y are free
        for i in cutlass.range_constexpr(cute.size(self.token_scales)):
            within = self.thread + i * WARPGROUP
            if within < self.gemm.tile_tokens:
                s_scale[(within, self.index)] = self.token_scales[i]
        self.sync()
        for atom in cutlass.range_constexpr(self.gemm.tile_tokens // 8):
            token = 8 * atom + 2 * (self.thread % 4)
            s0, s1 = s_scale[(token, self.index)], s_scale[(token + 1, self.index)]
            for up in cutlass.range_constexpr(2):
                acc0, acc1 = self.final[4 * atom + 2 * up], self.final[4 * atom + 2 * up + 1]
                w_scale = self.row_scales[up]
                self.h[2 * atom + up] = epilogue.dequantize(acc0, acc1, s0, s1, w_scale, w_scale)

    @cute.jit
    def store(self, batch: cutlass.Constexpr, row, token):
        """SwiGLU of one batch. Its y goes out through shared memory by TMA, which drops what is past the last row."""
        slot = 2 * self.index + batch % 2
        lane, warp_of_group = self.thread % 32, self.thread // 32
        y = cute.make_rmem_tensor((2 * BATCH // 8,), BFloat16)
        y_pairs = cute.recast_tensor(y, Uint32)
        for i in cutlass.range_constexpr(BATCH // 8):
            atom = batch * (BATCH // 8) + i
            y_pairs[i] = epilogue.swiglu(self.h[2 * atom], self.h[2 * atom + 1])
        stmatrix = cute.make_copy_atom(warp.StMatrix8x8x16bOp(transpose=True, num_matrices=4), BFloat16)
        line = cute.local_tile(self.s_y[(None, None, slot)], (1, 8), (lane, warp_of_group))
        line = cute.append_ones(cute.group_modes(line, 0, 2), up_to_rank=2)
        cute.copy(stmatrix, cute.append_ones(y, up_to_rank=2), line)
        cute.arch.fence_proxy("async.shared", space="cta")
        if self.thread < 32:
            cute.arch.cp_async_bulk_wait_group(0, read=True)  # frees the other slot, for the next batch
        self.sync()
        if self.thread < 32:
            place = (None, token * self.gemm.batches + batch, row * CONSUMERS + self.index)
            cute.copy(self.y_tma, self.from_y[(None, slot)], self.to_y[place])
            cute.arch.cp_async_bulk_commit_group()

    @cute.jit
    def sync(self):
        cute.arch.barrier(barrier_id=self.index + FIRST_BARRIER, number_of_threads=WARPGROUP)


def _y_smem() -> cute.ComposedLayout:
    """[token, output column] BF16, two batches for each consumer."""
    atom = hopper.get_smem_layout_atom(LayoutEnum.ROW_MAJOR, BFloat16, 32)
    atom = warpgroup.make_smem_layout_atom(atom, BFloat16)
    return cute.tile_to_shape(atom, (BATCH, 32, 2 * CONSUMERS), order=(0, 1, 2))
