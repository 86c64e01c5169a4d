"""What is at the place where a checkpoint shall be, and how a finished one gets there.

As with cp, a symlink is followed, and a folder may be there already and keeps what else is in it. Unlike cp, nothing is
ever replaced or removed that ``h3mlp convert`` did not write. What it wrote says so: its safetensors files and their
index in their metadata; what it copied beside them, config.json, by its SHA-256 in those metadata.
"""

import errno
import hashlib
import json
import os
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from .container import INDEX_SUFFIX, SUFFIX, read_metadata
from .prepared import KEY, describes_prepared

STEM = "model"
"""Of files in a folder: model.safetensors, model-00001-of-00002.safetensors."""

INDEX = f"{STEM}{INDEX_SUFFIX}"

_UNSUPPORTED = {
    errno.EINVAL,
    errno.ENODEV,
    errno.ENOLCK,
    errno.ENOSYS,
    errno.ENOTSUP,
    errno.EOPNOTSUPP,
    errno.EPERM,
    errno.EXDEV,
}
"""What object stores mounted as folders, HDFS and some network disks answer to what they cannot do."""


@contextmanager
def ability(to: str, path: Path) -> Iterator[None]:
    """Around a call that some file systems do not have: says which, where, and the way out.

    Raises:
        OSError: they do not have it, or anything else went wrong.
    """
    try:
        yield
    except (NotImplementedError, OSError) as error:
        if isinstance(error, OSError) and error.errno not in _UNSUPPORTED:
            raise
        raise OSError(
            f"{path} is on a file system that cannot {to} ({error}): convert to a local disk, then copy what was made"
        ) from None


@dataclass(frozen=True)
class Room:
    """What a checkpoint finds at its destination.

    Attributes:
        stale: files of an earlier conversion that this one does not replace.
        replaceable: SHA-256 of files without metadata of their own that may be replaced.
    """

    stale: tuple[str, ...]
    replaceable: frozenset[str]


@dataclass(frozen=True)
class Destination:
    """A file, or a folder in which there may be other files.

    Attributes:
        given: as the user wrote it.
        path: with symlinks followed.
        one_file: the file's name; None for a folder.
    """

    given: Path
    path: Path
    one_file: str | None

    @classmethod
    def at(cls, given: Path, sources: Iterable[Path] = ()) -> "Destination":
        """A name that ends in .safetensors is a file's, any other a folder's.

        Raises:
            ValueError: something of another kind is there, the folder above is not, or it is a source's place.
        """
        path = Path(os.path.realpath(given))
        of_file = SUFFIX in (given.suffix, path.suffix)
        if path.is_symlink():
            raise ValueError(f"{given} must lead to a file or folder; it is a symlink to itself")
        if not path.parent.is_dir():
            raise ValueError(f"{given} must be in a folder that exists; {path.parent} does not")
        if path.exists() and not (path.is_file() if of_file else path.is_dir()):
            want = f"a file, since it ends in {SUFFIX}" if of_file else f"a folder, or end in {SUFFIX}"
            there = "a folder" if path.is_dir() else "a file" if path.is_file() else "neither file nor folder"
            raise ValueError(f"{given} must be {want}; what is there is {there}")
        for source in sources:
            for place in (Path(os.path.realpath(source)), Path(os.path.realpath(source.parent), source.name)):
                if path in (place, place.parent):
                    raise ValueError(f"{given} must be another file or folder than the source; {source} is there")
        return cls(given, path, path.name if of_file else None)

    @property
    def folder(self) -> Path:
        """Where the files are."""
        return self.path.parent if self.one_file else self.path

    @property
    def partial(self) -> Path:
        """Where what is unfinished lies, on the same disk so that it can be renamed: beside what is not there yet, and
        in a folder that is, which may be a disk of its own."""
        beside = self.path.parent / f".{self.path.name}.partial"
        if self.one_file or not self.path.is_dir() or beside.exists():
            return beside
        return self.path / f".{STEM}.partial"

    def room(self, names: Iterable[str], beside: Mapping[str, bytes]) -> Room:
        """Whether these files can be put there, with those beside them.

        Raises:
            ValueError: something would have to go that ``h3mlp convert`` did not write, or the folder would not be one
                checkpoint any more.
        """
        earlier, copied = self._earlier()
        replaceable = copied | {_sha256(content) for content in beside.values()}
        names = {*names, *beside}
        for name in sorted(names - earlier):
            if not _may_go(self.folder / name, replaceable if name in beside else None):
                self._refuse_to_replace(name)
        if self.one_file is None and self.path.is_dir():
            for other in sorted(path.name for path in self.path.iterdir()):
                if other.endswith((SUFFIX, INDEX_SUFFIX)) and other not in names | earlier:
                    raise ValueError(
                        f"{self.given} must not hold {other}, which is not of an earlier h3mlp convert: a folder is "
                        f"opened as one checkpoint. Give another folder, or a file there: {self.given / 'NAME'}{SUFFIX}"
                    )
        return Room(tuple(sorted(earlier - names)), replaceable)

    def put(self, made: Path, names: Sequence[str], room: Room) -> None:
        """Move these files there from the folder in which they were made, and remove the stale ones. What was done
        already is not done again. A folder that is not there yet appears whole.

        Raises:
            ValueError: something is there now that must not be lost.
            OSError: they cannot be moved.
        """
        with ability("rename", self.path):
            if self.one_file is None and made.is_dir() and not self.path.exists():
                os.rename(made, self.path)
            for name in names:
                if (made / name).exists():
                    if not _may_go(self.folder / name, room.replaceable):
                        self._refuse_to_replace(name)
                    os.replace(made / name, self.folder / name)
        for name in room.stale:
            if _may_go(self.folder / name, room.replaceable):
                (self.folder / name).unlink(missing_ok=True)

    def _earlier(self) -> tuple[frozenset[str], frozenset[str]]:
        """The names of the files of an earlier conversion, and the SHA-256 of what it copied beside them."""
        index = self.folder / INDEX
        if self.one_file:
            names = [self.one_file]
        elif _is_ours(index):
            names = [INDEX, *json.loads(index.read_text(encoding="utf-8"))["weight_map"].values()]
        else:
            names = [f"{STEM}{SUFFIX}"]
        ours = {name for name in names if _is_plain(name) and _is_ours(self.folder / name)}
        copied: dict[str, str] = {}
        for name in () if self.one_file else ours:
            copied |= json.loads(_metadata(self.folder / name)[KEY]).get("beside", {})
        ours |= {name for name, sha256 in copied.items() if _is_plain(name) and _may_go(self.folder / name, {sha256})}
        return frozenset(ours), frozenset(copied.values())

    def _refuse_to_replace(self, name: str) -> None:
        there = self.folder / name
        what = "is a symlink" if there.is_symlink() else "was not written by h3mlp convert"
        shown = self.given if self.one_file else self.given / name
        raise ValueError(
            f"{shown} must be new or of an earlier h3mlp convert, which is replaced; what is there {what}: move it "
            "away first"
        )


def _is_plain(name: str) -> bool:
    """Whether this is the name of a file in the folder itself."""
    return Path(name).name == name


def _may_go(path: Path, hashes: Collection[str] | None) -> bool:
    """Whether nothing is there, or what ``h3mlp convert`` wrote, to be known by its metadata or by these SHA-256. With
    None it may be nothing at all."""
    if not (path.exists() or path.is_symlink()):
        return True
    if hashes is None or path.is_symlink() or not path.is_file():
        return False
    if path.name.endswith((SUFFIX, INDEX_SUFFIX)):
        return _is_ours(path)
    return _sha256(path.read_bytes()) in hashes


def _is_ours(path: Path) -> bool:
    """Whether this is a file with metadata that ``h3mlp convert`` wrote."""
    try:
        return not path.is_symlink() and describes_prepared(_metadata(path))
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return False


def _metadata(path: Path) -> Mapping[str, str]:
    if not path.name.endswith(INDEX_SUFFIX):
        return read_metadata(path)
    index = json.loads(path.read_text(encoding="utf-8"))
    if not all(isinstance(name, str) for name in index["weight_map"].values()):
        raise ValueError(f"{path} must name files")
    return index["metadata"]


def _sha256(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()
