"""The choice of a variant, and what the model's variants are in machine code."""

import pytest

from h3mlp import contract

pytest.importorskip("cutlass")

from h3mlp.backends.cute import choice, jit, sass, variants
from h3mlp.backends.cute.epilogue_sm90 import TILE_ROWS
from h3mlp.backends.cute.gemm_sm90 import STAGE_K, GemmSm90
from h3mlp.backends.cute.gemm_sm120 import GemmSm120
from h3mlp.backends.cute.product import GATED_RESIDUAL, SWIGLU, fc1, fc2

FC1, FC2 = fc1(contract.HIDDEN, contract.FFN), fc2(contract.HIDDEN, contract.FFN)

WIDEST = {FC1: 160, FC2: 192}
"""Tokens of a tile. The other wide one has 128."""

SHARED_LIMIT = 227 * 1024


@pytest.mark.parametrize(
    ("rows", "tokens"), [(1, 32), (32, 32), (33, 64), (64, 64), (65, 128), (128, 128), (33472, 160), (109_952, 160)]
)
def test_tile_tokens(rows, tokens):
    assert variants.tile_tokens(FC1, rows, 132) == tokens


@pytest.mark.parametrize(("product", "row_tiles"), [(FC1, 112), (FC2, 21)], ids=["fc1", "fc2"])
def test_no_other_tile_takes_fewer_waves_of_tokens(product, row_tiles):
    """66 pairs of CTAs; a wave lasts as long as a tile is wide, and 25 tokens of K = 5376 more."""

    def time(tokens):
        return -(-row_tiles * -(-rows // tokens) // 66) * (tokens * product.k + 25 * 5376)

    for rows in range(129, 5000, 97):
        chosen = variants.tile_tokens(product, rows, 132)
        assert time(chosen) == min(time(128), time(WIDEST[product])), rows


def test_every_kernel_is_found_once():
    kernels = variants.of("sm_90a")
    assert len({repr(kernel) for kernel in kernels}) == len({kernel.name for kernel in kernels}) == len(kernels)
    assert {kernel.tile_tokens for kernel in kernels if isinstance(kernel, GemmSm90)} == {
        *variants.STAGES[SWIGLU],
        *variants.STAGES[GATED_RESIDUAL],
    }
    with pytest.raises(ValueError, match="arch must be one of sm_90a, sm_120a, sm_121a, sm_89; it is 'sm_80'"):
        variants.of("sm_80")


@pytest.mark.parametrize("arch", ["sm_120a", "sm_121a", "sm_89"])
def test_every_mma_sync_kernel_is_found_once(arch):
    """The small tiles and every candidate, loaded as the architecture can."""
    kernels = variants.of(arch)
    assert len({repr(kernel) for kernel in kernels}) == len({kernel.name for kernel in kernels}) == len(kernels)
    gemms = [kernel for kernel in kernels if isinstance(kernel, GemmSm120)]
    large = {choice.Choice(kernel.form, kernel.tile.name) for kernel in gemms if kernel.tile.tokens > 64}
    assert large == set(choice.candidates(arch))
    assert {kernel.tile.tokens for kernel in gemms} >= {16, 32, 64}
    assert all(kernel.tma == (arch != "sm_89") for kernel in gemms)
    assert not any(kernel.ptxas_options for kernel in gemms)


@pytest.mark.parametrize("sms", [48, 128, 170, 188])
@pytest.mark.parametrize("large", choice.TILES)
def test_the_mma_sync_tile_for_a_number_of_rows(sms, large):
    for rows, tokens in ((1, 16), (16, 16), (17, 32), (33, 64), (64, 64)):
        tile = variants.sm120_tile(FC1, rows, sms, large)
        assert (tile.tokens, tile.rows) == (tokens, 128)
        assert 2 * contract.FFN // tile.rows == 224 > sms, "every SM has a tile"
    assert variants.sm120_tile(FC1, 33472, sms, large).name == large
    for rows in range(65, 3000, 13):
        tile = variants.sm120_tile(FC1, rows, sms, large)
        assert tile in (variants.SMALL_TILES[-1], variants.LARGE_TILES[large])


def test_a_group_of_token_tiles_takes_a_quarter_of_the_l2():
    for gpu in variants.KNOWN.values():
        for tile in variants.LARGE_TILES.values():
            kernel = variants.gemm_sm120(gpu, FC1, tile, "plain")
            assert kernel.group * tile.tokens * contract.HIDDEN <= gpu.l2_bytes / 4
            assert (kernel.group + 1) * tile.tokens * contract.HIDDEN > gpu.l2_bytes / 4
    assert variants.gemm_sm120(gpu, fc1(2**20, 64), tile, "plain").group == 1


@pytest.mark.parametrize(
    ("product", "tokens"),
    [*((FC1, tokens) for tokens in variants.STAGES[SWIGLU]), (FC2, 192)],
    ids=lambda value: str(value),
)
def test_the_gemm_in_machine_code(product, tokens):
    """It fits in an SM, keeps all in registers, and its wgmmas run asynchronously. Four a stage, they are the first
    interval, two stages in the loop over K and two behind it, and FC1's intervals beside which a batch leaves."""
    try:
        sass.nvdisasm()
    except RuntimeError:
        pytest.skip("no nvdisasm")
    kernel = variants.gemm_sm90(product, tokens, "fp32")
    report = jit.inspect(kernel, "sm_90a")
    assert not report.spills
    assert not report.serialized
    operands = kernel.stages * (TILE_ROWS + tokens) * STAGE_K
    assert operands < report.shared_bytes <= SHARED_LIMIT
    stages = 2 * (1 + kernel.turns) if product == FC1 else kernel.epilogue.FIRST // STAGE_K
    assert report.instructions["QGMMA"] == 4 * (stages + 4)
