"""How many rows the MLP takes at a time.

A block's y, codes and scales take 48 KB a row, so their number is limited; and the last wave of a GEMM's tiles leaves
SMs idle: on 132 SMs a row should take 2.3% longer in a block of 8192 rows than in one of 8448, which both GEMMs end in
nearly whole waves. So of all sizes that one is taken whose blocks together should take the least time.
"""

import math
from functools import lru_cache

from ... import contract
from . import variants
from .choice import Choice
from .product import fc1, fc2
from .variants import Gpu

MOST_BYTES = 750e6
"""Of workspaces: 15,498 rows of the model."""

BLOCK = 440_000
"""What a block costs on its own, in the unit of ``variants.time``, of which an H200 does 44,000 in a microsecond: 10
us, for four launches, and each kernel's first loads and last stores."""

READ = 0.0104
"""Reading an element of a weight: FC1's takes 36 us there."""


@lru_cache(maxsize=1024)
def rows_of_a_block(gpu: Gpu, hidden: int, ffn: int, rows: int, chosen: Choice | None) -> int:
    """``chosen``: what ``choice.current`` says."""
    kinds = contract.mlp_buffer_rows(hidden, ffn)
    row_bytes = sum(dtype.itemsize * math.prod(shape) for name, (dtype, shape) in kinds.items() if name != "out")
    most = min(rows, max(contract.FFN_MULTIPLE, int(MOST_BYTES // row_bytes)))
    sizes = {most}
    for tokens in variants.wide_tiles(gpu, chosen):
        sizes.update(range(-(-most // 4 // tokens) * tokens, most, tokens))
    return min(sizes, key=lambda step: (_time(gpu, hidden, ffn, rows, step, chosen), -step))


def sizes(gpu: Gpu, hidden: int, ffn: int, rows: int, chosen: Choice | None) -> list[int]:
    """The rows of every block."""
    step = rows_of_a_block(gpu, hidden, ffn, rows, chosen)
    return [min(step, rows - first) for first in range(0, rows, step)]


def _time(gpu: Gpu, hidden: int, ffn: int, rows: int, step: int, chosen: Choice | None) -> float:
    """What blocks of so many rows take in all, but for what takes the same for any size."""

    def block(count: int) -> float:
        products = fc1(hidden, ffn), fc2(hidden, ffn)
        return BLOCK + sum(max(variants.time(gpu, p, count, chosen), READ * p.n * p.k) for p in products)

    whole, last = divmod(rows - 1, step)
    return whole * block(step) + block(last + 1)
