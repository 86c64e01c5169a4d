"""Which variant of each kernel serves a call: chosen from the dimensions, the number of rows and the GPU's size."""

from functools import lru_cache

from ... import contract
from .gemm_sm90 import TILE_ROWS, GemmSm90
from .norm_quant import NormQuant

STAGES = {32: 10, 64: 8, 128: 6, 160: 6}
"""Stages of the GEMM's pipeline that fit in shared memory, for each width of a token tile."""

PAIRED = 128
"""From this width on, CTAs work in pairs that share the activations. Narrower tiles wait for the weights alone."""

PAIR = 2

H200_MULTIPROCESSORS = 132
"""What ``of`` assumes where there is no GPU to ask; an H100 has as many."""

TILE_OVERHEAD = 25
"""What a tile costs beyond its products, in tokens: a wave of 128 takes 23.8 thousand cycles, one of 160 28.7."""


def norm_quant(hidden: int, index_bits: int, vectors: bool, multiprocessors: int) -> NormQuant:
    return NormQuant(hidden, index_bits, vectors, sms=multiprocessors)


def gemm_sm90(hidden: int, ffn: int, tokens: int, accumulate: str) -> GemmSm90:
    cluster_rows = PAIR if tokens >= PAIRED else 1
    return GemmSm90(hidden, ffn, tokens, STAGES[tokens], cluster_rows, promote=accumulate == "fp32")


@lru_cache(maxsize=1024)
def tile_tokens(ffn: int, rows: int, multiprocessors: int) -> int:
    """Tokens of a GEMM tile: the narrowest that takes all rows, else the one whose last wave of tiles wastes least."""
    for tokens in STAGES:
        if rows <= tokens <= PAIRED:
            return tokens
    pairs, row_tiles = multiprocessors // PAIR, -(-2 * ffn // (PAIR * TILE_ROWS))

    def time(tokens: int) -> int:
        waves = -(-row_tiles * -(-rows // tokens) // pairs)
        return waves * (tokens + TILE_OVERHEAD)

    return min((tokens for tokens in STAGES if tokens >= PAIRED), key=lambda tokens: (time(tokens), -tokens))


def of(arch: str) -> list:
    """Every variant for the model's dimensions.

    Raises:
        ValueError: an architecture without kernels.
    """
    if arch != "sm_90a":
        raise ValueError(f"arch must be sm_90a; it is {arch!r}")
    hidden, ffn = contract.HIDDEN, contract.FFN
    stage1 = [
        norm_quant(hidden, index_bits, vectors, H200_MULTIPROCESSORS)
        for vectors in (True, False)
        for index_bits in (32, 64)
    ]
    stage2 = [gemm_sm90(hidden, ffn, tokens, accumulate) for accumulate in contract.ACCUMULATE for tokens in STAGES]
    return [*stage1, *stage2]
