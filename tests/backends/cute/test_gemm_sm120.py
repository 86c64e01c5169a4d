"""The mma.sync GEMM without a GPU: the order of weight rows, the tiles' memory, the machine code."""

import pytest

from h3mlp import contract

pytest.importorskip("cutlass")

from h3mlp.backends.cute import forms, jit, sass, stages, variants
from h3mlp.backends.cute.gemm_sm120 import GemmSm120, Tile


def test_a_block_of_weight_rows():
    """Rows of n8 atom j hold output columns 8 t + 2 j + e of the block, in the order of an accumulator's columns; gates
    in the first four atoms, ups in the others. And TMA's strides say the same as cp.async's function."""
    packed = [stages.packed_row(row) for row in range(64)]
    assert sorted(packed) == list(range(64))
    (e, t, j), (e_stride, t_stride, j_stride) = stages.BLOCK_ORDER, stages.BLOCK_STRIDES
    strides = (x * e_stride + y * t_stride + z * j_stride for z in range(j) for y in range(t) for x in range(e))
    assert packed == list(strides)
    for row, in_memory in enumerate(packed):
        atom, t, e = row // 8, row % 8 // 2, row % 2
        column, up = 8 * t + 2 * (atom % 4) + e, atom // 4
        assert in_memory == 16 * (column // 8) + column % 8 + 8 * up, "the row order of the weights"


@pytest.mark.parametrize("stage_k", [64, 128])
def test_the_rows_of_a_matrix_are_in_different_banks(stage_k):
    """ldmatrix reads 16 bytes of eight rows at once: 128 bytes in all, one of each bank of 16. And the chunks of a row
    are apart by the xor that ``place`` promises."""
    for chunk in range(stage_k // 16):
        places = [stages.place(row, chunk, stage_k) for row in range(8)]
        assert sorted(place % 128 // 16 for place in places) == list(range(8))
        assert places == [stages.place(row, 0, stage_k) ^ (16 * chunk) for row in range(8)]
    everywhere = {stages.place(row, chunk, stage_k) for row in range(16) for chunk in range(stage_k // 16)}
    assert everywhere == set(range(0, 16 * stage_k, 16))


@pytest.mark.parametrize("tile", [*variants.SMALL_TILES, *variants.LARGE_TILES.values()], ids=lambda tile: tile.name)
def test_the_stages_fit_in_the_shared_memory_of_an_sm(tile):
    """100 KB, of which each block costs 1 KB and its barriers another with the alignment to 1 KB."""
    operands = tile.stages * (tile.rows + tile.tokens) * tile.stage_k
    assert operands + 1024 <= sass.SHARED_LIMIT
    assert tile.ctas * (operands + 2048) <= 100 * 1024


CASES = [
    ("sm_120a", forms.UNIT_SCALE, "128x256"),
    ("sm_120a", forms.PLAIN, "128x128"),
    ("sm_121a", forms.UNIT_SCALE, "256x128"),
    ("sm_89", forms.PLAIN, "128x256"),
]


@pytest.mark.parametrize(("arch", "form", "tile"), CASES)
def test_machine_code(arch, form, tile):
    """A step of 32 of K has 4 x 8 products of a warp, and a stage of 64 of K is the loop's body, in which all are.
    ``h3mlp kernels`` asks the same of every kernel."""
    try:
        sass.nvdisasm()
    except RuntimeError:
        pytest.skip("no nvdisasm")
    kernel = variants.gemm_sm120(variants.KNOWN[arch], contract.HIDDEN, contract.FFN, variants.LARGE_TILES[tile], form)
    report = jit.inspect(kernel, arch)
    assert not report.spills
    assert report.fits
    assert report.registers <= 255
    assert not report.multiplies_otherwise
    assert report.instructions[kernel.multiplies_with] == 64


def test_an_uneven_tile_is_refused():
    """384 threads copy 96 rows of 64 bytes at once, 32 threads 4 rows of 128 bytes."""
    for tile, at_once, name in ((Tile(32, (3, 4), 64, 4), 96, "96x256"), (Tile(32, (1, 1), 128, 4), 4, "32x64")):
        GemmSm120(384, 64, tile, forms.PLAIN, tma=True, group=1)
        with pytest.raises(ValueError, match=f"rows that are copied {at_once} at once, .*; it is {name}"):
            GemmSm120(384, 64, tile, forms.PLAIN, tma=False, group=1)
