"""Checkpoints in safetensors, one file or several, read by rows in bounded memory.

Files are read, not mapped as the safetensors library does: pages of a mapped file count as the process's memory, 5 GB
a shard, and an error of the disk or the network kills the process instead of raising. The header is so simple that
nothing else is needed: 8 bytes of length, then JSON. Nothing is ever unpickled.
"""

import json
import math
import re
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

import torch

from . import hub

Value = TypeVar("Value")

INDEX_SUFFIX = ".safetensors.index.json"
SUFFIX = ".safetensors"

DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U8": torch.uint8,
    "BOOL": torch.bool,
}
"""By the format's names. Tensors of others, 4-bit ones say, can be copied but not read."""

NAMES = {dtype: name for name, dtype in DTYPES.items()}

_SHARD = re.compile(rf"(?P<stem>.+)-\d+-of-(?P<count>\d{{1,6}}){re.escape(SUFFIX)}")

HEADER_MAX = 100 * 2**20
"""As in the safetensors library: a length beyond it is garbage."""


@dataclass(frozen=True)
class Stored:
    """A tensor in a file: where it is, not what is in it."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    file: Path
    offset: int
    nbytes: int

    def __str__(self) -> str:
        return f"{self.name} ({self.dtype} {list(self.shape)})"

    def read_bytes(self, first: int, count: int) -> bytearray:
        """``count`` bytes from byte ``first``.

        Raises:
            ValueError: the file has become shorter.
        """
        data = bytearray(count)
        with open(self.file, "rb", buffering=0) as file:
            file.seek(self.offset + first)
            view, done = memoryview(data), 0
            while done < count:
                got = file.readinto(view[done:])
                if not got:
                    raise ValueError(f"{self.file} ended while {self.name} was read: it was changed or cut off")
                done += got
        return data

    def read(self, first: int = 0, count: int | None = None) -> torch.Tensor:
        """The whole tensor, or ``count`` of its rows from row ``first``: a fresh tensor on the CPU.

        Raises:
            ValueError: its dtype is not known here; the file has become shorter.
        """
        if self.dtype not in DTYPES:
            raise ValueError(f"{self} of {self.file} must be of dtype {', '.join(DTYPES)} to be read")
        dtype = DTYPES[self.dtype]
        if count is None:
            data, shape = self.read_bytes(0, self.nbytes), self.shape
        else:
            row = self.nbytes // self.shape[0]
            data, shape = self.read_bytes(first * row, count * row), (count, *self.shape[1:])
        if not data:
            return torch.empty(shape, dtype=dtype, device="cpu")
        return torch.frombuffer(data, dtype=dtype).view(shape)


@dataclass(frozen=True)
class Container:
    """The tensors of a checkpoint.

    Attributes:
        path: what it was opened by.
        files: its files.
        tensors: by name, in the order of the files.
        metadata_of: each file's metadata, all text.
    """

    path: Path
    files: tuple[Path, ...]
    tensors: dict[str, Stored]
    metadata_of: tuple[dict[str, str], ...]

    @property
    def metadata(self) -> dict[str, str]:
        """Of the first file."""
        return self.metadata_of[0]

    @property
    def nbytes(self) -> int:
        return sum(stored.nbytes for stored in self.tensors.values())


def open_checkpoint(path: Path | str) -> Container:
    """Read the headers of a safetensors file, of the files that an index.json names, or of those in a folder. The name
    of a snapshot in Hugging Face's cache will do, too.

    Raises:
        ValueError: it is none of these, a file is missing, cut off or damaged, or a name is there twice.
        OSError: a file cannot be read.
    """
    path = hub.find(path)
    files, index = _files(path)
    tensors: dict[str, Stored] = {}
    metadata_of = []
    for file in files:
        found, metadata = _read_header(file)
        metadata_of.append(metadata)
        for name, stored in found.items():
            if name in tensors:
                raise ValueError(f"{name} must be in one file; it is in {tensors[name].file} and in {file}")
            tensors[name] = stored
    for name, file in index.items():
        if name not in tensors or tensors[name].file.name != file:
            raise ValueError(f"{name} must be in {file}, as the index of {path} says; it is not")
    return Container(path, files, tensors, tuple(metadata_of))


def read_metadata(file: Path) -> dict[str, str]:
    """What a safetensors file says of itself.

    Raises:
        ValueError: it is none, or is damaged.
        OSError: it cannot be read.
    """
    return _read_header(file)[1]


def _files(path: Path) -> tuple[tuple[Path, ...], dict[str, str]]:
    """The files, and in which of them the index has each tensor."""
    if path.is_dir():
        found = sorted(path.glob(f"*{INDEX_SUFFIX}")) or sorted(path.glob(f"*{SUFFIX}"))
        if len(found) > 1 and found[0].name.endswith(INDEX_SUFFIX):
            raise ValueError(f"{path} must have one index; it has {', '.join(file.name for file in found)}")
        if not found:
            inner = [folder.name for folder in sorted(path.iterdir()) if any(folder.glob(f"*{SUFFIX}"))]
            advice = f"; give one of its folders {', '.join(inner)}" if inner else ""
            raise ValueError(f"{path} must hold safetensors files; it holds none{advice}")
        if not found[0].name.endswith(INDEX_SUFFIX):
            return _all_shards(path, found), {}
        path = found[0]
    if path.name.endswith(INDEX_SUFFIX):
        return _read_index(path)
    if path.suffix != SUFFIX and path.exists():
        raise ValueError(
            f"{path} must be a {SUFFIX} file, an {INDEX_SUFFIX[1:]} or a folder of them (pickles are never read: save "
            "the weights as safetensors first)"
        )
    return _all_shards(path, [path]), {}


def _all_shards(path: Path, files: list[Path]) -> tuple[Path, ...]:
    """The files, if none of a numbered set is missing."""
    names = {file.name for file in files}
    for file in files:
        if numbered := _SHARD.fullmatch(file.name):
            stem, count = numbered["stem"], numbered["count"]
            wanted = [f"{stem}-{i + 1:0{len(count)}d}-of-{count}{SUFFIX}" for i in range(int(count))]
            if missing := [name for name in wanted if name not in names]:
                raise ValueError(
                    f"{path} must have all {int(count)} files of its set (give the folder); {missing[0]} is missing"
                )
    return tuple(files)


def _read_index(path: Path) -> tuple[tuple[Path, ...], dict[str, str]]:
    try:
        index = json.loads(path.read_text(encoding="utf-8"), object_pairs_hook=_without_duplicates)
        of_tensor = index["weight_map"]
        names = sorted(set(of_tensor.values()))
        outside = [name for name in names if Path(name).name != name]
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ValueError(
            f"{path} must be the index of a checkpoint, JSON with a weight_map; it is not: {error}"
        ) from None
    if outside:
        raise ValueError(f"{path} must name files beside it; it names {outside[0]!r}")
    missing = [name for name in names if not (path.parent / name).is_file()]
    if missing:
        raise ValueError(f"{path} names {len(names)} files; missing: {', '.join(missing)}")
    return tuple(path.parent / name for name in names), of_tensor


def _without_duplicates(pairs: list[tuple[str, object]]) -> dict:
    seen = dict(pairs)
    if len(seen) < len(pairs):
        keys = [key for key, _ in pairs]
        raise ValueError(f"duplicate key {next(key for key in keys if keys.count(key) > 1)!r}")
    return seen


def _read_header(file: Path) -> tuple[dict[str, Stored], dict[str, str]]:
    """All that the file says of itself, checked against its size."""
    size = file.stat().st_size
    with open(file, "rb") as opened:
        length = int.from_bytes(opened.read(8), "little")
        if size < 8 or length > min(HEADER_MAX, size - 8):
            opened.seek(0)
            pointer = opened.read(23) == b"version https://git-lfs"
            what = "a Git LFS pointer: run git lfs pull" if pointer else f"{size:,} bytes, cut off or something else"
            raise ValueError(f"{file} must be a safetensors file; it is {what}")
        text = opened.read(length)
    try:
        header = json.loads(text.decode("utf-8"), object_pairs_hook=_without_duplicates)
        metadata = dict(header.pop("__metadata__", {}))
        stored = [
            Stored(name, entry["dtype"], tuple(entry["shape"]), file, *_span(entry, 8 + length))
            for name, entry in header.items()
        ]
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"{file} has a damaged header: {type(error).__name__} {error}") from None
    for tensor in stored:
        _check_size(tensor)
    end = 8 + length
    for tensor in sorted(stored, key=lambda tensor: (tensor.offset, tensor.nbytes)):
        if tensor.offset != end:
            raise ValueError(f"{file} has a damaged header: {tensor.name} does not begin where the one before ends")
        end = tensor.offset + tensor.nbytes
    if end != size:
        what = "is cut off" if size < end else "has something behind its tensors"
        raise ValueError(f"{file} {what}: its header describes {end:,} bytes, {size:,} are there")
    return {tensor.name: tensor for tensor in stored}, metadata


def _span(entry: dict, data: int) -> tuple[int, int]:
    begin, end = entry["data_offsets"]
    return data + begin, end - begin


def _check_size(tensor: Stored) -> None:
    sizes = (*tensor.shape, tensor.offset, tensor.nbytes)
    sound = all(isinstance(size, int) and size >= 0 for size in sizes)
    if sound and tensor.dtype in DTYPES:
        sound = tensor.nbytes == math.prod(tensor.shape) * DTYPES[tensor.dtype].itemsize
    if not sound:
        raise ValueError(f"{tensor.file} has a damaged header: {tensor} cannot take {tensor.nbytes} bytes")


def prefetched(calls: Iterable[Callable[[], Value]], ahead: int = 1) -> Iterator[Value]:
    """What the calls return, in order; a thread makes the next ``ahead`` of them meanwhile."""
    with ThreadPoolExecutor(1) as thread:
        waiting: deque = deque()
        try:
            for call in calls:
                waiting.append(thread.submit(call))
                if len(waiting) > ahead:
                    yield waiting.popleft().result()
            while waiting:
                yield waiting.popleft().result()
        finally:
            for future in waiting:
                future.cancel()
