"""The arithmetic of stage 1 and of quantizing y, steps 1 to 8, 12 and 13 of the contract, on vectors of 8 elements in
registers.

A vector is four pairs of BF16, ``words``. What is left out is what moves data: ``norm_quant``,
``quantize_rows``.
"""

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Uint32
from cutlass.cutlass_dsl import T

from ... import contract
from .ptx import asm, bf16x2, fma_bf16x2, halves

VECTOR = contract.VECTOR
WORDS = VECTOR // 2

OUTSIDE = -1
"""The table row of an index outside the tables."""


def unpack(words: cute.Tensor) -> list[Float32]:
    return [value for k in range(WORDS) for value in halves(words[k])]


# Steps 1 and 2: the sum of squares and rstd.


def sum_of_squares(words: cute.Tensor) -> Float32:
    """Within a vector. The square of a BF16 is exact in FP32, so the first fma, from 0, is a product."""
    first, *rest = unpack(words)
    total = first * first
    for value in rest:
        total = fma(value, value, total)
    return total


def tree(values: list, join):
    """Halving tree over a list padded to a power of two with zeros, which change neither sum of squares nor peak."""
    width = 1 << (len(values) - 1).bit_length()
    values = values + [None] * (width - len(values))
    while width > 1:
        width //= 2
        values = [a if b is None else join(a, b) for a, b in zip(values[:width], values[width:], strict=True)]
    return values[0]


def sum_over_lanes(total: Float32) -> Float32:
    for offset in (16, 8, 4, 2, 1):
        total += cute.arch.shuffle_sync_bfly(total, offset)
    return total


def reciprocal_rms(total: Float32, hidden: int, eps: Float32) -> Float32:
    return divide(Float32(1.0), square_root(divide(total, Float32(hidden)) + eps))


# Steps 3 to 6: x becomes a.


def scale_plus_one(pair: Uint32) -> Uint32:
    """Step 4: 1 + scale in one rounding. FP32 has more than 2 * 8 + 2 bits, so that rounding a sum of two BF16 to it
    first, as the contract does, changes nothing."""
    one = Uint32(0x3F803F80)
    return fma_bf16x2(pair, one, one)


def modulate(rstd: Float32, table: cute.Tensor, words: cute.Tensor, modulation: str | None) -> None:
    """x to a, in place. ``table``: norm weight, 1 + scale and shift of each element, in FP32."""
    for k in range(WORDS):
        low, high = 2 * k, 2 * k + 1
        x = halves(words[k])
        words[k] = bf16x2(x[0] * rstd * table[low, 0], x[1] * rstd * table[high, 0])
        n = halves(words[k])
        if modulation == "fused":
            words[k] = bf16x2(fma(n[0], table[low, 1], table[low, 2]), fma(n[1], table[high, 1], table[high, 2]))
        elif modulation == "eager":
            product = halves(bf16x2(n[0] * table[low, 1], n[1] * table[high, 1]))
            words[k] = bf16x2(product[0] + table[low, 2], product[1] + table[high, 2])


# Step 6.


def table_row_of(index, table_rows) -> Int32:
    return cutlass.select_((index >= 0) & (index < table_rows), Int32(index), Int32(OUTSIDE))


# Steps 7 and 12: the scale. A peak is a pair too: the largest magnitudes of the low and of the high halves, some sign.


def peak_of(words: cute.Tensor) -> Uint32:
    return tree([words[k] for k in range(WORDS)], larger)


def larger(a: Uint32, b: Uint32) -> Uint32:
    """Of two pairs, the larger magnitudes with some sign; NaN only of two NaN."""
    return Uint32(asm(T.i32(), (a, b), "max.xorsign.abs.bf16x2 $0, $1, $2;", "=r,r,r"))


def largest(peak: Uint32) -> Uint32:
    """The largest magnitude of a warp's peaks, as the bits of a BF16. Non-negative BF16 order as their bits do; NaN is
    ignored."""
    peak = larger(Uint32(0), peak)
    return most(cutlass.max(peak & 0x7FFF, (peak >> 16) & 0x7FFF))


def most(bits: Uint32) -> Uint32:
    """The largest of a warp's numbers."""
    return Uint32(cute.arch.warp_redux_sync(bits, "umax"))


def row_scale(bits: Uint32) -> Float32:
    """s_row from the amax of its row."""
    amax = Uint32(bits << 16).bitcast(Float32)
    return divide(cute.arch.fmax(amax, Float32(contract.AMAX_FLOOR)), Float32(contract.E4M3_MAX))


def inverse(s: Float32) -> tuple[Float32, Float32]:
    """1 / s in two parts for ``quotient``: rounded down to FP32, and the non-negative rest.

    s = Inf (amax = Inf) gives 0 and 0: a finite a then gives a zero of its sign and Inf gives NaN, as a / Inf.
    """
    y = divide(Float32(1.0), s)
    y = Float32(cutlass.select_(fma(-s, y, Float32(1.0)) < 0, Uint32(y.bitcast(Uint32) - 1).bitcast(Float32), y))
    rest = fma(-s, y, Float32(1.0)) * y
    return y, cutlass.select_(s < Float32.inf, rest, Float32(0.0))


# Steps 8 and 13: the codes.


def codes(words: cute.Tensor, y: Float32, rest: Float32) -> list[Uint32]:
    """a to 8 codes, in two words."""
    q = [quotient(a, y, rest) for a in unpack(words)]
    return [e4m3x4(*q[:4]), e4m3x4(*q[4:])]


def quotient(a: Float32, y: Float32, rest: Float32) -> Float32:
    """RN(a / s) as far as its E4M3 code goes, with y + rest = 1 / s to 48 bits and rest >= 0.

    Checked for every BF16 a, every mantissa of amax and the exponents that differ
    (tests/backends/cute/test_prologue.py).
    Both products have the sign of a, so that zeros keep it: of rest < 0, -0 * y + -0 * rest would be +0.
    """
    return fma(a, y, a * rest)


# Instructions. The rounding is in the name; none flushes subnormals.


def fma(a: Float32, b: Float32, c: Float32) -> Float32:
    return cute.math.fma(a, b, c)


def divide(a: Float32, b: Float32) -> Float32:
    return Float32(asm(T.f32(), (a, b), "div.rn.f32 $0, $1, $2;", "=f,f,f"))


def square_root(a: Float32) -> Float32:
    return Float32(asm(T.f32(), (a,), "sqrt.rn.f32 $0, $1;", "=f,f"))


def e4m3x4(a: Float32, b: Float32, c: Float32, d: Float32) -> Uint32:
    """Four E4M3 codes, a in the lowest byte: round to nearest even, saturating, NaN to 0x7F."""
    text = (
        "{.reg .b16 lo, hi; cvt.rn.satfinite.e4m3x2.f32 lo, $2, $1; "
        "cvt.rn.satfinite.e4m3x2.f32 hi, $4, $3; mov.b32 $0, {lo, hi};}"
    )
    return Uint32(asm(T.i32(), (a, b, c, d), text, "=r,f,f,f,f"))
