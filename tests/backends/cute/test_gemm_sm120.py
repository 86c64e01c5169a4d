"""The mma.sync GEMM without a GPU: the order of weight rows, the tiles' memory, the machine code."""

import pytest

from h3mlp import contract

pytest.importorskip("cutlass")

from h3mlp.backends.cute import forms, jit, sass, stages, variants
from h3mlp.backends.cute.gemm_sm120 import GemmSm120, Tile
from h3mlp.backends.cute.product import SWIGLU, Product, fc1, fc2


def test_a_block_of_weight_rows():
    """Rows of n8 atom j hold columns 8 t + 2 j + e of y, in the order of an accumulator's columns; gates in the first
    four atoms, ups in the others; or columns 16 t + 2 j + e of out. And TMA's strides say the same as cp.async's
    function."""
    packed = [stages.source_row(row) for row in range(64)]
    assert sorted(packed) == list(range(64))
    (e, t, j), (e_stride, t_stride, j_stride) = stages.BLOCK_ORDER, stages.BLOCK_STRIDES
    strides = (x * e_stride + y * t_stride + z * j_stride for z in range(j) for y in range(t) for x in range(e))
    assert packed == list(strides)
    for row, in_memory in enumerate(packed):
        atom, t, e = row // 8, row % 8 // 2, row % 2
        column, up = 8 * t + 2 * (atom % 4) + e, atom // 4
        assert in_memory == 16 * (column // 8) + column % 8 + 8 * up, "the row order of FC1"
        assert in_memory == 16 * t + 2 * atom + e, "FC2"


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


@pytest.mark.parametrize(
    ("arch", "form", "tile", "product_of"), [*((*case, fc1) for case in CASES), *((*case, fc2) for case in CASES[::3])]
)
def test_machine_code(arch, form, tile, product_of):
    """A step of 32 of K has 4 x 8 products of a warp, and a stage of 64 of K is the loop's body, in which all are.
    ``h3mlp kernels`` asks the same of every kernel."""
    try:
        sass.nvdisasm()
    except RuntimeError:
        pytest.skip("no nvdisasm")
    product = product_of(contract.HIDDEN, contract.FFN)
    kernel = variants.gemm_sm120(variants.KNOWN[arch], product, variants.LARGE_TILES[tile], form)
    report = jit.inspect(kernel, arch)
    assert not report.spills
    assert report.fits
    assert report.registers <= 255
    assert not report.multiplies_otherwise
    assert report.instructions[kernel.multiplies_with] == 64


def test_an_uneven_tile_is_refused():
    """384 threads copy 96 rows of 64 bytes at once, 32 threads 4 rows of 128 bytes."""
    product = Product(384, 128, SWIGLU)
    for tile, at_once, name in ((Tile(32, (3, 4), 64, 4), 96, "96x256"), (Tile(32, (1, 1), 128, 4), 4, "32x64")):
        GemmSm120(product, tile, forms.PLAIN, tma=True, group=1)
        with pytest.raises(ValueError, match=f"rows that are copied {at_once} at once, .*; it is {name}"):
            GemmSm120(product, tile, forms.PLAIN, tma=False, group=1)


def test_a_k_that_ends_within_a_stage_gets_shorter_stages():
    """F may be any multiple of 64."""
    small, gpu = variants.SMALL_TILES[0], variants.KNOWN["sm_89"]
    assert variants.gemm_sm120(gpu, fc2(384, 128), small, forms.PLAIN).tile.stage_k == 128
    assert variants.gemm_sm120(gpu, fc2(384, 192), small, forms.PLAIN).tile.stage_k == 64
    with pytest.raises(ValueError, match=r"product\.k must be a multiple of 128, the tile's; it is 192"):
        GemmSm120(fc2(384, 192), small, forms.PLAIN, tma=True, group=1)
