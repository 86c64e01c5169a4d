"""mma.sync of E4M3 with FP32 accumulators, 16 x 8 x 32, in two forms; and the loads of its operands.

``plain`` is the instruction of Ada. ``unit_scale`` is the block-scaled one of sm_120 and sm_121 with all scales 1: by
what is published the same bits, at twice the rate on GeForce cards, which run the plain one at half rate.
"""

import cutlass.cute as cute
from cutlass import Float32, Int32, Uint32
from cutlass._mlir.dialects import llvm
from cutlass.cutlass_dsl import T, dsl_user_op

from . import ptx
from .forms import UNIT_SCALE

M, N, K = 16, 8, 32

UNIT_SCALES = 0x7F7F7F7F
"""Four scales of 2^0, as UE8M0."""

_OPERANDS = "{$0, $1, $2, $3}, {$4, $5, $6, $7}, {$8, $9}, {$10, $11, $12, $13}"
_CONSTRAINTS = "=f,=f,=f,=f,r,r,r,r,r,r,0,1,2,3"


def multiply(form: str, acc: cute.Tensor, a: cute.Tensor, b: list[Uint32]) -> None:
    """acc += a . b of a warp. A thread's share: 4 FP32 of acc, 4 words of a (16 x 32) and 2 of b (32 x 8)."""
    operands = [*(a[i] for i in range(4)), *b, *(acc[i] for i in range(4))]
    if form == UNIT_SCALE:
        kind, scales = "kind::mxf8f6f4.block_scale.scale_vec::1X.f32.e4m3.e4m3.f32.ue8m0", ", {$14}, {0, 0}" * 2
        operands, constraints = [*operands, Uint32(UNIT_SCALES)], _CONSTRAINTS + ",r"
    else:
        kind, scales, constraints = "f32.e4m3.e4m3.f32", "", _CONSTRAINTS
    text = f"mma.sync.aligned.m16n8k32.row.col.{kind} {_OPERANDS}{scales};"
    for i, value in enumerate(_four(T.f32(), operands, text, constraints)):
        acc[i] = Float32(value)


def load_matrices(words: cute.Tensor, address: Int32, offset: int) -> None:
    """Four matrices of 8 rows of 16 bytes from shared memory, a word of each. A lane gives the address of one row."""
    text = f"ldmatrix.sync.aligned.m8n8.x4.shared::cta.b16 {{$0, $1, $2, $3}}, [$4+{offset}];"
    for i, value in enumerate(_four(T.i32(), [address], text, "=r,=r,=r,=r,r,~{memory}", side_effects=True)):
        words[i] = Uint32(value)


@dsl_user_op
def _four(dtype, operands, text: str, constraints: str, side_effects: bool = False, *, loc=None, ip=None) -> list:
    """Inline PTX with four results."""
    struct = llvm.StructType.get_literal([dtype] * 4)
    result = ptx.asm(struct, operands, text, constraints, side_effects, loc=loc, ip=ip)
    return [llvm.extractvalue(dtype, result, [i], loc=loc, ip=ip) for i in range(4)]
