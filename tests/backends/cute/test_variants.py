"""The choice of a variant, and what the model's variants are in machine code."""

import pytest

from h3mlp import contract

pytest.importorskip("cutlass")

from h3mlp.backends.cute import jit, sass, variants
from h3mlp.backends.cute.gemm_sm90 import STAGE_K, TILE_ROWS, GemmSm90

SHARED_LIMIT = 227 * 1024


@pytest.mark.parametrize(
    ("rows", "tokens"), [(1, 32), (32, 32), (33, 64), (64, 64), (65, 128), (128, 128), (33472, 160), (109_952, 160)]
)
def test_tile_tokens(rows, tokens):
    assert variants.tile_tokens(contract.FFN, rows, 132) == tokens


@pytest.mark.parametrize("rows", range(129, 5000, 97))
def test_no_other_tile_takes_fewer_waves_of_tokens(rows):
    """66 pairs of CTAs; a wave lasts as long as a tile is wide."""

    def time(tokens):
        return -(-112 * -(-rows // tokens) // 66) * (tokens + variants.TILE_OVERHEAD)

    chosen = variants.tile_tokens(contract.FFN, rows, 132)
    assert time(chosen) == min(time(128), time(160))


def test_every_kernel_is_found_once():
    kernels = variants.of("sm_90a")
    assert len({repr(kernel) for kernel in kernels}) == len({kernel.name for kernel in kernels}) == len(kernels)
    assert {kernel.tile_tokens for kernel in kernels if isinstance(kernel, GemmSm90)} == set(variants.STAGES)
    with pytest.raises(ValueError, match="arch must be sm_90a; it is 'sm_80'"):
        variants.of("sm_80")


@pytest.mark.parametrize("tokens", variants.STAGES)
def test_the_gemm_in_machine_code(tokens):
    """It fits in an SM, keeps all in registers, and its wgmmas run asynchronously. They are two stages before the loop
    over K and in it, and in as many unrolled intervals as a tile has batches: four for each stage."""
    try:
        sass.nvdisasm()
    except RuntimeError:
        pytest.skip("no nvdisasm")
    kernel = variants.gemm_sm90(contract.HIDDEN, contract.FFN, tokens, "fp32")
    report = jit.inspect(kernel, "sm_90a")
    assert not report.spills
    assert not report.serialized
    operands = kernel.stages * (TILE_ROWS + tokens) * STAGE_K
    assert operands < report.shared_bytes <= SHARED_LIMIT
    assert report.instructions["QGMMA"] == 4 * 2 * (2 + kernel.batches)
