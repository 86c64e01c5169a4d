"""What is written together, an FC1 layer or a tensor that is copied: how it is read, and what it becomes."""

import math
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, Protocol

import torch

from .. import contract
from .container import DTYPES, Stored
from .layout import Entry
from .packer import STEP_ROWS, LayerPacker
from .prepared import tensor_name, tensors_of
from .source import FC1Layer, Rows
from .writer import Writer

COPY_BYTES = 2**26
"""Of a tensor that is copied, at a time."""


class Unit(Protocol):
    """Tensors that are written together and, after an interruption, either all kept or all written again."""

    name: str
    nbytes: int  # to be read
    entries: list[Entry]
    decisions: list  # all that its content depends on besides the contents of the files

    def reads(self) -> Iterator[Callable[[], Any]]:
        """What gets its pieces."""

    def write(self, pieces: Iterator[Any], writer: Writer) -> Iterator[int]:
        """Write it and yield, after each piece, how many bytes were read for it. Then its record is there."""

    record: dict[str, Any]


class LayerUnit:
    """An FC1 layer."""

    def __init__(self, source: FC1Layer):
        self.source, self.name = source, str(source.layer)
        self.nbytes = source.weight.nbytes
        self.entries = [
            Entry(tensor_name(self.name, which), dtype, shape, DTYPES[dtype].itemsize * math.prod(shape))
            for which, (dtype, shape) in tensors_of(source.hidden, source.ffn).items()
        ]
        self.decisions = [self.name, describe(source, None), source.norm.name, *source.consumed]
        self.decisions += [pair.decisions for pair in source.pairs]
        self.record: dict[str, Any] = {}

    def reads(self) -> Iterator[Callable[[], Rows]]:
        for first in range(0, self.source.ffn, STEP_ROWS):
            yield partial(self.source.read, first, min(STEP_ROWS, self.source.ffn - first))

    def write(self, pieces: Iterator[Rows], writer: Writer) -> Iterator[int]:
        weight, scale, norm, row_order = (entry.name for entry in self.entries)
        packer = LayerPacker(self.source)
        for _ in self.reads():
            rows = next(pieces)
            writer.write(weight, packer.pack(rows), at=2 * rows.first * self.source.hidden)
            yield rows.gate.nbytes + rows.up.nbytes
        writer.write(scale, _bytes_of(packer.scales))
        writer.write(norm, _bytes_of(self.source.read_norm()))
        writer.write(row_order, contract.PACKED.encode())
        self.record = describe(self.source, packer.snr_db)


class CopyUnit:
    """Any other tensor, as it is."""

    def __init__(self, stored: Stored):
        self.stored, self.name, self.nbytes = stored, f"copy {stored.name}", stored.nbytes
        self.entries = [Entry(stored.name, stored.dtype, stored.shape, stored.nbytes)]
        self.decisions = [self.name]
        self.record: dict[str, Any] = {}

    def reads(self) -> Iterator[Callable[[], bytearray]]:
        for first in range(0, self.nbytes, COPY_BYTES):
            yield partial(self.stored.read_bytes, first, min(COPY_BYTES, self.nbytes - first))

    def write(self, pieces: Iterator[bytearray], writer: Writer) -> Iterator[int]:
        first = 0
        for _ in self.reads():
            data = next(pieces)
            writer.write(self.stored.name, data, first)
            first += len(data)
            yield len(data)


def describe(source: FC1Layer, snr_db: float | None) -> dict[str, Any]:
    """What a prepared checkpoint says of this layer's origin."""
    merged = f" + {len(source.pairs)} LoRA" if source.pairs else ""
    action = "repacked" if source.repacked else ("requantized" if source.scale is not None else "quantized")
    return {
        "source": source.weight.name,
        "naming": source.naming,
        "form": source.form + merged,
        "gate_order": source.gate_order,
        "action": action,
        "full_precision": source.full_precision,
        "snr_db": snr_db if snr_db is None else round(snr_db, 2),
    }


def _bytes_of(tensor: torch.Tensor) -> bytearray:
    data = bytearray(tensor.nbytes)
    torch.frombuffer(data, dtype=tensor.dtype).copy_(tensor)
    return data
