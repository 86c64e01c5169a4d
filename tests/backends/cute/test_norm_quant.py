"""The kernel's way to divide gives the codes of the true division, in NumPy, for every BF16."""

import numpy as np
import pytest
from numpy_contract import BF16, F32, e4m3, fma

EVERY_BF16 = np.arange(2**16, dtype=np.uint16).view(BF16).astype(F32)


def kernel_codes(a: np.ndarray, s: np.float32) -> np.ndarray:
    """``quotient`` of the kernel, instruction by instruction."""
    y = np.full(a.shape, F32(1) / s)
    s = np.full(a.shape, s if s < np.inf else F32(0))
    q0 = a * y
    return e4m3(fma(-fma(s, q0, -a), y, q0)).view(np.uint8)


def assert_true_division(a: np.ndarray, s: np.float32) -> None:
    with np.errstate(all="ignore"):
        got, want = kernel_codes(a, s), e4m3(a / s).view(np.uint8)
    wrong = got != want
    assert not wrong.any(), f"s = {s}: {wrong.sum()} of {wrong.size} differ, first at a = {a[wrong][0]}"


@pytest.mark.parametrize("exponent", [88, 127, 254])
def test_every_a_and_every_mantissa_of_amax(exponent):
    """The least exponent above the floor of 1e-12, the middle, and the largest. In between, scaling a and s by a power
    of two scales every intermediate result exactly."""
    for mantissa in range(128):
        amax = np.array((exponent << 7) | mantissa, np.uint16).view(BF16).astype(F32)[()]
        assert_true_division(EVERY_BF16[~(np.abs(EVERY_BF16) > amax)], amax / F32(448))


def test_amax_at_the_floor_and_infinite():
    floor = F32(1e-12)
    assert_true_division(EVERY_BF16[~(np.abs(EVERY_BF16) > floor)], floor / F32(448))
    assert_true_division(EVERY_BF16, F32(np.inf))
