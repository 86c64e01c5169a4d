"""What becomes of a GEMM's accumulators: steps 10, 11, 15 and 16 of the contract.

Two outputs at a time, as the conversions to BF16 are.
"""

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Uint32

from . import prologue, ptx

LOG2_E = 1.4426950408889634


@cute.jit
def dequantize(
    acc0: Float32, acc1: Float32, s_row0: Float32, s_row1: Float32, w_scale0: Float32, w_scale1: Float32
) -> Uint32:
    """Steps 10 and 15 of two outputs, to two BF16. Three roundings each, the activation scale first."""
    return ptx.bf16x2(acc0 * s_row0 * w_scale0, acc1 * s_row1 * w_scale1)


@cute.jit
def swiglu(h_gate: Uint32, h_up: Uint32) -> Uint32:
    """Step 11 of two outputs."""
    g = ptx.bf16x2(silu(ptx.low(h_gate)), silu(ptx.high(h_gate)))
    return ptx.multiply_bf16x2(g, h_up)


@cute.jit
def silu(v: Float32) -> Float32:
    """v / (1 + exp(-v)). Both approximations are good to about 2^-22, far below the BF16 that follows."""
    return v * cute.arch.rcp_approx(Float32(1.0) + cute.math.exp2(v * Float32(-LOG2_E), fastmath=True))


@cute.jit
def gated_residual(o: Uint32, gate: Uint32, residual: Uint32) -> Uint32:
    """Step 16 of two outputs. A sum of two BF16 in one rounding is that by way of FP32, which has more than 2 * 8 + 2
    bits."""
    return ptx.add_bf16x2(ptx.multiply_bf16x2(o, gate), residual)


@cute.jit
def gate_row(index: cute.Tensor, token: Int32, rows: Int32, gate_rows: Int32) -> Int32:
    """The row of the gate's table for a token, or ``prologue.OUTSIDE``. ``index`` has one word a row, or two, of which
    the lower comes first; or none at all, and every token has row 0."""
    words = cute.size(index) // rows
    row = Int32(0)
    if words > 0:
        row = prologue.table_row_of(index[token * words], gate_rows)
    if words > 1:
        row = cutlass.select_(index[token * words + 1] == 0, row, Int32(prologue.OUTSIDE))
    return row
