"""How many floating-point operations and bytes a call needs at least: what TFLOPS and GB/s are counted in.

Bytes are those of a call whose caches start cold and that touches every element once. The AdaLN tables and the norm
weight (204 KB together at the model's size) are left out.
"""

from typing import NamedTuple

BF16, E4M3, FP32 = 2, 1, 4


class Work(NamedTuple):
    """Operations and bytes of one call."""

    flops: int
    bytes: int


def norm_quant(rows: int, hidden: int) -> Work:
    """Stage 1: reads x, writes codes and scales. Its operations are not counted: none runs on a tensor core."""
    return Work(0, rows * hidden * BF16 + _quantized(rows, hidden))


def gemm(rows: int, hidden: int, ffn: int) -> Work:
    """The bare FP8 GEMM: reads codes, scales and weight, writes h [M, 2F]."""
    moved = _quantized(rows, hidden) + _quantized(2 * ffn, hidden) + rows * 2 * ffn * BF16
    return Work(_flops(rows, hidden, ffn), moved)


def gemm_bf16(rows: int, hidden: int, ffn: int) -> Work:
    """The bare BF16 GEMM."""
    return Work(_flops(rows, hidden, ffn), BF16 * (rows * hidden + 2 * ffn * hidden + rows * 2 * ffn))


def operator(rows: int, hidden: int, ffn: int) -> Work:
    """Both stages: x, weight and y, and the codes and scales between them written and read. A chain of calls is counted
    like this too, though it moves more."""
    least = limit(rows, hidden, ffn)
    return least._replace(bytes=least.bytes + 2 * _quantized(rows, hidden))


def limit(rows: int, hidden: int, ffn: int) -> Work:
    """What no implementation can do without: x, weight and y. Codes and scales could stay on the chip."""
    return Work(_flops(rows, hidden, ffn), rows * (hidden + ffn) * BF16 + _quantized(2 * ffn, hidden))


def mlp(rows: int, hidden: int, ffn: int) -> Work:
    """The whole half: what it cannot do without, and codes, y and scales between its kernels written and read."""
    least = mlp_limit(rows, hidden, ffn)
    between = _quantized(rows, hidden) + rows * ffn * BF16 + _quantized(rows, ffn)
    return least._replace(bytes=least.bytes + 2 * between)


def mlp_limit(rows: int, hidden: int, ffn: int) -> Work:
    """x, residual, out and both weights."""
    weights = _quantized(2 * ffn, hidden) + _quantized(hidden, ffn)
    return Work(_mlp_flops(rows, hidden, ffn), 3 * rows * hidden * BF16 + weights)


def mlp_gemms(rows: int, hidden: int, ffn: int) -> Work:
    """Both bare FP8 GEMMs: codes, scales and weights, h [M, 2F] and o [M, H]."""
    second = _quantized(rows, ffn) + _quantized(hidden, ffn) + rows * hidden * BF16
    return Work(_mlp_flops(rows, hidden, ffn), gemm(rows, hidden, ffn).bytes + second)


def mlp_bf16(rows: int, hidden: int, ffn: int) -> Work:
    """The half in BF16."""
    moved = rows * (3 * hidden + 2 * ffn) + 3 * ffn * hidden
    return Work(_mlp_flops(rows, hidden, ffn), BF16 * moved)


LIMITS = {"fc1": limit, "mlp": mlp_limit}
"""By operator."""


def _mlp_flops(rows: int, hidden: int, ffn: int) -> int:
    return _flops(rows, hidden, ffn) + 2 * rows * ffn * hidden


def _flops(rows: int, hidden: int, ffn: int) -> int:
    return 2 * rows * hidden * 2 * ffn


def _quantized(rows: int, hidden: int) -> int:
    return rows * (hidden * E4M3 + FP32)
