"""Safetensors files written by pieces, in bounded memory, that appear whole or not at all and can be resumed.

What is written lies in a hidden folder until it is complete, with a journal: a line for the plan, and one for each
finished unit with the checksums of its tensors. The header of a file comes last, into room that was left for it, so
that an unfinished one is no safetensors file. Then it is noted which files have to be moved to the destination, and
they are moved: whoever is interrupted from there on is finished by the next run.
"""

import os
import shutil
import zlib
from collections import defaultdict
from collections.abc import Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from typing import Any

from .destination import INDEX, Destination, ability
from .layout import Layout
from .scratch import Begun, Pending, Scratch, write_kept

HEADER_ROOM = 4096
"""For what the metadata do not say before the end, beyond what the draft has in its place."""


class Writer:
    """A checkpoint in the making. Use as a context manager: what is not published stays for another try, unless
    ``discard`` was called.

    Attributes:
        records: of the units that are finished, by name.
    """

    def __init__(
        self,
        destination: Destination,
        layout: Layout,
        metadata: Mapping[str, str],
        beside: Mapping[str, bytes],
        plan: str,
        resume: bool,
    ):
        """
        Args:
            destination: where it shall be.
            layout: of the tensors.
            metadata: a draft of the final ones, about as long.
            beside: other files for the folder, by name.
            plan: a digest of all that the content depends on; only what was begun by the same plan is resumed.
            resume: go on with what an interrupted run left.

        Raises:
            ValueError: another process is writing it, something at the destination must not be lost, or what is to be
                resumed was begun otherwise.
            OSError: it cannot be written, or there is too little room.
        """
        self._destination, self._layout, self._beside, self._plan = destination, layout, beside, plan
        self._header_bytes = {
            name: -(-(len(layout.header(name, metadata)) + HEADER_ROOM) // 64) * 64 for name in layout.files
        }
        self._names = [*layout.files, *([INDEX] if layout.sharded else []), *beside]
        self._scratch = Scratch(destination.partial)
        self._crcs: dict[str, int] = {}
        self._files: dict[str, Any] = {}
        self._unsynced: dict[str, list[str]] = defaultdict(list)
        self._published = self._discarded = False
        self._disk = ThreadPoolExecutor(1)
        self._syncing: Future | None = None
        self.records: dict[str, dict[str, Any]] = {}
        with self._scratch.claimed(destination.given):
            self._open(resume)

    def _open(self, resume: bool) -> None:
        begun, pending = self._scratch.read_journal(), self._scratch.read_pending()
        if pending is not None:
            self._destination.put(self._scratch.payload, pending.names, pending.room)
            if resume and begun.plan == self._plan:
                self.records, self._published = begun.records, True
                return
            self._scratch.clear()
            begun = Begun()
        self._room = self._destination.room(self._names, self._beside)
        if resume and begun.plan is not None:
            if begun.plan != self._plan:
                raise ValueError(
                    "--resume needs the same source and options as before; what was begun for "
                    f"{self._destination.given} had others. Without --resume it is begun anew"
                )
            self.records = {unit: found for unit, found in begun.records.items() if self._is_intact(found["crc32"])}
        if not self.records:
            self._begin()
        self._files = {name: open(self._scratch.payload / name, "r+b") for name in self._layout.files}  # noqa: SIM115

    def __enter__(self) -> "Writer":
        return self

    def __exit__(self, *_error) -> None:
        self._disk.shutdown()
        with suppress(OSError):  # what was raised first says what is wrong
            self._wait_for_disk()
        for file in self._files.values():
            with suppress(OSError):
                file.close()
        if self._discarded:
            self._scratch.clear()
        self._scratch.release()

    def discard(self) -> None:
        """Leave nothing for another try, which could not do better."""
        self._discarded = True

    def _begin(self) -> None:
        """From nothing, and only if it will fit."""
        self._scratch.clear()
        need = self._layout.nbytes + sum(self._header_bytes.values())
        free = shutil.disk_usage(self._scratch.folder).free
        if need > free:
            raise OSError(f"{self._destination.given} needs {need:,} bytes; {free:,} are free on that disk")
        self._scratch.begin(self._plan, self._names)
        for name, entries in self._layout.files.items():
            path = self._scratch.payload / name
            path.touch()
            with ability("make a file larger or write in the middle of it", path):
                os.truncate(path, self._header_bytes[name] + sum(entry.nbytes for entry in entries))
                with open(path, "r+b") as file:
                    file.seek(self._header_bytes[name] - 1)
                    file.write(b" ")

    def _is_intact(self, crcs: dict[str, int]) -> bool:
        """Whether these tensors are still what was written."""
        for name, crc in crcs.items():
            place = self._layout.place(name)
            found = 0
            try:
                with open(self._scratch.payload / place.file, "rb") as file:
                    file.seek(self._header_bytes[place.file] + place.begin)
                    left = place.entry.nbytes
                    while left and (data := file.read(min(left, 2**24))):
                        found, left = zlib.crc32(data, found), left - len(data)
            except FileNotFoundError:
                return False
            if left or found != crc:
                return False
        return True

    def write(self, name: str, data: bytes | bytearray | memoryview, at: int = 0) -> None:
        """Some bytes of a tensor, from byte ``at``. A tensor's bytes come in their order."""
        place = self._layout.place(name)
        file = self._files[place.file]
        file.seek(self._header_bytes[place.file] + place.begin + at)
        file.write(data)
        self._crcs[name] = zlib.crc32(data, self._crcs.get(name, 0) if at else 0)

    def finish(self, unit: str, names: Sequence[str], record: Mapping[str, Any]) -> None:
        """A unit is complete: its record is kept, with the checksums of its tensors.

        Raises:
            OSError: the disk did not keep what was written, of this unit or of one before.
        """
        name = self._layout.place(names[0]).file
        self._files[name].flush()
        record = {"unit": unit, **record, "crc32": {name: self._crcs.pop(name, 0) for name in names}}
        self._scratch.note(record)
        self.records[unit] = record
        self._unsynced[name].append(unit)
        # Begun early, the disk is done with it when the last unit comes. While one is under way no other is needed:
        # small tensors come faster than a disk answers.
        if self._syncing is None or self._syncing.done():
            self._wait_for_disk()
            self._syncing = self._disk.submit(self._sync, name)

    def _sync(self, name: str) -> None:
        """Have a file on the disk. An error is told once: the pages are lost, and the next try would succeed without
        them. So what the file got since it was last there is not to be trusted."""
        covered = len(self._unsynced[name])
        try:
            os.fsync(self._files[name].fileno())
        except OSError as error:
            self._scratch.note_lost(self._unsynced[name])
            what = f"{self._scratch.payload / name} was not kept by the disk: {error.strerror}"
            raise OSError(error.errno, what) from None
        del self._unsynced[name][:covered]

    def _wait_for_disk(self) -> None:
        try:
            if self._syncing is not None:
                self._syncing.result()
        except OSError:
            # Those that were finished meanwhile, too: the thread may have looked before they were there.
            self._scratch.note_lost([unit for units in self._unsynced.values() for unit in units])
            raise

    def publish(self, metadata: Mapping[str, str]) -> None:
        """Write the headers, the index and what lies beside, and put all at the destination."""
        if not self._published:
            self._disk.shutdown()
            self._wait_for_disk()
            for name, file in self._files.items():
                header = self._layout.header(name, metadata)
                room = self._header_bytes[name] - 8
                if len(header) > room:
                    raise RuntimeError(f"the header of {name} takes {len(header)} bytes; room was left for {room}")
                file.seek(0)
                file.write(room.to_bytes(8, "little") + header.ljust(room))
                file.flush()
                self._sync(name)
                file.close()
            index = {INDEX: self._layout.index(metadata)} if self._layout.sharded else {}
            for name, content in {**index, **self._beside}.items():
                write_kept(self._scratch.payload / name, content)
            self._scratch.complete(Pending(tuple(self._names), self._room))
            self._destination.put(self._scratch.payload, self._names, self._room)
        self.discard()
