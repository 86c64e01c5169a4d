"""``h3mlp convert``: the FC1 layers of any checkpoint, prepared for the kernels, as a new checkpoint.

Layer after layer, some rows at a time: a thread reads the next rows while these are quantized and written, and another
hashes the source. Memory does not grow with the checkpoint.
"""

import hashlib
import json
import time
from collections.abc import Callable, Sequence
from contextlib import closing
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from .._version import __version__
from .container import Container, Stored, open_checkpoint, prefetched
from .destination import Destination
from .hashing import hashing
from .layout import Layout
from .lora import Adapter, Lora
from .names import Layer
from .prepared import TENSORS, Description, is_prepared, tensor_name
from .source import FC1Layer, fc1_layers, with_loras
from .units import CopyUnit, LayerUnit, Unit, describe
from .writer import Writer

Progress = Callable[[str, float, float], None]
"""Takes the current step, and how many bytes of how many are done."""


@dataclass(frozen=True)
class Report:
    """What was converted.

    Attributes:
        destination: what was written.
        files: its safetensors files.
        description: what it says of itself.
        copied: the names of the tensors copied beside.
        left_out: how many tensors of the source were not.
        left_to_engine: the modules of adapters, besides FC1, that were not merged.
        resumed: units that an earlier run had finished.
        bytes_read, bytes_written: of tensors.
        seconds: all in all.
    """

    destination: Path
    files: tuple[str, ...]
    description: Description
    copied: tuple[str, ...]
    left_out: int
    left_to_engine: tuple[str, ...]
    resumed: int
    bytes_read: int
    bytes_written: int
    seconds: float

    def as_json(self) -> dict[str, Any]:
        return {**asdict(self), "destination": str(self.destination)}


@dataclass(frozen=True)
class _Job:
    """All that is known before the first weight is read."""

    container: Container
    layers: dict[Layer, FC1Layer]
    adapters: tuple[Lora, ...]
    others: tuple[Stored, ...]

    @property
    def files(self) -> tuple[Path, ...]:
        return (*self.container.files, *(adapter.path for adapter in self.adapters))

    def units(self, copy_others: bool) -> list[Unit]:
        return [*map(LayerUnit, self.layers.values()), *map(CopyUnit, self.others if copy_others else ())]


def run(
    source: Path,
    destination: Path,
    *,
    gate_order: str | None = None,
    loras: Sequence[Adapter | tuple] = (),
    copy_others: bool = False,
    resume: bool = False,
    hashes: bool = True,
    progress: Progress = lambda *_: None,
) -> Report:
    """Convert a checkpoint.

    Args:
        source: a safetensors file, an index.json or a folder of them, with FC1 weights under names of MiniMax or
            diffusers in BF16, FP16, FP32 or FP8.
        destination: one file if it ends in .safetensors, else a folder, there already or not, for files of at most
            5 GB. What an earlier conversion put there is replaced at the end; nothing else is touched.
        gate_order: "gate_up" or "up_gate", where the source is not as its names say.
        loras: adapters to merge: ``Adapter``, or its fields as a tuple, such as (path, scale).
        copy_others: copy all other tensors too, and config.json into a folder.
        resume: go on with what an interrupted run has left.
        hashes: note the SHA-256 of the source's files.
        progress: is called after every few rows.

    Raises:
        ValueError: the source or an adapter is not what it must be; something at the destination must not be lost.
        OSError: a file cannot be read or written. What is finished is kept for ``resume``.
    """
    started = time.perf_counter()
    job = _open(source, gate_order, loras)
    place = Destination.at(destination, job.files)
    beside = _config(job.container) if copy_others and not place.one_file else {}
    beside_sha256 = {name: hashlib.sha256(content).hexdigest() for name, content in beside.items()}
    units = job.units(copy_others)
    layout = Layout((unit.entries for unit in units), place.one_file)
    states = _states(job.files)
    draft = _description(job, {}, dict.fromkeys(job.files, "0" * 64), beside_sha256)
    decisions = [unit.decisions for unit in units]
    plan = _digest(__version__, states, layout.index({}).decode(), decisions, beside_sha256)
    with (
        hashing(job.files if hashes else ()) as hash_of,
        Writer(place, layout, draft.as_metadata(), beside, plan, resume) as writer,
    ):
        todo = [unit for unit in units if unit.name not in writer.records]
        try:
            _write(todo, writer, progress)
            sums = {file: hash_of(file) for file in job.files}
            if states != _states(job.files):
                raise ValueError(f"{source} must not change while it is read; it did")
        except ValueError:
            writer.discard()
            raise
        description = _description(job, writer.records, sums, beside_sha256)
        writer.publish(description.as_metadata())
    norms = {found.norm.name for found in job.layers.values()}
    return Report(
        destination=destination,
        files=tuple(layout.files),
        description=description,
        copied=tuple(stored.name for stored in job.others if copy_others),
        left_out=0 if copy_others else sum(stored.name not in norms for stored in job.others),
        left_to_engine=tuple(sorted({name for adapter in job.adapters for name in adapter.others})),
        resumed=len(units) - len(todo),
        bytes_read=sum(unit.nbytes for unit in todo),
        bytes_written=layout.nbytes,
        seconds=time.perf_counter() - started,
    )


def _open(source: Path, gate_order: str | None, loras: Sequence[Adapter | tuple]) -> _Job:
    container = open_checkpoint(source)
    if is_prepared(container):
        raise ValueError(f"{source} must not be prepared yet; it is: it can be loaded as it is")
    layers, adapters = with_loras(fc1_layers(container, gate_order), [Adapter(*lora) for lora in loras])
    consumed = {name for found in layers.values() for name in found.consumed}
    others = tuple(stored for name, stored in container.tensors.items() if name not in consumed)
    return _Job(container, layers, adapters, others)


def _config(container: Container) -> dict[str, bytes]:
    """The model's configuration, which makes a folder with all tensors one that can be loaded."""
    config = container.files[0].with_name("config.json")
    return {config.name: config.read_bytes()} if config.is_file() else {}


def _write(todo: Sequence[Unit], writer: Writer, progress: Progress) -> None:
    read, total = 0, sum(unit.nbytes for unit in todo)
    with closing(prefetched(call for unit in todo for call in unit.reads())) as pieces:
        for unit in todo:
            for nbytes in unit.write(pieces, writer):
                read += nbytes
                progress(unit.name, read, total)
            writer.finish(unit.name, [entry.name for entry in unit.entries], unit.record)
    progress("checksums", total, total)


def _description(
    job: _Job, records: dict[str, dict], sums: dict[Path, str | None], beside: dict[str, str]
) -> Description:
    """The metadata; without records a draft of the same length."""
    layers = {}
    for layer, found in job.layers.items():
        record = records.get(str(layer), {**describe(found, snr_db=99.99), "crc32": {}})
        crcs = {which: record["crc32"].get(tensor_name(layer, which), 2**32 - 1) for which in TENSORS}
        layers[str(layer)] = {**{key: record[key] for key in describe(found, None)}, "crc32": crcs}

    def as_source(file: Path) -> dict[str, Any]:
        return {"name": file.name, "bytes": file.stat().st_size, "sha256": sums[file]}

    first = next(iter(job.layers.values()))
    return Description(
        hidden=first.hidden,
        ffn=first.ffn,
        layers=layers,
        sources=[as_source(file) for file in job.container.files],
        loras=[{**as_source(adapter.path), **adapter.record} for adapter in job.adapters],
        beside=beside,
        made_by=__version__,
    )


def _states(files: Sequence[Path]) -> list[list]:
    stats = [(file.resolve(), file.stat()) for file in files]
    return [[str(path), stat.st_size, stat.st_mtime_ns] for path, stat in stats]


def _digest(*content: object) -> str:
    return hashlib.sha256(json.dumps(content).encode()).hexdigest()
