"""The few instructions that CuTe DSL has no good word for."""

import cutlass.cute as cute
from cutlass import Float32, Int32
from cutlass._mlir.dialects import llvm
from cutlass.cutlass_dsl import T, dsl_user_op


@dsl_user_op
def wait(barrier: cute.Pointer, phase: Int32, *, loc=None, ip=None) -> None:
    """Until the phase of this parity of a shared-memory barrier is complete.

    The DSL's own wait gives the hardware a time limit to sleep, and waking up from that sleep costs the GEMM 2%.
    """
    operands = [barrier.toint(loc=loc, ip=ip).ir_value(loc=loc, ip=ip), Int32(phase).ir_value(loc=loc, ip=ip)]
    text = "{ .reg .pred done; WAIT: mbarrier.try_wait.parity.shared::cta.b64 done, [$0], $1; @!done bra WAIT; }"
    _asm(None, text, "r,r", operands, True, loc, ip)


@dsl_user_op
def thread_index(*, loc=None, ip=None) -> Int32:
    """threadIdx.x, read once: the compiler would read the special register again in every loop, 50 cycles each time."""
    return Int32(_asm(T.i32(), "mov.u32 $0, %tid.x;", "=r", [], True, loc, ip))


@dsl_user_op
def to_bf16x2(low: Float32, high: Float32, *, loc=None, ip=None) -> Int32:
    """Two FP32 rounded to nearest even. A conversion of one value alone is a quarter as fast."""
    operands = [Float32(v).ir_value(loc=loc, ip=ip) for v in (high, low)]
    return Int32(_asm(T.i32(), "cvt.rn.bf16x2.f32 $0, $1, $2;", "=r,f,f", operands, False, loc, ip))


@cute.jit
def low_of_bf16x2(pair: Int32) -> Float32:
    return (pair << 16).bitcast(Float32)


@cute.jit
def high_of_bf16x2(pair: Int32) -> Float32:
    return (pair & Int32(-0x10000)).bitcast(Float32)


@dsl_user_op
def multiply_bf16x2(a: Int32, b: Int32, *, loc=None, ip=None) -> Int32:
    """a * b of two BF16 pairs, rounded to nearest even, subnormals kept: an fma with -0, which changes no product."""
    minus_zeros = Int32(-0x7FFF8000)
    operands = [Int32(v).ir_value(loc=loc, ip=ip) for v in (a, b, minus_zeros)]
    return Int32(_asm(T.i32(), "fma.rn.bf16x2 $0, $1, $2, $3;", "=r,r,r,r", operands, False, loc, ip))


def _asm(result, text: str, constraints: str, operands: list, side_effects: bool, loc, ip):
    return llvm.inline_asm(
        result,
        operands,
        text,
        constraints,
        has_side_effects=side_effects,
        is_align_stack=False,
        asm_dialect=llvm.AsmDialect.AD_ATT,
        loc=loc,
        ip=ip,
    )
