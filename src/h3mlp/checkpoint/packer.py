"""One FC1 layer from rows of any form to the bytes of a prepared checkpoint."""

import torch

from .. import contract
from ..accuracy import decibels
from ..weights import scale_rows_
from .source import FC1Layer, Rows

STEP_ROWS = 512
"""Rows of each half at a time: 11 MB in FP32, which stays in a cache and in memory that is used again."""

SAMPLED = 16
"""The error of the rounding is measured on every 16th row."""


class LayerPacker:
    """Codes and scales of a layer in packed row order, some rows after the others.

    Attributes:
        source: the layer.
    """

    def __init__(self, source: FC1Layer):
        self.source = source
        self._opened = source.open()
        shape = (source.ffn // contract.ROW_GROUP, 2, contract.ROW_GROUP)
        self._scale = torch.empty(shape, dtype=contract.SCALE, device="cpu")
        if source.repacked:
            for half, scale in enumerate(self._opened.row_scales()):
                self._scale[:, half] = scale.view(-1, contract.ROW_GROUP)
        self._codes = bytearray()
        self._noise = self._signal = 0.0

    @property
    def scales(self) -> torch.Tensor:
        """FP32 [2F]; complete when all rows are packed."""
        return self._scale.flatten()

    @property
    def snr_db(self) -> float | None:
        """Of the rounding to E4M3; None where nothing was rounded."""
        if self.source.repacked or not self._noise or not self._signal:
            return None
        return decibels(self._signal, self._noise)

    def pack(self, rows: Rows) -> bytearray:
        """The codes of these rows of both halves, ready to be written. The next call uses the same memory.

        Raises:
            ValueError: a weight is NaN or Inf; says the row.
        """
        count, hidden = rows.gate.shape
        if len(self._codes) != 2 * count * hidden:
            self._codes = bytearray(2 * count * hidden)
        packed = torch.frombuffer(self._codes, dtype=contract.QUANTIZED).view(-1, 2, contract.ROW_GROUP, hidden)
        for half, is_up in enumerate((False, True)):
            if self.source.repacked:
                self._copy(rows.up if is_up else rows.gate, packed[:, half], rows)
            else:
                self._quantize(self._opened.fp32(rows, is_up), packed[:, half], half, rows)
        return self._codes

    def _copy(self, codes: torch.Tensor, packed: torch.Tensor, rows: Rows) -> None:
        packed.copy_(codes.view(packed.shape))
        if codes.view(torch.uint8).bitwise_and(0x7F).max() == 0x7F:  # E4M3's NaN, of either sign
            self._opened.check(rows)

    def _quantize(self, fp32: torch.Tensor, packed: torch.Tensor, half: int, rows: Rows) -> None:
        scale = scale_rows_(fp32)
        if not scale.isfinite().all():
            self._opened.check(rows)
            row = rows.first + int((~scale.isfinite()).nonzero()[0, 0])
            what = f"{('gate', 'up')[half]} row {row} of {self.source.weight.name}"
            raise ValueError(f"{what} must be finite with its scale and its adapters; it is not")
        group = rows.first // contract.ROW_GROUP
        self._scale[group : group + len(packed), half] = scale.view(-1, contract.ROW_GROUP)
        packed.copy_(fp32.view(packed.shape))
        # Of the quotients, which are 448 at most, and times the square of the scale in FP64: FP32 does not have the
        # squares of the largest weights.
        sampled, power = fp32[::SAMPLED], scale[::SAMPLED].double().square_()
        codes = packed[:: SAMPLED // contract.ROW_GROUP, 0]
        self._noise += codes.float().sub_(sampled).square_().sum(1, dtype=torch.float64).dot(power).item()
        self._signal += sampled.square().sum(1, dtype=torch.float64).dot(power).item()
