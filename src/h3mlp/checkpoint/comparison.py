"""A prepared weight beside its source: how far each row is off, and which mistake that looks like."""

import math
import zlib
from collections.abc import Iterator

import torch
import torch.nn.functional as F

from .. import contract
from ..accuracy import decibels, spread
from .packer import STEP_ROWS
from .prepared import SCALE, TENSORS, WEIGHT, Prepared
from .source import E4M3_HALF_STEP, FC1Layer

SAME_DIRECTION = 0.99
"""Cosine of a row with its source's, whatever the scale: 0.9996 at 31 dB, about 0 for two different rows."""

SAME_WEIGHT_DB = 18.5
"""SNR from which two weights are the same but for rounding: twice a 17th of each number, as E4M3 rounds at most."""

SAMPLED = 16
"""The exchanged halves are tried on every 16th row."""

SOME_ROWS = 64
"""Rows of which other orders are told."""


class Comparison:
    """Row by row, [2F]: those of the gate half, then those of the up half.

    Attributes:
        signal, noise: FP64, the squares of a source row and of the difference.
        unresolved: FP64, the square of the difference that half a step of both weights' smallest codes makes.
        cosine: of the two rows.
        exchanged: signal and noise of the sampled rows with the halves the other way round.
        damaged: tensors that are not what was written.
        bf16: the source's weight as the BF16 layer has it, gate first.
    """

    def __init__(self, prepared: Prepared, source: FC1Layer):
        self._prepared, self._source = prepared, source
        ffn, hidden = source.ffn, source.hidden
        of_rows = torch.zeros((4, 2, ffn), dtype=torch.float64, device="cpu")
        self.signal, self.noise, self.unresolved, self.cosine = of_rows
        self.bf16 = torch.empty((2, ffn, hidden), dtype=contract.ACTIVATION, device="cpu")
        self.exchanged = (0.0, 0.0)
        self._scale = prepared.load(source.layer, SCALE, copy=True).view(-1, 2, contract.ROW_GROUP, 1)
        stored, crc = prepared.stored(source.layer, WEIGHT), 0
        opened = source.open()
        for first in range(0, ffn, STEP_ROWS):
            rows = source.read(first, min(STEP_ROWS, ffn - first))
            count = len(rows.gate)
            data = stored.read_bytes(2 * first * hidden, 2 * count * hidden)
            crc = zlib.crc32(data, crc)
            codes = torch.frombuffer(data, dtype=contract.QUANTIZED).view(-1, 2, contract.ROW_GROUP, hidden)
            groups = slice(first // contract.ROW_GROUP, (first + count) // contract.ROW_GROUP)
            got = [(codes[:, half].float() * self._scale[groups, half]).flatten(0, 1) for half in range(2)]
            for half, is_up in enumerate((False, True)):
                want = opened.fp32(rows, is_up)
                self.bf16[half, first : first + count] = want
                self._compare(got[half], want, half, slice(first, first + count))
                steps = E4M3_HALF_STEP * self._scale[groups, half].flatten() + opened.half_steps(first, count, is_up)
                self.unresolved[half, first : first + count] = hidden * steps.double().square()
                self._compare_exchanged(got[1 - half][::SAMPLED], want[::SAMPLED])
        self.signal, self.noise, self.unresolved, self.cosine = of_rows.flatten(1)
        self.bf16 = self.bf16.flatten(0, 1)
        self.damaged = tuple(self._damaged(crc))

    @property
    def snr_db(self) -> torch.Tensor:
        """FP64 [2F]; infinite for equal rows, minus infinity for those with a NaN."""
        snr = 10 * (self.signal / self.noise).log10()
        return torch.where(self.noise == 0, math.inf, snr.nan_to_num_(nan=-math.inf, posinf=math.inf))

    @property
    def worst(self) -> int:
        """The row with the least SNR; one that is off by no more than its codes can tell only where all are."""
        resolved = ~(self.noise <= self.unresolved)
        return int(torch.where(resolved | ~resolved.any(), self.snr_db, math.inf).argmin())

    def faults(self, least: float) -> Iterator[str]:
        """What is wrong with the rows, if any has less than this; where it is infinite, if any differs at all.

        A row whose numbers are tiny beside its scale, be it that of a whole tensor or the least that there is, has
        codes of few bits: it may be off by half a step of the smallest ones."""
        allowed = self.signal * 10 ** (-least / 10) + (self.unresolved if math.isfinite(least) else 0)
        bad = ~(self.noise <= allowed)  # NaN too
        if not bad.any():
            return
        share = bad.double().mean().item()
        if share < 0.5:
            ffn, row = self._source.ffn, int(bad.nonzero()[0, 0])
            first = self._source.stored_row(row % ffn, is_up=row >= ffn)
            yield f"{int(bad.sum())} of its rows are off, the first is row {first} of {self._source.weight.name}"
        elif decibels(*self.exchanged) >= SAME_WEIGHT_DB:
            yield "its halves are exchanged: gate and up are the other way round"
        elif self.cosine.nanmedian() >= SAME_DIRECTION:
            yield "its scales are not those of their rows: the codes are right"
        elif (order := self._linear_order()) is not None:
            yield f"its rows are not packed: they are in order {order}"
        else:
            yield "it is another weight: no order of the halves fits"

    def _compare(self, got: torch.Tensor, want: torch.Tensor, half: int, rows: slice) -> None:
        signal, power = want.square().sum(1, dtype=torch.float64), got.square().sum(1, dtype=torch.float64)
        self.cosine[half, rows] = (got * want).sum(1, dtype=torch.float64) / (signal * power).sqrt()
        self.noise[half, rows] = (got - want).square_().sum(1, dtype=torch.float64)
        self.signal[half, rows] = signal

    def _compare_exchanged(self, got: torch.Tensor, want: torch.Tensor) -> None:
        signal, noise = (t.square().sum(dtype=torch.float64).item() for t in (want, got - want))
        self.exchanged = (self.exchanged[0] + signal, self.exchanged[1] + noise)

    def _linear_order(self) -> str | None:
        """The order in which the rows are, if it is that of the halves one after the other."""
        rows = spread(2 * self._source.ffn, SOME_ROWS)
        stored = self._prepared.stored(self._source.layer, WEIGHT)
        got = torch.cat([stored.read(row, 1) for row in rows.tolist()]).float()
        for order, shift in (("gate_up", 0), ("up_gate", self._source.ffn)):
            want = self.bf16[(rows + shift) % (2 * self._source.ffn)].float()
            if F.cosine_similarity(got, want).median() >= SAME_DIRECTION:
                return order
        return None

    def _damaged(self, crc_of_weight: int) -> Iterator[str]:
        recorded = self._prepared.description.layers[str(self._source.layer)]["crc32"]
        for which in TENSORS:
            stored = self._prepared.stored(self._source.layer, which)
            crc = crc_of_weight if which == WEIGHT else zlib.crc32(stored.read_bytes(0, stored.nbytes))
            if crc != recorded[which]:
                yield f"{stored.name} is damaged: its bytes are not those that were written"
