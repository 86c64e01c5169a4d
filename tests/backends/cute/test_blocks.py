"""How the MLP's rows are cut into blocks."""

import pytest

from h3mlp import contract

pytest.importorskip("cutlass")

from h3mlp.backends.cute import blocks, choice, variants

MODEL = contract.HIDDEN, contract.FFN
CASES = [
    ("sm_90a", None),
    ("sm_120a", choice.Choice("unit_scale", "128x256")),
    ("sm_89", choice.Choice("plain", "256x128")),
]
BYTES = 5376 + 4 + 2 * 14336 + 14336 + 4
"""Workspaces of a row."""


@pytest.mark.parametrize(("arch", "chosen"), CASES)
@pytest.mark.parametrize("rows", [1, 100, 4184, 8368, 15_498, 15_499, 33472, 109_952, 2**24])
def test_memory_is_bounded_and_every_row_in_a_block(arch, chosen, rows):
    gpu = variants.KNOWN[arch]
    sizes = blocks.sizes(gpu, *MODEL, rows, chosen)
    assert sum(sizes) == rows
    assert len(set(sizes[:-1])) <= 1
    assert 1 <= sizes[-1] <= sizes[0]
    assert sizes[0] * BYTES <= blocks.MOST_BYTES


@pytest.mark.parametrize("rows", [1, 64, 1024])
def test_few_rows_are_one_block(rows):
    assert blocks.sizes(variants.KNOWN["sm_90a"], *MODEL, rows, None) == [rows]


@pytest.mark.parametrize("rows", [8368, 33472, 109_952])
def test_no_other_size_is_faster_by_the_model(rows):
    gpu = variants.KNOWN["sm_90a"]
    step = blocks.rows_of_a_block(gpu, *MODEL, rows, None)
    least = blocks._time(gpu, *MODEL, rows, step, None)
    for other in (4096, 7040, 8192, 9600, 12_000, 15_000):
        assert blocks._time(gpu, *MODEL, rows, other, None) >= least
    unavoidable = rows * 3 * 5376 * 14336 / 128 / 132
    assert unavoidable < least < 1.2 * unavoidable


@pytest.mark.parametrize(("hidden", "ffn", "step"), [(128, 64, 300), (1152, 704, 300), (2**16, 2**20, 160)])
def test_other_dimensions(hidden, ffn, step):
    """Of 3.2 MB a row: 228 rows would fit, but two blocks of a tile each take less."""
    assert blocks.sizes(variants.KNOWN["sm_90a"], hidden, ffn, 300, None)[0] == step
