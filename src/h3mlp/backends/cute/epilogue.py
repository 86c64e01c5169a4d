"""Dequantization and SwiGLU of accumulators that hold gate and up of the same outputs: steps 10 and 11 of the contract.

Two outputs at a time, as the conversions to BF16 are.
"""

import cutlass.cute as cute
from cutlass import Float32, Uint32

from . import ptx

LOG2_E = 1.4426950408889634


@cute.jit
def dequantize(
    acc0: Float32, acc1: Float32, s_row0: Float32, s_row1: Float32, w_scale0: Float32, w_scale1: Float32
) -> Uint32:
    """Step 10 of two outputs: h, two BF16. Three roundings each, the activation scale first."""
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
