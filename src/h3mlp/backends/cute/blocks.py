"""How many rows the MLP takes at a time.

A block's y, codes and scales take 77 KB a row, so their number is limited; and the last wave of a GEMM's tiles leaves
SMs idle, at F = 14336 up to 3% of a block of 8192 rows. So of all sizes the one is taken whose blocks together should
take the least time. Times are counted in products: of one token with 128 weight rows, for each of K, on an SM. An H200
makes 44,000 of these in a microsecond, hot.
"""

import math
from functools import lru_cache

from ... import contract
from . import variants
from .choice import Choice
from .product import Product, fc1, fc2
from .variants import Gpu

MOST_BYTES = 750e6
"""Of workspaces: 9,732 rows of the model, or 15,498 where one block is all."""

BLOCK = 440_000
"""What a block costs on its own, 10 us: four launches, and each kernel's first loads and last stores."""

QUANTIZE = 0.0315
"""The quantization of an element of y on its own: 10 ns a row of 14336."""

BESIDE = 0.12
"""The same by the idle warps of a GEMM."""

READ = 0.0104
"""Reading an element of a weight: FC1's takes 36 us."""


@lru_cache(maxsize=1024)
def rows_of_a_block(gpu: Gpu, hidden: int, ffn: int, rows: int, chosen: Choice | None) -> int:
    """``chosen``: what ``choice.current`` says."""
    kinds = contract.mlp_buffer_rows(hidden, ffn)
    of_a_row = {name: dtype.itemsize * math.prod(shape) for name, (dtype, shape) in kinds.items() if name != "out"}
    alone = sum(of_a_row.values())
    most = max(contract.FFN_MULTIPLE, int(MOST_BYTES // (alone + of_a_row["workspace_y"])))
    sizes = {rows} if rows * alone <= MOST_BYTES else {most}
    for tokens in variants.wide_tiles(gpu, chosen):
        sizes.update(range(-(-most // 4 // tokens) * tokens, min(most, rows), tokens))
    return min(sizes, key=lambda step: (_time(gpu, hidden, ffn, rows, step, chosen), step))


def sizes(gpu: Gpu, hidden: int, ffn: int, rows: int, chosen: Choice | None) -> list[int]:
    """The rows of every block."""
    step = rows_of_a_block(gpu, hidden, ffn, rows, chosen)
    return [min(step, rows - first) for first in range(0, rows, step)]


def _time(gpu: Gpu, hidden: int, ffn: int, rows: int, step: int, chosen: Choice | None) -> float:
    """What all blocks of so many rows take. Each is quantized beside the next one's FC1, the last one on its own."""
    whole, last = divmod(rows - 1, step)
    last += 1

    def gemm(product: Product, rows: int) -> float:
        return max(variants.time(gpu, product, rows, chosen), READ * product.n * product.k)

    def gemms(rows: int) -> float:
        return gemm(fc1(hidden, ffn), rows) + gemm(fc2(hidden, ffn), rows) + BLOCK

    def quantized(next_rows: int) -> float:
        if not variants.quantizes(gpu, fc1(hidden, ffn), next_rows):
            return QUANTIZE * ffn * step
        return max(0.0, BESIDE * ffn * step - gemm(fc1(hidden, ffn), next_rows))

    beside = (whole - 1) * quantized(step) + quantized(last) if whole else 0.0
    return whole * gemms(step) + gemms(last) + beside + QUANTIZE * ffn * last
