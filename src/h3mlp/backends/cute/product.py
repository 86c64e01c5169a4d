"""What the GEMMs multiply, and what becomes of their sums."""

from typing import NamedTuple

SWIGLU, GATED_RESIDUAL = "swiglu", "gated"


class Product(NamedTuple):
    """Codes [M, K] times a weight [N, K]."""

    k: int
    n: int
    end: str
    """``SWIGLU``: dequantize, SwiGLU of packed columns, y [M, N / 2]. ``GATED_RESIDUAL``: dequantize, times the gate,
    plus the residual, out [M, N]."""

    @property
    def columns(self) -> int:
        """Of the output."""
        return self.n // 2 if self.end == SWIGLU else self.n


def fc1(hidden: int, ffn: int) -> Product:
    return Product(hidden, 2 * ffn, SWIGLU)


def fc2(hidden: int, ffn: int) -> Product:
    return Product(ffn, hidden, GATED_RESIDUAL)
