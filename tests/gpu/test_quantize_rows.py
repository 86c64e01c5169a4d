"""The quantization of y on the GPU has the reference's codes and scales, bit for bit."""

import pytest
import torch
from helpers import bits
from on_gpu import CUDA

from h3mlp import contract, reference
from h3mlp.operators import dispatch

pytest.importorskip("cutlass")

from h3mlp.backends.cute import launch

pytestmark = pytest.mark.skipif(
    not torch.cuda.is_available() or dispatch.select(CUDA).NAME != "cute", reason="needs a GPU that backend cute serves"
)


def batch(rows: int, columns: int) -> torch.Tensor:
    """Rows of normal data, of random bits, of zeros, of one NaN, of one Inf, of all NaN, of subnormals, in turn."""
    generator = torch.Generator(CUDA).manual_seed(columns)
    y = torch.randn(rows, columns, generator=generator, device=CUDA).bfloat16()
    random = torch.randint(-(2**15), 2**15, y.shape, generator=generator, device=CUDA).short()
    y[1::7] = random[1::7].view(torch.bfloat16)
    y[2::7] = -0.0
    y[3::7, columns // 3] = torch.nan
    y[4::7, -1] = -torch.inf
    y[5::7] = torch.nan
    y[6::7] = (random[6::7] & -0x7F81).view(torch.bfloat16)  # the exponent's bits cleared
    return y


@pytest.mark.parametrize("columns", [64, 128, 704, 1088, contract.FFN, 36_864])
def test_same_bits(columns):
    """Rows of fewer vectors than a warp has lanes, of an odd number of them, and of more than 4 a thread."""
    for rows in (1, 7, 1000):
        y = batch(rows, columns)
        y_q = torch.full((rows + 1, columns), torch.nan, device=CUDA).to(contract.QUANTIZED)
        s_y = torch.full((rows + 1,), torch.nan, device=CUDA)
        launch.quantize_rows(y, y_q[:rows], s_y[:rows])
        want = reference.row_scale(y)
        assert torch.equal(s_y[:rows], want)
        assert torch.equal(bits(y_q[:rows]), bits(reference.quantize(y, want)))
        assert s_y[rows].isnan()
        assert (bits(y_q[rows]) == 0x7F).all()


def test_offsets_past_2_to_the_31():
    """y has 2^31 elements at 149,797 rows."""
    rows, near = 149_800, slice(149_790, 149_800)
    y = torch.ones((rows, contract.FFN), dtype=torch.bfloat16, device=CUDA)
    y[near] = batch(10, contract.FFN)
    y_q = torch.empty_like(y, dtype=contract.QUANTIZED)
    s_y = torch.full((rows,), torch.nan, device=CUDA)
    launch.quantize_rows(y, y_q, s_y)
    want = reference.row_scale(y[near])
    assert torch.equal(s_y[near], want)
    assert torch.equal(bits(y_q[near]), bits(reference.quantize(y[near], want)))
    assert (s_y[: near.start] == reference.row_scale(y[:1])).all()
    assert (bits(y_q[: near.start]) == 0x7E).all()
