"""The quantization of y on every architecture: steps 12 and 13 of ``h3mlp.contract``, to the bit.

y BF16 [M, F] -> y_q E4M3 [M, F] and s_y FP32 [M]. F is a compile-time constant, M is not. y is read once: a CTA has one
row, 28 KB at F = 14336, in its registers while it looks for the largest magnitude. Three CTAs an SM have twice the
bytes on their way that keep DRAM busy.
"""

from dataclasses import dataclass

import cutlass
import cutlass.cute as cute
from cutlass import BFloat16, Float8E4M3FN, Float32, Uint32
from cutlass.memory import SmemAllocator

from . import prologue, ptx
from .prologue import VECTOR, WORDS
from .vectors import CODE_BYTES, VECTOR_BYTES, address_of, vector_at

LANES = 32
MOST_THREADS = 1024
OWN = 4
"""Vectors of a thread, unless the row needs more."""


@dataclass(frozen=True)
class QuantizeRows:
    """One specialization of the kernel. The compiled function takes (y, y_q, s_y), which begin at multiples of 16
    bytes, and launches on torch's current stream. M = 0 cannot be launched."""

    columns: int

    name = "quantize_rows"

    @property
    def vectors(self) -> int:
        return self.columns // VECTOR

    @property
    def own(self) -> int:
        return max(OWN, -(-self.vectors // MOST_THREADS))

    @property
    def warps(self) -> int:
        return -(-self.vectors // (self.own * LANES))

    @property
    def threads(self) -> int:
        return self.warps * LANES

    def trace(self) -> tuple[object, tuple]:
        """The function to compile and its fake arguments."""
        rows, fake = cute.sym_int32(), cute.runtime.make_fake_tensor

        def matrix(dtype):
            return fake(dtype, (rows, self.columns), (self.columns, 1), assumed_align=16)

        scales = fake(Float32, (rows,), (1,), assumed_align=4)
        stream = cute.runtime.make_fake_stream(use_tvm_ffi_env_stream=True)
        return self.launch, (matrix(BFloat16), matrix(Float8E4M3FN), scales, stream)

    @cute.jit
    def launch(self, y: cute.Tensor, y_q: cute.Tensor, s_y: cute.Tensor, stream):
        self.kernel(y, y_q, s_y).launch(
            grid=(y.shape[0], 1, 1),
            block=(self.threads, 1, 1),
            min_blocks_per_mp=min(16, max(1, 1536 // self.threads)),
            preferred_smem_carveout=10,  # given, because the compiler would ask a device for its limit otherwise
            stream=stream,
            use_pdl=ptx.hopper_or_later(),
        )

    @cute.kernel
    def kernel(self, y: cute.Tensor, y_q: cute.Tensor, s_y: cute.Tensor):
        ptx.launch_dependents()
        ptx.wait_for_previous_kernel()
        thread = cute.arch.thread_idx()[0]
        # From the last row to the first: the L2 still has the last of y, and then the first of y_q, which FC2 reads.
        row = cute.arch.grid_dim()[0] - 1 - cute.arch.block_idx()[0]
        peaks = SmemAllocator().allocate_tensor(Uint32, cute.make_layout((LANES,)), byte_alignment=16)
        words = cute.make_rmem_tensor((WORDS, self.own), Uint32)
        words.fill(0)
        source, target = address_of(y, row, thread), address_of(y_q, row, thread)
        for j in cutlass.range_constexpr(self.own):
            if self.owns(thread, j):
                cute.autovec_copy(vector_at(source + j * self.threads * VECTOR_BYTES, VECTOR_BYTES), words[None, j])

        peak = prologue.tree([prologue.peak_of(words[None, j]) for j in range(self.own)], prologue.larger)
        bits = prologue.largest(peak)
        if cutlass.const_expr(self.warps > 1):
            peaks[thread // LANES] = bits
            cute.arch.barrier()
            lane = thread % LANES
            bits = prologue.most(cutlass.select_(lane < self.warps, peaks[lane], Uint32(0)))
        scale = prologue.row_scale(bits)
        if thread == 0:
            s_y[row] = scale

        inverse, rest = prologue.inverse(scale)
        for j in cutlass.range_constexpr(self.own):
            codes = cute.make_rmem_tensor(2, Uint32)
            codes[0], codes[1] = prologue.codes(words[None, j], inverse, rest)
            if self.owns(thread, j):
                cute.autovec_copy(codes, vector_at(target + j * self.threads * CODE_BYTES, CODE_BYTES))

    def owns(self, thread, j: int):
        """Whether the thread has its j-th vector: known to the compiler unless the row ends within."""
        return thread + j * self.threads < self.vectors if (j + 1) * self.threads > self.vectors else True
