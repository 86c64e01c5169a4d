"""The kernel's way to divide gives the codes of the true division, in NumPy, for every BF16."""

import numpy as np
import pytest
from numpy_contract import BF16, F32, e4m3, fma

EVERY_BF16 = np.arange(2**16, dtype=np.uint16).view(BF16).astype(F32)


def kernel_codes(a: np.ndarray, s: np.float32) -> np.ndarray:
    """``inverse`` and ``quotient`` of the kernel, instruction by instruction."""
    one = np.ones(1, F32)
    y = one / s
    if fma(np.array([-s]), y, one)[0] < 0:
        y = (y.view(np.uint32) - np.uint32(1)).view(F32)
    rest = fma(np.array([-s]), y, one) * y if s < np.inf else np.zeros(1, F32)
    assert rest[0] >= 0, "the sign of zero is lost"
    return e4m3(fma(a, np.broadcast_to(y, a.shape), a * rest)).view(np.uint8)


def assert_true_division(a: np.ndarray, s: np.float32) -> None:
    with np.errstate(all="ignore"):
        got, want = kernel_codes(a, s), e4m3(a / s).view(np.uint8)
    wrong = got != want
    assert not wrong.any(), f"s = {s}: {wrong.sum()} of {wrong.size} differ, first at a = {a[wrong][0]}"


@pytest.mark.parametrize("exponent", [88, 127, *range(238, 255)])
def test_every_a_and_every_mantissa_of_amax(exponent):
    """The least exponent above the floor of 1e-12, the middle, and those where the rest of 1 / s, 2^-24 of it, may be
    subnormal. In between, scaling a and s by a power of two scales every intermediate result exactly."""
    for mantissa in range(128):
        amax = np.array((exponent << 7) | mantissa, np.uint16).view(BF16).astype(F32)[()]
        assert_true_division(EVERY_BF16[~(np.abs(EVERY_BF16) > amax)], amax / F32(448))


def test_amax_at_the_floor_and_infinite():
    floor = F32(1e-12)
    assert_true_division(EVERY_BF16[~(np.abs(EVERY_BF16) > floor)], floor / F32(448))
    assert_true_division(EVERY_BF16, F32(np.inf))
