"""Which tensor of a checkpoint goes into which file, and where in it."""

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from .container import DTYPES, SUFFIX
from .destination import STEM

SHARD_BYTES = 5 * 10**9
"""Where the ecosystem begins another file."""


@dataclass(frozen=True)
class Entry:
    """A tensor to be written."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    nbytes: int


@dataclass(frozen=True)
class Place:
    file: str
    begin: int  # within the file's data
    entry: Entry


class Layout:
    """Which tensor goes where."""

    def __init__(self, units: Iterable[Sequence[Entry]], one_file: str | None):
        """
        Args:
            units: tensors that belong together, in order; a unit is never split over two files.
            one_file: the name of the one file, or None to begin another after ``SHARD_BYTES``.
        """
        shards: list[list[Entry]] = [[]]
        for unit in units:
            size = sum(entry.nbytes for entry in (*shards[-1], *unit))
            if shards[-1] and size > SHARD_BYTES and one_file is None:
                shards.append([])
            shards[-1].extend(unit)
        single = one_file or f"{STEM}{SUFFIX}"
        count = len(shards)
        names = [single] if count == 1 else [f"{STEM}-{i + 1:05d}-of-{count:05d}{SUFFIX}" for i in range(count)]
        self.files = dict(zip(names, shards, strict=True))
        self.sharded = count > 1
        self._places: dict[str, Place] = {}
        for name, entries in self.files.items():
            begin = 0
            for entry in sorted(entries, key=_alignment):
                self._places[entry.name] = Place(name, begin, entry)
                begin += entry.nbytes

    @property
    def nbytes(self) -> int:
        return sum(place.entry.nbytes for place in self._places.values())

    def place(self, name: str) -> Place:
        return self._places[name]

    def header(self, file: str, metadata: Mapping[str, str]) -> bytes:
        """The JSON of one file."""
        header: dict[str, Any] = {"__metadata__": dict(metadata)}
        for name, place in self._places.items():
            if place.file == file:
                span = [place.begin, place.begin + place.entry.nbytes]
                header[name] = {"dtype": place.entry.dtype, "shape": place.entry.shape, "data_offsets": span}
        return json.dumps(header, separators=(",", ":")).encode()

    def index(self, metadata: Mapping[str, str]) -> bytes:
        weight_map = {name: place.file for name, place in sorted(self._places.items())}
        content = {"metadata": {"total_size": self.nbytes, **metadata}, "weight_map": weight_map}
        return (json.dumps(content, indent=2) + "\n").encode()


def _alignment(entry: Entry) -> tuple[bool, int]:
    """Sizes of whole cache lines come first, so that all of them are aligned to one, then wider elements."""
    return bool(entry.nbytes % 64), -DTYPES[entry.dtype].itemsize if entry.dtype in DTYPES else -1
