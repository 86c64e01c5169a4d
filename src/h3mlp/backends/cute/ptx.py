"""The instructions that CuTe DSL has no good word for, and BF16 in pairs. A pair is a Uint32, its first value below."""

import cutlass.cute as cute
from cutlass import Float32, Int32, Int64, Uint32
from cutlass._mlir.dialects import llvm
from cutlass.base_dsl import Arch
from cutlass.cutlass_dsl import BaseDSL, T, dsl_user_op


@dsl_user_op
def asm(result, operands, text: str, constraints: str, side_effects: bool = False, *, loc=None, ip=None):
    """Inline PTX. The rounding stands in each instruction's name, and none of ours flushes subnormals."""
    values = [operand.ir_value(loc=loc, ip=ip) for operand in operands]
    return llvm.inline_asm(result, values, text, constraints, has_side_effects=side_effects, loc=loc, ip=ip)


def architecture() -> Arch:
    """What is compiled for."""
    return BaseDSL._get_dsl().get_arch_enum()


def hopper_or_later() -> bool:
    """Whether what is compiled for has TMA, waits at barriers that suspend, and kernels that begin before their
    predecessor ends."""
    return architecture() >= Arch.sm_90


def wait(barrier: cute.Pointer, phase: Int32) -> None:
    """Until the phase of this parity of a shared-memory barrier is complete.

    The DSL's own wait gives the hardware a time limit to sleep, and waking up from that sleep costs the GEMM 2%.
    """
    test = "try_wait" if hopper_or_later() else "test_wait"
    text = f"{{ .reg .pred done; WAIT: mbarrier.{test}.parity.shared::cta.b64 done, [$0], $1; @!done bra WAIT; }}"
    asm(None, (barrier.toint(), Int32(phase)), text, "r,r,~{memory}", side_effects=True)


def arrive(barrier: cute.Pointer) -> None:
    """Count one arrival at a shared-memory barrier."""
    text = "{ .reg .b64 state; mbarrier.arrive.shared::cta.b64 state, [$0]; }"
    asm(None, (barrier.toint(),), text, "r,~{memory}", side_effects=True)


def copy_async(target: Int32, source: Int64) -> None:
    """Start a copy of 16 bytes from global to shared memory, past the L1."""
    asm(None, (target, source), "cp.async.cg.shared.global [$0], [$1], 16;", "r,l,~{memory}", side_effects=True)


def prefetch_l2(address: Int64) -> None:
    """Bring a line of 128 bytes to the L2."""
    asm(None, (address,), "prefetch.global.L2 [$0];", "l", side_effects=True)


def arrive_when_copied(barrier: cute.Pointer) -> None:
    """Count one arrival at a shared-memory barrier when this thread's copies so far are complete."""
    text = "cp.async.mbarrier.arrive.noinc.shared::cta.b64 [$0];"
    asm(None, (barrier.toint(),), text, "r,~{memory}", side_effects=True)


def fence_barrier_init() -> None:
    """Make initialized barriers visible to TMA, where there is TMA."""
    if hopper_or_later():
        cute.arch.mbarrier_init_fence()


def launch_dependents() -> None:
    """Let the next kernel of the stream begin, if it was launched to wait by itself for what this one writes."""
    if hopper_or_later():
        cute.arch.griddepcontrol_launch_dependents()


def wait_for_previous_kernel() -> None:
    """Until all that the kernel before this one on the stream has written is visible."""
    if hopper_or_later():
        cute.arch.griddepcontrol_wait()


def thread_index() -> Int32:
    """threadIdx.x, read once: the compiler would read the special register again in every loop, 50 cycles each time."""
    return Int32(asm(T.i32(), (), "mov.u32 $0, %tid.x;", "=r", side_effects=True))


def bf16x2(first: Float32, second: Float32) -> Uint32:
    """Two FP32 rounded to nearest even. A conversion of one value alone is a quarter as fast."""
    return Uint32(asm(T.i32(), (second, first), "cvt.rn.bf16x2.f32 $0, $1, $2;", "=r,f,f"))


def low(pair: Uint32) -> Float32:
    return (pair << 16).bitcast(Float32)


def high(pair: Uint32) -> Float32:
    return (pair & Uint32(0xFFFF0000)).bitcast(Float32)


def halves(pair: Uint32) -> tuple[Float32, Float32]:
    """A pair as two FP32."""
    return low(pair), high(pair)


def fma_bf16x2(a: Uint32, b: Uint32, c: Uint32) -> Uint32:
    """a * b + c of pairs, rounded once, to nearest even."""
    return Uint32(asm(T.i32(), (a, b, c), "fma.rn.bf16x2 $0, $1, $2, $3;", "=r,r,r,r"))


def multiply_bf16x2(a: Uint32, b: Uint32) -> Uint32:
    """a * b of pairs, rounded to nearest even: an fma with -0, which changes no product."""
    return fma_bf16x2(a, b, Uint32(0x80008000))


def add_bf16x2(a: Uint32, b: Uint32) -> Uint32:
    """a + b of pairs, rounded to nearest even."""
    return fma_bf16x2(a, Uint32(0x3F803F80), b)
