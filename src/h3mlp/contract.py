"""The arithmetic contract of the operators: what every backend computes, bit for bit where it says so.

Notation: RN is IEEE round to nearest even in FP32, without flush to zero. ``fma(a, b, c)`` is RN(a * b + c) with the
product not rounded. bf16() and e4m3() round to nearest even. M rows of x, H = hidden size, F = FFN width, R = rows of
the AdaLN tables, i = adaln_index[row]. The FC1 operator is steps 1 to 11, the MLP all of them.

Stage 1, RMSNorm + AdaLN + quantization, per row. Bit-identical on every backend.

 1. ``ss = sum of x^2``. The row is cut into H/8 vectors of 8 consecutive elements. Within a vector
    ``p = fma(x_k, x_k, p)`` for k = 0..7, from p = 0. The H/8 partial sums, padded with +0 to a power of two, are added
    as a halving tree: ``p[:n/2] + p[n/2:]`` until one is left.
 2. ``rstd = RN(1 / RN(sqrt(RN(RN(ss / H) + eps))))``, eps rounded to FP32.
 3. ``n = bf16(RN(RN(x * rstd) * w))``: one BF16 rounding, after the weight.
 4. ``sp1 = bf16(RN(1 + scale[i]))``.
 5. ``a = bf16(fma(n, sp1, shift[i]))``: the product of two BF16 is not rounded. With ``modulation="eager"`` it is, as
    in BF16 torch: ``a = bf16(RN(bf16(RN(n * sp1)) + shift[i]))``.
 6. An index outside [0, R): a = +0 for the whole row, whatever x holds.
    Without tables and index, as in the model's token refiner, steps 4 to 6 are left out: a = n.
 7. ``s_row = RN(max(amax |a|, 1e-12) / 448)``, NaN ignored in amax.
 8. ``a_q = e4m3(RN(a / s_row))``, saturating at 448, NaN to 0x7F, the sign of zero kept.

Stage 2, GEMM + SwiGLU.

 9. ``acc = a_q . w_q`` over all of H, accumulated in FP32 or better; ``accumulate="fast"`` lets Hopper do worse.
10. ``h = bf16(RN(RN(acc * s_row) * w_scale))``.
11. ``y = bf16(RN(g * h_up))`` with ``g = bf16(silu(h_gate))``, ``silu(v) = v / (1 + exp(-v))`` in FP32.

Quantization of y, per row. Given y, bit-identical on every backend.

12. ``s_y = RN(max(amax |y|, 1e-12) / 448)``, NaN ignored in amax, over the F columns of y.
13. ``y_q = e4m3(RN(y / s_y))``, as step 8.

Stage 3, GEMM + gated residual.

14. ``acc2 = y_q . w2_q`` over all of F, accumulated as in step 9.
15. ``o = bf16(RN(RN(acc2 * s_y) * w2_scale))``.
16. ``p = bf16(RN(gate[i] * o))`` and ``out = bf16(RN(residual + p))``. An index outside [0, R): out = residual, bit for
    bit, whatever else the row holds. Without tables, gate and index: ``out = bf16(RN(residual + o))``.

All divisions (by 448, by s_row, by s_y) are true divisions: a multiplication by the reciprocal flips ties. A NaN in a
row of y makes the whole row of o NaN, and so of out where the index is inside.

Why the order of step 1: lane l of a warp that loads 16 bytes a lane owns vectors l, l + 32, l + 64, ... so the upper
levels of the tree are additions within one thread and the last five are one butterfly over the warp; a block of
several warps exchanges one value a lane through shared memory. One order, and every mapping of threads can follow it.

Weights. ``w_scale = RN(max(amax |row|, 1e-12) / 448)``, ``w_q = e4m3(RN(row / w_scale))``, saturating; a NaN in a row
makes its scale NaN. FC1's row order: packed row ``16 * (c // 8) + c % 8 + 8 * is_up`` holds output column c, that is
eight gate rows, then the eight up rows of the same columns. The n8 atoms of a wgmma or mma.sync accumulator then
alternate between gate and up, so one thread holds both halves of an output and SwiGLU needs no shuffle. The rows of FC2
stay in their order, that of out's columns; its columns are those of y.
"""

from typing import NamedTuple

import torch

HIDDEN = 5376
FFN = 14336
FC1_ROWS = 2 * FFN
ADALN_ROWS = 9
EPS = 1e-5

MAX_ROWS = 2**24
HIDDEN_MULTIPLE = 128
FFN_MULTIPLE = 64

ACTIVATION = torch.bfloat16
QUANTIZED = torch.float8_e4m3fn
SCALE = torch.float32
INDEX = (torch.int32, torch.int64)

OPERATORS = ("fc1", "mlp")
"""FC1 with what precedes and follows it, and the whole half."""

ACCUMULATE = ("fp32", "fast")
"""How stages 2 and 3 may add. Fast: within the tensor cores alone, which on Hopper keep about 13 bits and truncate."""

MODULATION = ("fused", "eager")
"""How often step 5 rounds to BF16: once, or the product too, as plain torch does."""

E4M3_MAX = 448.0
AMAX_FLOOR = 1e-12
VECTOR = 8
"""Elements of one 16-byte BF16 vector: the unit of the summation order."""

ROW_GROUP = 8
"""Gate rows, then up rows, that stand together in the packed weight."""

PACKED = "gate8_up8"
HALVES = "gate_up"
"""The two row orders: packed, and all gate rows before all up rows."""

GATE_ORDER = (HALVES, "up_gate")
"""How checkpoints store FC1: MiniMax's own has the gate rows first, that of diffusers the up rows (its "value")."""


FP8_MMA_FORM = (-1, 0, 2)
"""How the MLP may be asked to multiply where the GPU has a choice: as measured, plain, with unit block scales."""


class FC1Inputs(NamedTuple):
    """What the FC1 operator reads, in the order of its signature. Scale, shift and index are all there or all None."""

    x: torch.Tensor  # BF16 [M, H], unit inner stride
    x_norm_weight: torch.Tensor  # BF16 [H]
    adaln_scale: torch.Tensor | None  # BF16 [R, H], unit inner stride
    adaln_shift: torch.Tensor | None  # BF16 [R, H], unit inner stride
    adaln_index: torch.Tensor | None  # int32 or int64 [M]
    fc1_weight_q: torch.Tensor  # E4M3 [2F, H], packed row order
    fc1_weight_scale: torch.Tensor  # FP32 [2F], packed row order


class FC1Buffers(NamedTuple):
    """What the FC1 operator writes."""

    out: torch.Tensor  # BF16 [M, F]
    workspace_q: torch.Tensor  # E4M3 [M, H]
    workspace_scale: torch.Tensor  # FP32 [M]


class MLPInputs(NamedTuple):
    """What the MLP reads, in the order of its signature. Scale, shift, index and gate are all there or all None."""

    x: torch.Tensor  # BF16 [M, H], unit inner stride
    x_norm_weight: torch.Tensor  # BF16 [H]
    adaln_scale: torch.Tensor | None  # BF16 [R, H], unit inner stride
    adaln_shift: torch.Tensor | None  # BF16 [R, H], unit inner stride
    adaln_index: torch.Tensor | None  # int32 or int64 [M]
    gate: torch.Tensor | None  # BF16 [R, H], unit inner stride
    residual: torch.Tensor  # BF16 [M, H], unit inner stride
    fc1_weight_q: torch.Tensor  # E4M3 [2F, H], packed row order
    fc1_weight_scale: torch.Tensor  # FP32 [2F], packed row order
    fc2_weight_q: torch.Tensor  # E4M3 [H, F]
    fc2_weight_scale: torch.Tensor  # FP32 [H]

    @property
    def fc1(self) -> FC1Inputs:
        """What of it FC1 reads."""
        return FC1Inputs(*self[:5], *self[7:9])

    def rows(self, block: slice | torch.Tensor) -> "MLPInputs":
        """The same for some rows of x, given as a slice or by their numbers."""
        index = None if self.adaln_index is None else self.adaln_index[block]
        return self._replace(x=self.x[block], residual=self.residual[block], adaln_index=index)


class MLPBuffers(NamedTuple):
    """What the MLP writes. A workspace that is None is left to the backend."""

    out: torch.Tensor  # BF16 [M, H]
    workspace_a_q: torch.Tensor | None = None  # E4M3 [M, H]
    workspace_a_scale: torch.Tensor | None = None  # FP32 [M]
    workspace_y: torch.Tensor | None = None  # BF16 [M, F]
    workspace_y_q: torch.Tensor | None = None  # E4M3 [M, F]
    workspace_y_scale: torch.Tensor | None = None  # FP32 [M]

    @property
    def fc1(self) -> FC1Buffers:
        """What of it FC1 writes."""
        return FC1Buffers(self.workspace_y, self.workspace_a_q, self.workspace_a_scale)


def mlp_buffer_rows(hidden: int, ffn: int) -> dict[str, tuple[torch.dtype, tuple[int, ...]]]:
    """dtype of each of the MLP's buffers and shape of its rows, by name, in order."""
    return {
        "out": (ACTIVATION, (hidden,)),
        "workspace_a_q": (QUANTIZED, (hidden,)),
        "workspace_a_scale": (SCALE, ()),
        "workspace_y": (ACTIVATION, (ffn,)),
        "workspace_y_q": (QUANTIZED, (ffn,)),
        "workspace_y_scale": (SCALE, ()),
    }


_TAG = "_h3mlp_row_order"


def tag_row_order(tensor: torch.Tensor, order: str) -> torch.Tensor:
    """Note the row order on the tensor object itself. Copies and views do not inherit the note."""
    setattr(tensor, _TAG, order)
    return tensor


def row_order(tensor: torch.Tensor) -> str | None:
    """The row order noted on this tensor object, or None where nothing is known."""
    return getattr(tensor, _TAG, None)
