"""The FP8 GEMM on Hopper, on wgmma, with one of the ends of ``epilogue_sm90``.

The problem: w_q . a_q^T, [N, K] x [K, M]. The weights are wgmma's A operand, 64 rows an instruction, so that the
tokens, whose number varies, are its flexible N.

A CTA is persistent: one warp loads tiles by TMA, two warpgroups multiply, each 64 weight rows by ``tile_tokens``.
"""

from dataclasses import dataclass

import cutlass
import cutlass.cute as cute
import cutlass.utils.hopper_helpers as hopper
from cutlass import Float8E4M3FN, Float32, Int32, const_expr, pipeline
from cutlass.cute.nvgpu import OperandMajorMode, cpasync, warpgroup
from cutlass.memory import SmemAllocator

from . import epilogue_sm90, operands, ptx, schedule
from .epilogue_sm90 import CONSUMERS, ROWS, TILE_ROWS, WARPGROUP
from .product import Product

WGMMA_K = 32
STAGE_K = 128
"""K of a stage: 128 bytes, the widest swizzle."""

PRODUCER_REGISTERS, CONSUMER_REGISTERS = 24, 240


@dataclass(frozen=True)
class GemmSm90(operands.Launches):
    """One compiled variant; the fields are everything it depends on."""

    product: Product
    tile_tokens: int
    stages: int
    cluster_rows: int
    """CTAs of a cluster, along the weight rows. They share the activations, by TMA multicast."""
    promote: bool
    """Add partial sums to FP32 accumulators every ``interval`` of K, the first time after the epilogue's ``FIRST``;
    otherwise never."""
    interval: int = 256
    group: int = 16

    @property
    def name(self) -> str:
        mode = "fp32" if self.promote else "fast"
        return f"gemm_sm90_{self.product.end}_{TILE_ROWS}x{self.tile_tokens}_{mode}"

    multiplies_with = "QGMMA"

    @property
    def epilogue(self) -> type[epilogue_sm90.Epilogue]:
        return epilogue_sm90.of(self.product)

    @property
    def turns(self) -> int:
        """Parts in which a tile's output leaves, one after the other."""
        return self.epilogue.turns(self.tile_tokens)

    @property
    def row_tiles(self) -> int:
        """Tiles of a whole cluster along the weight rows."""
        return -(-self.product.n // (TILE_ROWS * self.cluster_rows))

    @property
    def depth(self) -> int:
        """Stages of a tile. What the last one has beyond K arrives as zeros."""
        return -(-self.product.k // STAGE_K)

    def tiled_mma(self) -> cute.TiledMma:
        """One warpgroup: 64 weight rows by a tile of tokens."""
        k_major = OperandMajorMode.K
        return hopper.make_trivial_tiled_mma(
            Float8E4M3FN, Float8E4M3FN, k_major, k_major, Float32, (1, 1, 1), (ROWS, self.tile_tokens)
        )

    @cute.jit
    def enqueue(
        self,
        a_q: cute.Tensor,
        s_row: cute.Tensor,
        w_q: cute.Tensor,
        w_scale: cute.Tensor,
        target: tuple,
        multiprocessors: Int32,
        stream,
    ):
        w_smem = operands.smem_layout(TILE_ROWS, STAGE_K, self.stages)
        a_smem = operands.smem_layout(self.tile_tokens, STAGE_K, self.stages)
        w = operands.tma_load(w_q, w_smem, (TILE_ROWS, STAGE_K))
        a = operands.tma_load(a_q, a_smem, (self.tile_tokens, STAGE_K), self.cluster_rows)
        target = self.epilogue.target(*target)
        token_tiles = (cute.size(a_q, mode=[0]) + self.tile_tokens - 1) // self.tile_tokens
        tiles = self.row_tiles * token_tiles
        clusters = cutlass.min(multiprocessors // self.cluster_rows, tiles)
        self.kernel(*w, *a, target, s_row, w_scale, w_smem, a_smem, token_tiles).launch(
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
        target: tuple,
        s_row: cute.Tensor,
        w_scale: cute.Tensor,
        w_smem: cute.ComposedLayout,
        a_smem: cute.ComposedLayout,
        token_tiles: Int32,
    ):
        thread = ptx.thread_index()
        warp_index = cute.arch.make_warp_uniform(thread // 32)
        group_index = cute.arch.make_warp_uniform(thread // WARPGROUP)
        if warp_index == 0:
            for tma in (w_tma, a_tma):
                cpasync.prefetch_descriptor(tma)
            self.epilogue.prefetch(target)
        smem = SmemAllocator()
        barriers = smem.allocate_array(cutlass.Int64, 2 * self.stages)
        shared = self.epilogue.shared(self, smem)
        s_w, s_a = (
            smem.allocate_tensor(Float8E4M3FN, layout.outer, byte_alignment=1024, swizzle=layout.inner)
            for layout in (w_smem, a_smem)
        )

        warps_that_release = 4 * CONSUMERS * self.cluster_rows
        loads = pipeline.PipelineTmaAsync.create(
            barrier_storage=barriers,
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
                Producer(self, tiles, loads, w_tma, w_tiles, a_tma, a_tiles, s_w, s_a).run()
        else:
            cute.arch.setmaxregister_increase(CONSUMER_REGISTERS)
            final = cute.make_rmem_tensor(self.tiled_mma().partition_shape_C((ROWS, self.tile_tokens)), Float32)
            end = self.epilogue(self, shared, s_row, w_scale, target, final, group_index, thread % WARPGROUP)
            Consumer(self, tiles, loads, s_w, s_a, end, group_index).run()


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
        early = const_expr(min(gemm.stages, gemm.depth))
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
        for k in cutlass.range(first, self.gemm.depth, unroll=1):
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
    """One warpgroup: 64 weight rows of every tile. ``partial`` is what wgmma adds to, ``final`` the FP32 sums."""

    def __init__(self, gemm: GemmSm90, tiles: schedule.Tiles, loads, s_w, s_a, end: epilogue_sm90.Epilogue, index):
        self.gemm, self.tiles, self.loads, self.end, self.index = gemm, tiles, loads, end, index
        mma = gemm.tiled_mma()
        self.w_blocks = mma.make_fragment_A(mma.get_slice(0).partition_A(s_w))
        self.a_blocks = mma.make_fragment_B(mma.get_slice(0).partition_B(s_a))
        self.partial, self.final = cute.make_fragment_like(end.final), end.final

    @cute.jit
    def run(self):
        """Every tile. A finished tile leaves while the next one is multiplied: all turns beside the first interval,
        one each stage, where that is long; else one beside each of the following intervals."""
        gemm, tiles = self.gemm, self.tiles
        depth, step = const_expr(gemm.depth), const_expr(gemm.interval // STAGE_K)
        first = const_expr(min(gemm.epilogue.FIRST // STAGE_K, depth))
        lead = const_expr(min(step, first))
        last = const_expr((depth - first) % step or min(depth - first, step))
        intervals = const_expr((depth - first - last) // step)
        early = const_expr(gemm.turns if gemm.interval < gemm.epilogue.FIRST else 0)
        with_stores = const_expr(min(gemm.turns - early, intervals))

        cute.arch.griddepcontrol_wait()
        state = pipeline.make_pipeline_state(pipeline.PipelineUserType.Consumer, gemm.stages)
        row, token = Int32(0), Int32(-1)
        for tile in cutlass.range(tiles.first, tiles.end, tiles.step, unroll=1):
            waiting = token >= 0
            behind = state.clone()
            state = self.multiply(state, lead, True)
            behind = self.release(behind, lead - 1, 1)  # before the 400 cycles of rounding, or loads come late: 2.4%
            if waiting:
                self.end.begin(row, token)
            for turn in cutlass.range_constexpr(first - lead):
                state = self.multiply(state, 1, False)
                if const_expr(turn < early):
                    if waiting:
                        self.end.store(turn, row, token)
                behind = self.release(behind, 1, 1)
            for turn in cutlass.range_constexpr(first - lead, early):  # of a K of few stages
                if waiting:
                    self.end.store(turn, row, token)
            self.final.fill(0.0)
            self.release(behind, 1, 0)
            if const_expr(gemm.promote):
                self.promote()
            for turn in cutlass.range_constexpr(early, early + with_stores):
                state = self.interval(state, step, waiting, turn, row, token)
            for turn in cutlass.range_constexpr(early + with_stores, gemm.turns):  # likewise
                if waiting:
                    self.end.store(turn, row, token)
            for _ in cutlass.range(intervals - with_stores, unroll=1):
                state = self.interval(state, step, False, 0, row, token)
            row, token = self.tiles.coordinates(tile)  # not before: its division would spill
            behind = state.clone()
            state = self.multiply(state, last, gemm.promote)
            self.end.load(row, token)
            self.release(behind, last, 0)
            if const_expr(last > 0 or not gemm.promote):
                self.promote()
        self.end.begin(row, token)
        for turn in cutlass.range_constexpr(gemm.turns):
            self.end.store(turn, row, token)
        self.end.finish()

    @cute.jit
    def interval(self, state, stages: cutlass.Constexpr, waiting, turn: cutlass.Constexpr, row, token):
        """Multiply and promote. While the tensor cores have the whole interval to do, a part of the finished tile
        leaves, if one is ``waiting``."""
        behind = state.clone()
        state = self.multiply(state, stages, self.gemm.promote)
        if waiting:
            self.end.store(turn, row, token)
        self.release(behind, stages, 0)
        if const_expr(self.gemm.promote):
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
        for i in cutlass.range_constexpr(cute.size(self.final)):
            self.final[i] = self.final[i] + self.partial[i]
