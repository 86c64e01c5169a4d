"""The arithmetic contract (``h3mlp.contract``) in plain torch, one function a formula line: slow, exact, any device.

Stage 1 is the definition that every backend must reproduce bit for bit. The GEMMs accumulate in FP64, where they are
exact: a product of two E4M3 numbers is a multiple of 2^-18 below 2^18, so a sum of up to 2^17 of them fits in 53 bits.
"""

from dataclasses import dataclass

import torch

from . import contract

ACCUMULATE_ROWS = 2048
"""Rows of the weight held in FP64 at a time: 88 MB at H = 5376, where the whole weight would take 1.2 GB."""


@dataclass(frozen=True)
class Stage1:
    """Every value of stage 1, in the contract's order."""

    sum_of_squares: torch.Tensor  # FP32 [M]
    rstd: torch.Tensor  # FP32 [M]
    n: torch.Tensor  # BF16 [M, H]
    a: torch.Tensor  # BF16 [M, H]
    s_row: torch.Tensor  # FP32 [M]
    a_q: torch.Tensor  # E4M3 [M, H]


@dataclass(frozen=True)
class Intermediates(Stage1):
    """Every value of FC1's contract. ``h`` has gate columns first, then up columns."""

    acc: torch.Tensor  # FP32 [M, 2F], packed column order
    h: torch.Tensor  # BF16 [M, 2F]
    y: torch.Tensor  # BF16 [M, F]


@dataclass(frozen=True)
class MLPIntermediates(Intermediates):
    """Every value of the MLP's."""

    s_y: torch.Tensor  # FP32 [M]
    y_q: torch.Tensor  # E4M3 [M, F]
    acc2: torch.Tensor  # FP32 [M, H]
    o: torch.Tensor  # BF16 [M, H]
    out: torch.Tensor  # BF16 [M, H]


def divide(a: torch.Tensor, b: torch.Tensor | float) -> torch.Tensor:
    """RN(a / b). On CUDA torch turns a division by a Python number into a product with its reciprocal; not here."""
    if not isinstance(b, torch.Tensor):
        b = torch.full((), b, dtype=a.dtype, device=a.device)
    return a / b


def fma(a: torch.Tensor, b: torch.Tensor, c: torch.Tensor) -> torch.Tensor:
    """RN(a * b + c) for BF16 a and b and BF16 or FP32 c, rounded once, as FP32.

    The product has 16 significant bits and is exact in FP64. Where the FP64 sum is inexact, its operands lie more than
    2^29 apart and the larger is an FP32 number (or overflows FP32), so the second rounding returns it unchanged.
    """
    return (a.double() * b.double() + c.double()).float()


def tree_sum(p: torch.Tensor) -> torch.Tensor:
    """Sum over the last dimension as a halving tree in FP32, padded with +0 to a power of two."""
    width = 1 << (p.shape[-1] - 1).bit_length()
    p = torch.nn.functional.pad(p, (0, width - p.shape[-1]))
    while width > 1:
        width //= 2
        p = p[..., :width] + p[..., width:]
    return p.squeeze(-1)


def sum_of_squares(x: torch.Tensor) -> torch.Tensor:
    """Step 1: BF16 [M, H] to FP32 [M]."""
    vectors = x.unflatten(-1, (-1, contract.VECTOR))
    p = torch.zeros(vectors.shape[:-1], dtype=torch.float32, device=x.device)
    for k in range(contract.VECTOR):
        p = fma(vectors[..., k], vectors[..., k], p)
    return tree_sum(p)


def reciprocal_rms(ss: torch.Tensor, hidden: int, eps: float) -> torch.Tensor:
    """Step 2: FP32 [M] to FP32 [M].

    The root goes through FP64, whose rounding to FP32 is RN (53 >= 2 * 24 + 2 bits): torch's own FP32 root on x86 is a
    vector library's and misses RN by one ulp for 16% of arguments.
    """
    root = (divide(ss, hidden) + eps).double().sqrt().float()
    return divide(torch.ones_like(root), root)


def rms_norm(x: torch.Tensor, rstd: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """Step 3: BF16 [M, H]."""
    return (x.float() * rstd[:, None] * weight.float()).bfloat16()


def scale_plus_one(scale: torch.Tensor) -> torch.Tensor:
    """Step 4: BF16, any shape."""
    return (scale.float() + 1).bfloat16()


def modulate(n: torch.Tensor, sp1: torch.Tensor, shift: torch.Tensor) -> torch.Tensor:
    """Step 5, fused: BF16 [M, H], with the table rows already gathered."""
    return fma(n, sp1, shift).bfloat16()


def modulate_eager(n: torch.Tensor, sp1: torch.Tensor, shift: torch.Tensor) -> torch.Tensor:
    """Step 5, eager: the product rounded to BF16 before the sum is."""
    return ((n.float() * sp1.float()).bfloat16().float() + shift.float()).bfloat16()


def adaln(
    n: torch.Tensor, scale: torch.Tensor, shift: torch.Tensor, index: torch.Tensor, modulation: str = "fused"
) -> torch.Tensor:
    """Steps 4 to 6: BF16 [M, H] from n [M, H], tables [R, H] and index [M]; +0 where the index is outside [0, R)."""
    inside = (index >= 0) & (index < scale.shape[0])
    row = torch.where(inside, index, 0)
    step5 = {"fused": modulate, "eager": modulate_eager}[modulation]
    a = step5(n, scale_plus_one(scale[row]), shift[row])
    return torch.where(inside[:, None], a, torch.zeros_like(a))


def e4m3_scale(amax: torch.Tensor) -> torch.Tensor:
    """RN(max(amax, 1e-12) / 448), of activation rows and of weight rows: FP32, any shape. A NaN stays NaN."""
    return divide(amax.clamp(min=contract.AMAX_FLOOR), contract.E4M3_MAX)


def row_scale(a: torch.Tensor) -> torch.Tensor:
    """Steps 7 and 12: BF16 [M, N] to FP32 [M]."""
    magnitude = a.float().abs().nan_to_num_(nan=0.0, posinf=torch.inf)
    return e4m3_scale(magnitude.amax(-1))


def saturate_(v: torch.Tensor) -> torch.Tensor:
    """Ready FP32 ``v`` for torch's conversion to E4M3, in place: within +-448, and every NaN positive so that its code
    is 0x7F (torch keeps a NaN's sign, the GPU's cvt does not)."""
    v.nan_to_num_(nan=torch.nan, posinf=contract.E4M3_MAX, neginf=-contract.E4M3_MAX)
    return v.clamp_(-contract.E4M3_MAX, contract.E4M3_MAX)


def quantize(a: torch.Tensor, s_row: torch.Tensor) -> torch.Tensor:
    """Steps 8 and 13: BF16 [M, N] and FP32 [M] to E4M3 [M, N]."""
    return saturate_(divide(a.float(), s_row[:, None])).to(contract.QUANTIZED)


def norm_quant(
    x: torch.Tensor,
    x_norm_weight: torch.Tensor,
    adaln_scale: torch.Tensor | None = None,
    adaln_shift: torch.Tensor | None = None,
    adaln_index: torch.Tensor | None = None,
    eps: float = contract.EPS,
    modulation: str = "fused",
) -> Stage1:
    """Steps 1 to 8. Shapes as in ``contract.FC1Inputs``."""
    ss = sum_of_squares(x)
    rstd = reciprocal_rms(ss, x.shape[-1], eps)
    n = rms_norm(x, rstd, x_norm_weight)
    a = n if adaln_index is None else adaln(n, adaln_scale, adaln_shift, adaln_index, modulation)
    s_row = row_scale(a)
    return Stage1(ss, rstd, n, a, s_row, quantize(a, s_row))


def accumulate(a_q: torch.Tensor, w_q: torch.Tensor) -> torch.Tensor:
    """Steps 9 and 14: E4M3 [M, K] and E4M3 [N, K] to FP32 [M, N], exact up to the one rounding to FP32."""
    a = a_q.double()
    return torch.cat([(a @ rows.double().T).float() for rows in w_q.split(ACCUMULATE_ROWS)], dim=1)


def dequantize(acc: torch.Tensor, s_row: torch.Tensor, w_scale: torch.Tensor) -> torch.Tensor:
    """Steps 10 and 15: FP32 [M, N] to BF16 [M, N]."""
    return (acc * s_row[:, None] * w_scale).bfloat16()


def gate_and_up(h: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The gate and up halves [M, F] of packed columns [M, 2F]."""
    groups = h.unflatten(-1, (-1, 2, contract.ROW_GROUP))
    return groups[..., 0, :].flatten(-2), groups[..., 1, :].flatten(-2)


def silu(v: torch.Tensor) -> torch.Tensor:
    """v / (1 + exp(-v)) in FP32, rounded to BF16."""
    v = v.float()
    return (v / (1 + torch.exp(-v))).bfloat16()


def swiglu(gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
    """Step 11: BF16 [M, F]."""
    return (silu(gate).float() * up.float()).bfloat16()


def gated_residual(
    o: torch.Tensor, gate: torch.Tensor | None, residual: torch.Tensor, index: torch.Tensor | None
) -> torch.Tensor:
    """Step 16: BF16 [M, H] from o and residual [M, H], gate [R, H] and index [M]. BF16 torch rounds after each
    operation, a NaN of a residual aside, whose bits ``where`` alone keeps."""
    if index is None:
        return residual + o
    inside = (index >= 0) & (index < gate.shape[0])
    p = gate[torch.where(inside, index, 0)] * o
    return torch.where(inside[:, None], residual + p, residual)


def fc1_swiglu_fp8(
    x: torch.Tensor,
    x_norm_weight: torch.Tensor,
    adaln_scale: torch.Tensor | None,
    adaln_shift: torch.Tensor | None,
    adaln_index: torch.Tensor | None,
    fc1_weight_q: torch.Tensor,
    fc1_weight_scale: torch.Tensor,
    *,
    eps: float = contract.EPS,
    modulation: str = "fused",
    return_intermediates: bool = False,
) -> torch.Tensor | Intermediates:
    """The operator, composed from the functions above. Arguments as ``h3mlp.fc1_swiglu_fp8``, which checks them.

    Returns y, BF16 [M, F], or all ``Intermediates`` on request.
    """
    stage1 = norm_quant(x, x_norm_weight, adaln_scale, adaln_shift, adaln_index, eps, modulation)
    acc = accumulate(stage1.a_q, fc1_weight_q)
    gate, up = gate_and_up(dequantize(acc, stage1.s_row, fc1_weight_scale))
    y = swiglu(gate, up)
    if not return_intermediates:
        return y
    return Intermediates(**vars(stage1), acc=acc, h=torch.cat([gate, up], dim=-1), y=y)


def mlp_fp8(
    x: torch.Tensor,
    x_norm_weight: torch.Tensor,
    adaln_scale: torch.Tensor | None,
    adaln_shift: torch.Tensor | None,
    adaln_index: torch.Tensor | None,
    gate: torch.Tensor | None,
    residual: torch.Tensor,
    fc1_weight_q: torch.Tensor,
    fc1_weight_scale: torch.Tensor,
    fc2_weight_q: torch.Tensor,
    fc2_weight_scale: torch.Tensor,
    *,
    eps: float = contract.EPS,
    modulation: str = "fused",
    return_intermediates: bool = False,
) -> torch.Tensor | MLPIntermediates:
    """The MLP, composed from the functions above. Arguments as ``h3mlp.mlp_fp8``, which checks them.

    Returns out, BF16 [M, H], or all ``MLPIntermediates`` on request.
    """
    fc1 = fc1_swiglu_fp8(
        x,
        x_norm_weight,
        adaln_scale,
        adaln_shift,
        adaln_index,
        fc1_weight_q,
        fc1_weight_scale,
        eps=eps,
        modulation=modulation,
        return_intermediates=True,
    )
    s_y = row_scale(fc1.y)
    y_q = quantize(fc1.y, s_y)
    acc2 = accumulate(y_q, fc2_weight_q)
    o = dequantize(acc2, s_y, fc2_weight_scale)
    out = gated_residual(o, gate, residual, adaln_index)
    if not return_intermediates:
        return out
    return MLPIntermediates(**vars(fc1), s_y=s_y, y_q=y_q, acc2=acc2, o=o, out=out)
