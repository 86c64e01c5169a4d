"""Which variant of each kernel serves a call: chosen from the dimensions, the number of rows and the GPU."""

from dataclasses import replace
from functools import lru_cache
from typing import NamedTuple

from ... import contract
from . import choice, forms
from .choice import Choice
from .epilogue_sm90 import TILE_ROWS
from .gemm_sm90 import GemmSm90
from .gemm_sm120 import GemmSm120, Tile
from .norm_quant import NormQuant
from .product import GATED_RESIDUAL, SWIGLU, Product, fc1, fc2
from .quantize_rows import QuantizeRows


class Gpu(NamedTuple):
    """What of a GPU decides."""

    arch: str
    multiprocessors: int
    l2_bytes: int


KNOWN = {
    "sm_90a": Gpu("sm_90a", 132, 50 * 2**20),  # H100, H200
    "sm_120a": Gpu("sm_120a", 170, 96 * 2**20),  # RTX 5090
    "sm_121a": Gpu("sm_121a", 48, 24 * 2**20),  # DGX Spark
    "sm_89": Gpu("sm_89", 128, 72 * 2**20),  # RTX 4090
}
"""What ``of`` assumes, which needs no GPU."""


def norm_quant(gpu: Gpu, hidden: int, index_bits: int, vectors: bool, modulation: str | None) -> NormQuant:
    return NormQuant(hidden, index_bits, vectors, modulation, sms=gpu.multiprocessors)


def gemm(gpu: Gpu, product: Product, rows: int, accumulate: str, chosen: Choice | None) -> GemmSm90 | GemmSm120:
    """``chosen``: what ``choice.current`` says."""
    if gpu.arch == "sm_90a":
        return gemm_sm90(product, tile_tokens(product, rows, gpu.multiprocessors), accumulate)
    tile = sm120_tile(product, rows, gpu.multiprocessors, chosen.tile)
    return gemm_sm120(gpu, product, tile, chosen.form)


# Hopper, wgmma.

STAGES = {SWIGLU: {32: 10, 64: 8, 128: 6, 160: 6}, GATED_RESIDUAL: {32: 10, 64: 8, 128: 6, 192: 5}}
"""Stages of the GEMM's pipeline that fit in shared memory, for each width of a token tile that its end has."""

PAIRED = 128
"""From this width on, CTAs work in pairs that share the activations. Narrower tiles wait for the weights alone."""

PAIR = 2

TILE_OVERHEAD = 134_400
"""What a tile costs beyond its products, in tokens by K: at K = 5376 a wave of 128 tokens takes 23.8 thousand cycles,
one of 160 28.7."""


def gemm_sm90(product: Product, tokens: int, accumulate: str) -> GemmSm90:
    cluster_rows = PAIR if tokens >= PAIRED else 1
    return GemmSm90(product, tokens, STAGES[product.end][tokens], cluster_rows, promote=accumulate == "fp32")


@lru_cache(maxsize=1024)
def tile_tokens(product: Product, rows: int, multiprocessors: int) -> int:
    """Tokens of a GEMM tile: the narrowest that takes all rows, else the one whose last wave of tiles wastes least."""
    for tokens in STAGES[product.end]:
        if rows <= tokens <= PAIRED:
            return tokens
    wide = (tokens for tokens in STAGES[product.end] if tokens >= PAIRED)
    return min(wide, key=lambda tokens: (sm90_time(product, rows, multiprocessors, tokens), -tokens))


def sm90_time(product: Product, rows: int, multiprocessors: int, tokens: int) -> int:
    """What tiles of so many tokens take, in tokens by K of an SM."""
    ctas = PAIR if tokens >= PAIRED else 1
    row_tiles = -(-product.n // (ctas * TILE_ROWS))
    waves = -(-row_tiles * -(-rows // tokens) // (multiprocessors // ctas))
    return waves * (tokens * product.k + TILE_OVERHEAD)


# mma.sync.

SMALL_TILES = (Tile(16, (1, 2), 128, 5), Tile(16, (2, 2), 128, 4), Tile(16, (4, 2), 128, 4))
"""16, 32 and 64 tokens by 128 weight rows: the model's 224 tiles are more than these GPUs have SMs."""

LARGE_TILES = {
    "128x256": Tile(64, (2, 4), 64, 4),
    "256x128": Tile(64, (4, 2), 64, 4),
    "128x128": Tile(64, (2, 2), 64, 3, ctas=2),
}

EMULATED_TILE = Tile(48, (4, 2), 64, 4)
"""For tests and benchmarks on Hopper, the fastest there: two FP16 products stand for each FP8 one and need registers of
their own."""

MARGIN = 1.1
"""Assumed: how much longer the small tile takes for a product, for which it reads 2.5 times as much shared memory."""


def gemm_sm120(gpu: Gpu, product: Product, tile: Tile, form: str, tma: bool | None = None) -> GemmSm120:
    """``tma``: whether to load by TMA instead of cp.async; the best that the architecture has unless given."""
    group = max(1, gpu.l2_bytes // 4 // (tile.tokens * product.k))
    emulated = gpu.arch == "sm_90a"  # where ptxas -O3 puts each sum right behind its product, 20% slower
    tma = gpu.arch != "sm_89" if tma is None else tma
    if product.k % tile.stage_k:
        tile = replace(tile, stage_k=contract.FFN_MULTIPLE)
    return GemmSm120(product, tile, form, tma, group, "-O2" if emulated else "")


@lru_cache(maxsize=1024)
def sm120_tile(product: Product, rows: int, multiprocessors: int, large: str) -> Tile:
    """The narrowest that takes all rows; else the large one, or the widest small one if its waves waste much less."""
    for tile in SMALL_TILES:
        if rows <= tile.tokens:
            return tile

    small, large = SMALL_TILES[-1], LARGE_TILES[large]
    times = (sm120_time(product, rows, multiprocessors, tile) for tile in (small, large))
    return small if MARGIN * next(times) < next(times) else large


def sm120_time(product: Product, rows: int, multiprocessors: int, tile: Tile) -> int:
    """What such tiles take, in tokens by K of an SM, for 128 weight rows."""
    tiles = -(-product.n // tile.rows) * -(-rows // tile.tokens)
    waves = -(-tiles // (multiprocessors * tile.ctas))
    return waves * tile.ctas * tile.tokens * tile.rows // TILE_ROWS * product.k


def time(gpu: Gpu, product: Product, rows: int, chosen: Choice | None) -> int:
    """What the variant that serves so many rows takes, likewise, if nothing but tiles counts."""
    if gpu.arch == "sm_90a":
        return sm90_time(product, rows, gpu.multiprocessors, tile_tokens(product, rows, gpu.multiprocessors))
    tile = sm120_tile(product, rows, gpu.multiprocessors, chosen.tile)
    return sm120_time(product, rows, gpu.multiprocessors, tile)


def wide_tiles(gpu: Gpu, chosen: Choice | None) -> list[int]:
    """Tokens of the tiles that serve many rows."""
    if gpu.arch == "sm_90a":
        return sorted({tokens for of_end in STAGES.values() for tokens in of_end if tokens >= PAIRED})
    return [LARGE_TILES[chosen.tile].tokens]


def of(arch: str) -> list:
    """Every variant for the model's dimensions.

    Raises:
        ValueError: an architecture without kernels.
    """
    if arch not in KNOWN:
        raise ValueError(f"arch must be one of {', '.join(KNOWN)}; it is {arch!r}")
    gpu, hidden, ffn = KNOWN[arch], contract.HIDDEN, contract.FFN
    modes = [*((mode, bits) for mode in contract.MODULATION for bits in (32, 64)), (None, 0)]
    stage1 = [norm_quant(gpu, hidden, bits, vectors, mode) for vectors in (True, False) for mode, bits in modes]
    products = fc1(hidden, ffn), fc2(hidden, ffn)
    if arch == "sm_90a":
        gemms = [
            gemm_sm90(p, tokens, mode) for p in products for mode in contract.ACCUMULATE for tokens in STAGES[p.end]
        ]
    else:
        tiles = (*SMALL_TILES, *(LARGE_TILES[name] for name in choice.TILES))
        gemms = [gemm_sm120(gpu, p, tile, form) for p in products for form in forms.OF[arch] for tile in tiles]
    return [*stage1, *gemms, QuantizeRows(ffn)]
