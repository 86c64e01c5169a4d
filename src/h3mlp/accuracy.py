"""How far one output is from another."""

import math
from dataclasses import dataclass

import torch

from . import contract, reference

BLOCK_ROWS = 1024
"""Rows compared in FP64 at a time: 117 MB at F = 14336."""


@dataclass(frozen=True)
class Accuracy:
    """An output against its reference.

    Attributes:
        relative_rms: RMS of the difference over RMS of the reference.
        snr_db: the same as a signal-to-noise ratio in dB; infinite where the two are equal.
        equal_share: share of elements equal as numbers.
        rows: rows compared.
    """

    relative_rms: float
    snr_db: float
    equal_share: float
    rows: int


def compare(got: torch.Tensor, reference: torch.Tensor) -> Accuracy:
    """Compare two [M, N] tensors in FP64. A NaN in either makes the first two NaN and counts as unequal."""
    noise = signal = equal = 0.0
    for a, b in zip(got.split(BLOCK_ROWS), reference.split(BLOCK_ROWS), strict=True):
        noise += (a.double() - b.double()).square().sum().item()
        signal += b.double().square().sum().item()
        equal += (a == b).sum().item()
    relative_rms = math.sqrt(_noise_ratio(signal, noise))
    return Accuracy(relative_rms, decibels(signal, noise), equal / got.numel(), got.shape[0])


def decibels(signal: float, noise: float) -> float:
    """The ratio of two powers: infinite without noise, minus infinity for noise alone, NaN where either is."""
    ratio = _noise_ratio(signal, noise)
    return -10 * math.log10(ratio) if ratio > 0 else (math.inf if ratio == 0 else math.nan)


def _noise_ratio(signal: float, noise: float) -> float:
    return noise / signal if signal else (0.0 if noise == 0 else math.inf)


def spread(rows: int, sample: int) -> torch.Tensor:
    """Up to ``sample`` row numbers below ``rows``, evenly spread from the first to the last."""
    return torch.linspace(0, rows - 1, min(rows, sample), dtype=torch.float64, device="cpu").round().long()


def bf16_steps(got: torch.Tensor, reference: torch.Tensor) -> torch.Tensor:
    """Distance of two BF16 tensors in BF16 numbers (0: equal, 1: neighbours), as int32. +0 and -0 are equal."""

    def ordinal(t: torch.Tensor) -> torch.Tensor:
        bits = t.to(contract.ACTIVATION).view(torch.int16).int()
        return torch.where(bits < 0, -(bits & 0x7FFF), bits)

    return (ordinal(got) - ordinal(reference)).abs()


def ulp(t: torch.Tensor) -> torch.Tensor:
    """The distance from the magnitude of each BF16 to the next BF16, FP32."""
    next_up = (t.abs().view(torch.int16) + 1).view(contract.ACTIVATION)
    return next_up.float() - t.abs().float()


def mlp_outside(
    out: torch.Tensor,
    o: torch.Tensor,
    gate: torch.Tensor | None,
    residual: torch.Tensor,
    index: torch.Tensor | None,
) -> torch.Tensor:
    """Where the MLP's out [M, H] is farther from that of this o than the public test of the specified MLP lets it be:
    1e-2 + 1.6e-2 of it, and an ulp each of o, times the gate, of p and of out. A NaN where only one has it is too
    far."""
    want = reference.gated_residual(o, gate, residual, index)
    if index is None:
        factor, p = torch.ones_like(o), o
    else:
        factor = gate[torch.where((index >= 0) & (index < gate.shape[0]), index, 0)]
        p = factor * o
    bound = 1e-2 + 1.6e-2 * want.float().abs() + factor.float().abs() * ulp(o) + ulp(p) + ulp(want)
    close = (out.float() - want.float()).abs() <= bound
    return ~close & ~(out.isnan() & want.isnan()) & ~(out == want)
