"""Safetensors files written by pieces, in bounded memory, that appear whole or not at all and can be resumed.

What is written lies in a hidden folder beside the destination until it is complete, with a journal that has a line for
each finished unit and the checksums of its tensors. The header comes last, into room that was left for it, so that an
unfinished file is no safetensors file. Then everything is renamed into place.
"""

import json
import os
import shutil
import zlib
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import filelock

from .container import DTYPES, INDEX_SUFFIX, SUFFIX

SHARD_BYTES = 5 * 10**9
"""Where the ecosystem begins another file."""

HEADER_ROOM = 4096
"""For what the metadata do not say before the end, beyond what the draft has in its place."""

STEM = "model"
"""Of files in a folder: model.safetensors, model-00001-of-00002.safetensors."""


@dataclass(frozen=True)
class Entry:
    """A tensor to be written."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    nbytes: int


@dataclass(frozen=True)
class _Place:
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
        self._places: dict[str, _Place] = {}
        for name, entries in self.files.items():
            begin = 0
            for entry in sorted(entries, key=_alignment):
                self._places[entry.name] = _Place(name, begin, entry)
                begin += entry.nbytes

    @property
    def nbytes(self) -> int:
        return sum(place.entry.nbytes for place in self._places.values())

    def place(self, name: str) -> _Place:
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


class Writer:
    """A checkpoint in the making. Use as a context manager: what is not published stays for another try, unless
    ``discard`` was called."""

    def __init__(self, destination: Path, layout: Layout, metadata: Mapping[str, str], plan: str, resume: bool):
        """
        Args:
            destination: a name that ends in .safetensors for one file, else a folder.
            layout: of the tensors.
            metadata: a draft of the final ones, about as long.
            plan: a digest of all that the content depends on; only what was begun by the same plan is resumed.
            resume: go on with what an interrupted run left.

        Raises:
            ValueError: another process is writing it; what is to be resumed was begun otherwise.
            OSError: it cannot be written, or there is too little room.
        """
        self._destination, self._layout, self._plan = destination, layout, plan
        self._room = {name: -(-(len(layout.header(name, metadata)) + HEADER_ROOM) // 64) * 64 for name in layout.files}
        self._folder = partial_folder(destination)
        self._crcs: dict[str, int] = {}
        self._files: dict[str, Any] = {}
        self._discarded = False
        self._disk = ThreadPoolExecutor(1)
        self._syncing: Future | None = None
        self._folder.mkdir(exist_ok=True)
        self._lock = filelock.FileLock(self._folder / "lock")
        try:
            self._lock.acquire(timeout=0)
        except filelock.Timeout:
            raise ValueError(f"{destination} must not be written by two at once; another process is at it") from None
        try:
            _recover(self._folder, destination)
            self.records = self._resumed() if resume else {}
            if not self.records:
                self._begin()
            self._files = {name: open(self._payload / name, "r+b") for name in layout.files}  # noqa: SIM115
            self._journal = open(self._folder / "journal.jsonl", "a", encoding="utf-8")  # noqa: SIM115
        except BaseException:
            self._lock.release()
            raise

    @property
    def _payload(self) -> Path:
        return self._folder / "files"

    def __enter__(self) -> "Writer":
        return self

    def __exit__(self, *_error) -> None:
        self._disk.shutdown()
        for file in (*self._files.values(), self._journal):
            with suppress(OSError):  # a full disk: what was raised first says so
                file.close()
        self._lock.release()
        if self._discarded:
            shutil.rmtree(self._folder, ignore_errors=True)

    def discard(self) -> None:
        """Leave nothing for another try, which could not do better."""
        self._discarded = True

    def _begin(self) -> None:
        """From nothing, and only if it will fit."""
        shutil.rmtree(self._payload, ignore_errors=True)
        (self._folder / "journal.jsonl").unlink(missing_ok=True)
        need, free = self._layout.nbytes + sum(self._room.values()), shutil.disk_usage(self._folder).free
        if need > free:
            self._folder_is_gone()
            raise OSError(f"{self._destination} needs {need:,} bytes; {free:,} are free on that disk")
        self._payload.mkdir()
        for name, entries in self._layout.files.items():
            with open(self._payload / name, "wb") as file:
                file.truncate(self._room[name] + sum(entry.nbytes for entry in entries))
        line = json.dumps({"plan": self._plan})
        (self._folder / "journal.jsonl").write_text(f"{line}\n", encoding="utf-8")

    def _folder_is_gone(self) -> None:
        self._lock.release()
        shutil.rmtree(self._folder, ignore_errors=True)

    def _resumed(self) -> dict[str, dict[str, Any]]:
        """What the journal has of finished units, as far as their tensors are still what was written."""
        journal = self._folder / "journal.jsonl"
        if not journal.is_file():
            return {}
        lines = []
        for line in journal.read_text(encoding="utf-8", errors="replace").splitlines():
            try:
                lines.append(json.loads(line))
            except ValueError:  # cut off with the process that wrote it
                continue
        if not lines or lines[0].get("plan") != self._plan:
            raise ValueError(
                f"--resume needs the same source and options as before; what was begun for {self._destination} had "
                "others. Without --resume it is begun anew"
            )
        records = {line["unit"]: line for line in lines[1:]}
        return {unit: record for unit, record in records.items() if self._is_intact(record["crc32"])}

    def _is_intact(self, crcs: dict[str, int]) -> bool:
        for name, crc in crcs.items():
            place = self._layout.place(name)
            found = 0
            with open(self._payload / place.file, "rb") as file:
                file.seek(self._room[place.file] + place.begin)
                left = place.entry.nbytes
                while left and (data := file.read(min(left, 2**24))):
                    found, left = zlib.crc32(data, found), left - len(data)
            if left or found != crc:
                return False
        return True

    def write(self, name: str, data: bytes | bytearray | memoryview, at: int = 0) -> None:
        """Some bytes of a tensor, from byte ``at``. A tensor's bytes come in their order."""
        place = self._layout.place(name)
        file = self._files[place.file]
        file.seek(self._room[place.file] + place.begin + at)
        file.write(data)
        self._crcs[name] = zlib.crc32(data, self._crcs.get(name, 0) if at else 0)

    def finish(self, unit: str, names: Sequence[str], record: Mapping[str, Any]) -> None:
        """A unit is complete: its record is kept, with the checksums of its tensors."""
        file = self._files[self._layout.place(names[0]).file]
        file.flush()
        # Begun early, the disk is done with it when the last unit comes. What fails, fails again at the end. While one
        # is under way no other is needed: small tensors come faster than a disk answers.
        if self._syncing is None or self._syncing.done():
            self._syncing = self._disk.submit(os.fsync, file.fileno())
        record = {"unit": unit, **record, "crc32": {name: self._crcs.pop(name, 0) for name in names}}
        self._journal.write(json.dumps(record) + "\n")
        self._journal.flush()
        self.records[unit] = record

    def publish(self, metadata: Mapping[str, str], beside: Mapping[str, bytes]) -> None:
        """Write the headers, the index and what lies beside, and put all in the destination's place."""
        self._disk.shutdown()
        for name, file in self._files.items():
            header = self._layout.header(name, metadata)
            room = self._room[name] - 8
            if len(header) > room:
                raise RuntimeError(f"the header of {name} takes {len(header)} bytes; room was left for {room}")
            file.seek(0)
            file.write(room.to_bytes(8, "little") + header.ljust(room))
            file.flush()
            os.fsync(file.fileno())
            file.close()
        if self._destination.suffix == SUFFIX:
            (name,) = self._files
            os.replace(self._payload / name, self._destination)
        else:
            if self._layout.sharded:
                beside = {f"{STEM}{INDEX_SUFFIX}": self._layout.index(metadata), **beside}
            for name, content in beside.items():
                (self._payload / name).write_bytes(content)
            _put_folder(self._payload, self._destination)
        self.discard()


def partial_folder(destination: Path) -> Path:
    """Where an unfinished checkpoint lies: on the same disk, so that it can be renamed."""
    return destination.with_name(f".{destination.name}.partial")


def _put_folder(made: Path, destination: Path) -> None:
    """Two renames: POSIX has none that replaces a folder with files in it."""
    if destination.exists():
        destination.rename(_old(made.parent))
    try:
        made.rename(destination)
    finally:
        _recover(made.parent, destination)


def _recover(folder: Path, destination: Path) -> None:
    """Put back what was renamed for what then did not come, be it in a process that was killed."""
    if _old(folder).exists() and not destination.exists():
        _old(folder).rename(destination)


def _old(folder: Path) -> Path:
    return folder / "old"
