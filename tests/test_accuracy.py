import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from h3mlp import accuracy
from h3mlp.accuracy import bf16_steps, compare, spread


def test_equal_outputs():
    y = torch.randn(3, 5)
    found = compare(y, y.clone())
    assert (found.relative_rms, found.snr_db, found.equal_share, found.rows) == (0.0, math.inf, 1.0, 3)


def test_known_error_over_several_blocks():
    """Noise of a tenth of the signal in each element: -20 dB, also past 1024 rows."""
    reference = torch.ones(2500, 4)
    got = reference.clone()
    got[:, ::2] += 0.1 * math.sqrt(2)
    found = compare(got, reference)
    assert found.relative_rms == pytest.approx(0.1, rel=1e-6)
    assert found.snr_db == pytest.approx(20, rel=1e-6)
    assert found.equal_share == 0.5


def test_nan_shows():
    reference = torch.ones(2, 2)
    got = torch.tensor([[1.0, torch.nan], [1.0, 1.0]])
    found = compare(got, reference)
    assert math.isnan(found.relative_rms)
    assert math.isnan(found.snr_db)
    assert found.equal_share == 0.75


def test_zero_reference():
    found = compare(torch.ones(1, 2), torch.zeros(1, 2))
    assert found.relative_rms == math.inf
    assert found.snr_db == -math.inf


@given(st.integers(-0x7F80, 0x7F80), st.integers(-0x7F80, 0x7F80))
def test_steps_count_bf16_numbers(a, b):
    """An ordinal k stands for the k-th BF16 number above or below zero."""

    def number(ordinal: int) -> torch.Tensor:
        pattern = ordinal if ordinal >= 0 else -ordinal - 2**15
        return torch.tensor([pattern], dtype=torch.int16).view(torch.bfloat16)

    assert bf16_steps(number(a), number(b)).item() == abs(a - b)


def test_zeros_are_no_step_apart():
    assert bf16_steps(torch.tensor([0.0]), torch.tensor([-0.0])).item() == 0


@pytest.mark.parametrize(
    ("rows", "sample", "want"), [(1, 16, [0]), (3, 16, [0, 1, 2]), (5, 3, [0, 2, 4]), (2**24, 2, [0, 2**24 - 1])]
)
def test_spread(rows, sample, want):
    assert spread(rows, sample).tolist() == want


def test_mlp_outside():
    """Around out = 2 + 1 * 1, whose bound is 1e-2 + 4.8e-2 + ulps of 2^-7 (o, p) and 2^-6 (out): 0.0892."""
    o, residual = torch.ones(5, 1).bfloat16(), torch.full((5, 1), 2.0).bfloat16()
    gate, index = torch.ones(1, 1).bfloat16(), torch.tensor([0, 0, 0, 0, -1])
    out = torch.tensor([[3.0], [3.0781], [3.09375], [torch.nan], [3.0]]).bfloat16()
    want = [[False], [False], [True], [True], [True]]
    assert accuracy.mlp_outside(out, o, gate, residual, index).tolist() == want
    assert accuracy.mlp_outside(out, o, None, residual, None).tolist() == [*want[:4], [False]]
    o[3] = torch.nan
    assert not accuracy.mlp_outside(out, o, gate, residual, index)[3], "a NaN where it belongs"
    out[4] = 2
    assert not accuracy.mlp_outside(out, o, gate, residual, index)[4], "an index outside: the residual"
