"""The ring of stages of the mma.sync GEMM: K slices of a weight and a token tile in shared memory, and their loads.

A stage is filled when its ``full`` barrier completes a phase, and free when its ``empty`` barrier does. There is no
producer warp: a ninth warp would leave the eight that multiply 168 registers a thread (an SM's quarter holds 16384).
``TmaLoads`` are one warp's work, ``AsyncLoads`` every thread's.

Weight rows lie in shared memory in another order than in global memory, so that a thread's accumulators are 16
neighbouring ones: 8 gates and the ups of the same outputs, 16 bytes of y, or 32 bytes of out. Of each block of 64 rows,
those of n8 atom j are 16 t + 2 j + e, for t = 0 to 3, e = 0 to 1: an accumulator's column is 2 (lane mod 4) + e.
"""

import cutlass
import cutlass.cute as cute
from cutlass import Float8E4M3FN, Int32, Int64
from cutlass.memory import SmemAllocator

from . import operands, ptx

LANES = 32
BLOCK = 64
"""Weight rows of a warp."""

BLOCK_ORDER, BLOCK_STRIDES = (2, 4, 8), (1, 16, 2)
"""A block's rows as they follow each other in shared memory: shape and strides in rows, innermost first."""

CHUNK = 16
"""Bytes of a row of an 8 x 16 matrix; what a thread copies at once."""


def source_row(row):
    """The row of a block that is the ``row``-th in shared memory."""
    return row % 2 + row // 2 % 4 * 16 + row // 8 * 2


def place(row, chunk, stage_k: int):
    """Where ``operands.smem_layout`` puts a chunk of a row, in bytes. A chunk c further on: xor 16 c."""
    swizzle = row % 8 if stage_k == 128 else row // 2 % 4
    return row * stage_k + (chunk ^ swizzle) * CHUNK


class Ring:
    """Barriers and memory of the stages."""

    def __init__(self, gemm, w_smem: cute.ComposedLayout, a_smem: cute.ComposedLayout):
        self.gemm, smem = gemm, SmemAllocator()
        self.full, self.empty = (smem.allocate_array(Int64, gemm.tile.stages) for _ in range(2))
        self.w, self.a = (
            smem.allocate_tensor(Float8E4M3FN, layout.outer, byte_alignment=1024, swizzle=layout.inner)
            for layout in (w_smem, a_smem)
        )
        self.w_bytes, self.a_bytes = (rows * gemm.tile.stage_k for rows in (gemm.tile.rows, gemm.tile.tokens))

    @cute.jit
    def init_barriers(self, thread):
        """Every thread arrives at ``empty``, not one for its warp: the race checker understands it."""
        threads = self.gemm.tile.threads
        if thread == 0:
            for stage in cutlass.range_constexpr(self.gemm.tile.stages):
                cute.arch.mbarrier_init(self.full + stage, 1 if self.gemm.tma else threads)
                cute.arch.mbarrier_init(self.empty + stage, threads)
            ptx.fence_barrier_init()
        cute.arch.barrier()


class TmaLoads:
    """By TMA, from one warp. What is outside the matrices arrives as zeros."""

    def __init__(self, gemm, ring: Ring, w_tma, w_tiles, a_tma, a_tiles, thread):
        self.ring, self.warp = ring, cute.arch.make_warp_uniform(thread // LANES)
        self.w_tma, self.a_tma = w_tma, a_tma
        self.to_w, self.from_w = operands.tma_pair(
            w_tma, ring.w, cute.local_tile(w_tiles, gemm.tile.w_box, (None, None))
        )
        self.to_a, self.from_a = operands.tma_pair(
            a_tma, ring.a, cute.local_tile(a_tiles, gemm.tile.a_box, (None, None))
        )
        self.aimed = cute.make_rmem_tensor(2, Int32)

    @staticmethod
    def sources(gemm, w_q: cute.Tensor, a_q: cute.Tensor, w_smem, a_smem):
        """On the host: TMA's view of weights and activations, for the constructor."""
        row = w_q.stride[0]
        rows = ((*BLOCK_ORDER, cute.size(w_q, mode=[0]) // BLOCK), gemm.product.k)
        strides = ((*(n * row for n in BLOCK_STRIDES), BLOCK * row), 1)
        w_q = cute.make_tensor(w_q.iterator, cute.make_layout(rows, stride=strides))
        w = operands.tma_load(w_q, w_smem, gemm.tile.w_box)
        a = operands.tma_load(a_q, a_smem, gemm.tile.a_box)
        return (*w, *a)

    @cute.jit
    def aim(self, row, token):
        """Load this tile from now on."""
        self.aimed[0], self.aimed[1] = row, token

    @cute.jit
    def weights(self, state, k):
        """Wait until the stage is free, say how many bytes it will get, and start those of the weights."""
        ring = self.ring
        if self.warp == 0:
            full = ring.full + state.index
            ptx.wait(ring.empty + state.index, state.phase)
            with cute.arch.elect_one():
                cute.arch.mbarrier_arrive_and_expect_tx(full, ring.w_bytes + ring.a_bytes)
            cute.copy(self.w_tma, self.from_w[None, self.aimed[0], k], self.to_w[None, state.index], tma_bar_ptr=full)

    @cute.jit
    def activations(self, state, k):
        if self.warp == 0:
            full = self.ring.full + state.index
            cute.copy(self.a_tma, self.from_a[None, self.aimed[1], k], self.to_a[None, state.index], tma_bar_ptr=full)


class AsyncLoads:
    """By cp.async, 16 bytes a thread. In place of what is outside the matrices something inside arrives, which nobody
    uses."""

    def __init__(self, gemm, ring: Ring, w_q: cute.Tensor, a_q: cute.Tensor, thread):
        self.gemm, self.ring, self.w_q, self.a_q = gemm, ring, w_q, a_q
        chunks = gemm.tile.stage_k // CHUNK
        self.at_once = gemm.tile.threads // chunks  # rows
        self.row, self.chunk = thread // chunks, thread % chunks
        self.place = place(self.row, self.chunk, gemm.tile.stage_k)
        # Addresses of what this thread copies next.
        self.next_w = cute.make_rmem_tensor(gemm.tile.rows // self.at_once, Int64)
        self.next_a = cute.make_rmem_tensor(gemm.tile.tokens // self.at_once, Int64)

    @cute.jit
    def aim(self, row, token):
        gemm, chunk = self.gemm, self.chunk * CHUNK
        last_block = cute.size(self.w_q, mode=[0]) // BLOCK - 1
        for i in cutlass.range_constexpr(cute.size(self.next_w)):
            within = self.row + i * self.at_once
            block = cutlass.min(row * gemm.tile.blocks + within // BLOCK, last_block)
            at = block * BLOCK + source_row(within % BLOCK)
            self.next_w[i] = self.w_q.iterator.toint() + Int64(at) * gemm.product.k + chunk
        last = cute.size(self.a_q, mode=[0]) - 1
        for i in cutlass.range_constexpr(cute.size(self.next_a)):
            index = cutlass.min(token * gemm.tile.tokens + self.row + i * self.at_once, last)
            self.next_a[i] = self.a_q.iterator.toint() + Int64(index) * gemm.product.k + chunk

    @cute.jit
    def weights(self, state, _k):
        ptx.wait(self.ring.empty + state.index, state.phase)
        self.copy(self.next_w, self.ring.w.iterator.toint() + state.index * self.ring.w_bytes)

    @cute.jit
    def activations(self, state, _k):
        self.copy(self.next_a, self.ring.a.iterator.toint() + state.index * self.ring.a_bytes)
        ptx.arrive_when_copied(self.ring.full + state.index)

    @cute.jit
    def copy(self, source: cute.Tensor, stage):
        """``at_once`` is a multiple of 8, over which the swizzle repeats."""
        stage_k = self.gemm.tile.stage_k
        for i in cutlass.range_constexpr(cute.size(source)):
            ptx.copy_async(stage + self.place + i * self.at_once * stage_k, source[i])
            source[i] += stage_k
