"""The arithmetic contract in NumPy and ml_dtypes, written from the text of ``h3mlp.contract`` and from nothing else.

NumPy rounds FP32 to nearest even, keeps subnormals and converts to BF16 and E4M3 through ml_dtypes, so it shares no
code with torch. Where torch computes through FP64, this file goes another way (see ``fma``).
"""

import ml_dtypes
import numpy as np
import torch

BF16 = ml_dtypes.bfloat16
E4M3 = ml_dtypes.float8_e4m3fn
F32 = np.float32


def from_torch(t: torch.Tensor) -> np.ndarray:
    """The same bits as NumPy."""
    if t.dtype == torch.bfloat16:
        return t.contiguous().view(torch.int16).numpy().view(BF16)
    if t.dtype == torch.float8_e4m3fn:
        return t.contiguous().view(torch.uint8).numpy().view(E4M3)
    return t.numpy()


def to_torch(a: np.ndarray) -> torch.Tensor:
    """The same bits as torch."""
    a = np.ascontiguousarray(a)
    if a.dtype == BF16:
        return torch.from_numpy(a.view(np.int16)).view(torch.bfloat16)
    if a.dtype == E4M3:
        return torch.from_numpy(a.view(np.uint8)).view(torch.float8_e4m3fn)
    return torch.from_numpy(a)


def assert_same_bits(got: torch.Tensor, want: np.ndarray, what: str = "value") -> None:
    """Equal bit for bit, where any NaN equals any NaN in BF16 and FP32; E4M3 has one NaN code that counts, 0x7F."""
    have = from_torch(got)
    assert have.shape == want.shape, f"{what}: shape {have.shape}, wanted {want.shape}"
    assert have.dtype == want.dtype, f"{what}: dtype {have.dtype}, wanted {want.dtype}"
    bits = f"u{have.dtype.itemsize}"
    same = have.view(bits) == want.view(bits)
    if have.dtype != E4M3:
        with np.errstate(invalid="ignore"):  # a signalling NaN that was only passed on
            same |= np.isnan(have) & np.isnan(want)
    if not same.all():
        first = tuple(np.argwhere(~same)[0])
        raise AssertionError(
            f"{what}: {(~same).sum()} of {same.size} differ, first at {first}: {have[first]!r} "
            f"(0x{have.view(bits)[first]:x}), wanted {want[first]!r} (0x{want.view(bits)[first]:x})"
        )


def fma(a, b, c):
    """RN(a * b + c) without the double rounding of FP64 then FP32: FP64 rounded to odd, then to FP32.

    Rounding to odd at 53 bits and then to nearest at 24 (or fewer) is the same as rounding once, since 53 >= 24 + 2.
    The error of the FP64 sum comes from Knuth's two-sum.
    """
    p = a.astype(np.float64) * b.astype(np.float64)
    c = np.broadcast_to(c.astype(np.float64), p.shape)
    s = p + c
    t = s - p
    error = (p - (s - t)) + (c - t)
    even = s.view(np.int64) % 2 == 0
    inexact = np.isfinite(s) & (error != 0)
    s = np.where(inexact & even, np.nextafter(s, np.where(error > 0, np.inf, -np.inf)), s)
    return s.astype(F32)


def sum_of_squares(x):
    p = np.zeros((x.shape[0], x.shape[1] // 8), F32)
    for k in range(8):
        p = fma(x[:, k::8], x[:, k::8], p)

    def tree(columns):
        if len(columns) == 1:
            return columns[0]
        half = len(columns) // 2
        return tree([left + right for left, right in zip(columns[:half], columns[half:], strict=True)])

    columns = list(p.T)
    while len(columns) & (len(columns) - 1):
        columns.append(np.zeros(x.shape[0], F32))
    return tree(columns)


def reciprocal_rms(ss, hidden, eps):
    return F32(1) / np.sqrt(ss / F32(hidden) + F32(eps))


def rms_norm(x, rstd, weight):
    return ((x.astype(F32) * rstd[:, None]) * weight.astype(F32)).astype(BF16)


def adaln(n, scale, shift, index, modulation="fused"):
    a = np.zeros(n.shape, BF16)
    for row, i in enumerate(index.tolist()):
        if 0 <= i < scale.shape[0]:
            sp1 = (F32(1) + scale[i].astype(F32)).astype(BF16)
            if modulation == "eager":
                product = (n[row].astype(F32) * sp1.astype(F32)).astype(BF16)
                a[row] = (product.astype(F32) + shift[i].astype(F32)).astype(BF16)
            else:
                a[row] = fma(n[row], sp1, shift[i]).astype(BF16)
    return a


def row_scale(a):
    magnitude = np.abs(a.astype(F32))
    magnitude[np.isnan(magnitude)] = 0
    return np.maximum(magnitude.max(axis=1), F32(1e-12)) / F32(448)


def e4m3(v):
    codes = np.clip(v, F32(-448), F32(448)).astype(E4M3)
    codes.view(np.uint8)[np.isnan(v)] = 0x7F
    return codes


def quantize(a, s_row):
    return e4m3(a.astype(F32) / s_row[:, None])


def stage1(x, x_norm_weight, scale=None, shift=None, index=None, eps=1e-5, modulation="fused"):
    """ss, rstd, n, a, s_row, a_q."""
    with np.errstate(all="ignore"):
        ss = sum_of_squares(x)
        rstd = reciprocal_rms(ss, x.shape[1], eps)
        n = rms_norm(x, rstd, x_norm_weight)
        a = n if index is None else adaln(n, scale, shift, index, modulation)
        s_row = row_scale(a)
        return ss, rstd, n, a, s_row, quantize(a, s_row)


def packed_row(column, is_up):
    return 16 * (column // 8) + column % 8 + 8 * is_up


def stage2(a_q, s_row, w_q, w_scale):
    """acc, h (packed columns), y; accumulated in FP64."""
    with np.errstate(all="ignore"):
        acc = (a_q.astype(np.float64) @ w_q.astype(np.float64).T).astype(F32)
        h = ((acc * s_row[:, None]) * w_scale).astype(BF16)
        columns = np.arange(w_q.shape[0] // 2)
        gate, up = (h[:, packed_row(columns, is_up)].astype(F32) for is_up in (0, 1))
        g = (gate / (F32(1) + np.exp(-gate))).astype(BF16)
        return acc, h, (g.astype(F32) * up).astype(BF16)


def gated_residual(o, gate, residual, index):
    out = residual.copy()
    for row in range(o.shape[0]):
        if index is None:
            added = o[row]
        elif 0 <= index[row] < gate.shape[0]:
            added = (gate[index[row]].astype(F32) * o[row].astype(F32)).astype(BF16)
        else:
            continue
        out[row] = (residual[row].astype(F32) + added.astype(F32)).astype(BF16)
    return out


def stage3(y, w2_q, w2_scale, gate, residual, index):
    """s_y, y_q, acc2, o, out; accumulated in FP64."""
    with np.errstate(all="ignore"):
        s_y = row_scale(y)
        y_q = quantize(y, s_y)
        acc2 = (y_q.astype(np.float64) @ w2_q.astype(np.float64).T).astype(F32)
        o = ((acc2 * s_y[:, None]) * w2_scale).astype(BF16)
        return s_y, y_q, acc2, o, gated_residual(o, gate, residual, index)


def prepare_fc2(weight):
    """Codes and scales of BF16 [H, F]."""
    with np.errstate(all="ignore"):
        rows = weight.astype(F32)
        scale = np.maximum(np.abs(rows).max(axis=1), F32(1e-12)) / F32(448)
        return e4m3(rows / scale[:, None]), scale


def prepare(weight):
    """Packed codes and scales of BF16 [2F, H], row by row."""
    rows = weight.shape[0]
    q, s = np.empty(weight.shape, E4M3), np.empty(rows, F32)
    with np.errstate(all="ignore"):
        for source in range(rows):
            row = weight[source].astype(F32)
            scale = np.maximum(np.abs(row).max(), F32(1e-12)) / F32(448)
            target = packed_row(source % (rows // 2), source // (rows // 2))
            q[target], s[target] = e4m3(row / scale), scale
    return q, s
