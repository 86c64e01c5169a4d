"""How far a timed output is from what it should be."""

from dataclasses import dataclass

import torch

from ...accuracy import compare
from ...files import finite

ABSOLUTE, RELATIVE = 1e-2, 1.6e-2
"""Tolerance of the outputs, of about 1; 1.6% are two steps of BF16."""


@dataclass(frozen=True)
class Error:
    """An output against the reference on ``rows`` sampled rows.

    Attributes:
        relative_rms: RMS of the difference over RMS of the reference; None where that is not finite.
        violations: elements further from the reference than the operator's tolerance, NaN included.
        rows: rows compared.
    """

    relative_rms: float | None
    violations: int
    rows: int


def error_of(got: torch.Tensor, exact: torch.Tensor, outside: int | None = None) -> Error:
    """Sampled rows of an output against the reference's. ``outside``: how many are out of tolerance, where that is not
    0.01 + 1.6%."""
    found = compare(got.float(), exact.float())
    return Error(finite(found.relative_rms), violations(got, exact) if outside is None else outside, found.rows)


def violations(got: torch.Tensor, exact: torch.Tensor) -> int:
    """Elements out of tolerance; a NaN is, whatever the reference has."""
    exact = exact.float()
    return (~((got.float() - exact).abs() <= ABSOLUTE + RELATIVE * exact.abs())).sum().item()
