"""The hidden folder in which a checkpoint is made: its lock, its journal, and what is still to be moved out of it."""

import json
import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import filelock

from .destination import Room, ability


@dataclass(frozen=True)
class Begun:
    """What a journal has.

    Attributes:
        plan: by which it was begun; None if nothing was.
        names: of the files that are made.
        records: of the finished units, by name.
    """

    plan: str | None = None
    names: tuple[str, ...] = ()
    records: dict[str, dict[str, Any]] = field(default_factory=dict)


@dataclass(frozen=True)
class Pending:
    """A checkpoint that is complete, but not, or not all of it, at its destination."""

    names: tuple[str, ...]
    room: Room


class Scratch:
    """The folder. Only files that were made in it are ever removed from it.

    Attributes:
        folder: its path.
        payload: where the files are made, in a folder of their own that can take the destination's place.
    """

    def __init__(self, folder: Path):
        self.folder, self.payload = folder, folder / "files"
        self._journal, self._pending = folder / "journal.jsonl", folder / "pending.json"
        self._lock_file = folder / "lock"
        self._lock = filelock.FileLock(self._lock_file)

    @contextmanager
    def claimed(self, destination: Path) -> Iterator[None]:
        """Make it, and lock it until ``release``; that is called if what is done within fails.

        Raises:
            ValueError: another process has it, or it is somebody else's.
            OSError: it cannot be made.
        """
        self.folder.mkdir(exist_ok=True)
        there = {path.name for path in self.folder.iterdir()}
        own = {path.name for path in (self._journal, self._pending, self._lock_file)}
        if self._journal.name in there:
            own.add(self.payload.name)
        if strange := {name for name in there if name.removesuffix(".new") not in own}:
            raise ValueError(
                f"{self.folder} is where the unfinished {destination.name} would lie; there is something else in it, "
                f"{min(strange)}: move it away first"
            )
        try:
            with ability("lock files", self._lock_file):
                self._lock.acquire(timeout=0)
        except filelock.Timeout:
            raise ValueError(f"{destination} must not be written by two at once; another process is at it") from None
        try:
            yield
        except BaseException:
            self.release()
            raise

    def release(self) -> None:
        """Unlock it, and remove it if nothing was begun in it."""
        kept = self._journal.exists()
        self._lock.release()
        if not kept:
            with suppress(OSError):
                self._lock_file.unlink(missing_ok=True)
                self.folder.rmdir()

    def clear(self) -> None:
        """Remove what was made in it. The journal, which knows what that is, goes last."""
        for name in self.read_journal().names:
            (self.payload / name).unlink(missing_ok=True)
        with suppress(OSError):
            self.payload.rmdir()
        self._pending.unlink(missing_ok=True)
        self._journal.unlink(missing_ok=True)

    def begin(self, plan: str, names: Sequence[str]) -> None:
        """A journal for files of these names."""
        _replace(self._journal, json.dumps({"plan": plan, "names": names}) + "\n")
        self.payload.mkdir(exist_ok=True)

    def note(self, line: Mapping[str, Any]) -> None:
        """Add a line to the journal, in one piece whichever thread it comes from."""
        with open(self._journal, "ab", buffering=0) as file:
            file.write((json.dumps(line, allow_nan=False) + "\n").encode())

    def note_lost(self, units: Sequence[str]) -> None:
        """What is noted of these units is not to be trusted; where even that cannot be noted, no unit is."""
        try:
            self.note({"lost": list(units)})
            with open(self._journal, "rb") as file:
                os.fsync(file.fileno())
        except OSError:
            with suppress(OSError), open(self._journal, "r+b") as file:
                file.readline()
                file.truncate()

    def read_journal(self) -> Begun:
        lines = []
        if self._journal.is_file():
            for line in self._journal.read_text(encoding="utf-8", errors="replace").splitlines():
                with suppress(ValueError):  # cut off with the process that wrote it
                    lines.append(json.loads(line))
        if not lines or "plan" not in lines[0]:
            return Begun()
        records: dict[str, dict[str, Any]] = {}
        for line in lines[1:]:
            if "lost" in line:
                records = {unit: record for unit, record in records.items() if unit not in line["lost"]}
            else:
                records[line["unit"]] = line
        return Begun(lines[0]["plan"], tuple(lines[0]["names"]), records)

    def complete(self, pending: Pending) -> None:
        """All files are made and on the disk. From here on they will be moved, by this process or the next."""
        room = {"stale": pending.room.stale, "replaceable": sorted(pending.room.replaceable)}
        _replace(self._pending, json.dumps({"names": pending.names, **room}))

    def read_pending(self) -> Pending | None:
        if not self._pending.is_file():
            return None
        content = json.loads(self._pending.read_text(encoding="utf-8"))
        return Pending(tuple(content["names"]), Room(tuple(content["stale"]), frozenset(content["replaceable"])))


def write_kept(path: Path, content: bytes) -> None:
    """A file that is on the disk when this returns."""
    with open(path, "wb") as file:
        file.write(content)
        file.flush()
        with ability("say that a file is on the disk", path):
            os.fsync(file.fileno())


def _replace(path: Path, text: str) -> None:
    new = path.with_name(f"{path.name}.new")
    write_kept(new, text.encode())
    with ability("rename", path):
        os.replace(new, path)
