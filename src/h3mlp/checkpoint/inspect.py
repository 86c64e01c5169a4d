"""``h3mlp inspect``: what a checkpoint is, a line a layer, without reading its weights."""

from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from .container import Container, open_checkpoint
from .prepared import SCALE, WEIGHT, Prepared, is_prepared, open_prepared
from .source import fc1_layers


@dataclass(frozen=True)
class Line:
    """A layer.

    Attributes:
        layer: its place in the model.
        name: of its weight's tensor.
        form: "BF16", "E4M3 per channel" and so on; of a prepared layer what it was made of.
        action: of a prepared layer, how: "quantized", "repacked" or "requantized"; else "".
        gate_order: which half comes first; of a prepared layer where it came from.
        shape: [2F, H].
        scale_range: the least and the largest scale; None where there is none.
        snr_db: of the rounding to FP8, where that is known.
    """

    layer: str
    name: str
    form: str
    action: str
    gate_order: str
    shape: tuple[int, int]
    scale_range: tuple[float, float] | None
    snr_db: float | None


@dataclass(frozen=True)
class Inspected:
    """A checkpoint.

    Attributes:
        path: what it was opened by.
        prepared: whether it is what ``h3mlp convert`` writes.
        files: how many.
        bytes: of all tensors.
        other_tensors: how many besides those of the layers.
        lines: a layer each.
        origin: of a prepared checkpoint, what else its metadata say.
    """

    path: Path
    prepared: bool
    files: int
    bytes: int
    other_tensors: int
    lines: tuple[Line, ...]
    origin: dict[str, Any]

    def as_json(self) -> dict[str, Any]:
        return {**asdict(self), "path": str(self.path)}


def run(path: Path, gate_order: str | None = None) -> Inspected:
    """
    Args:
        path: a safetensors file, an index.json or a folder.
        gate_order: of a checkpoint that is not as its names say.

    Raises:
        ValueError: it is not a checkpoint of MiniMax-H3, or is damaged.
        OSError: it cannot be read.
    """
    container = open_checkpoint(path)
    if is_prepared(container):
        return _prepared(open_prepared(path))
    return _source(container, gate_order)


def _source(container: Container, gate_order: str | None) -> Inspected:
    layers = fc1_layers(container, gate_order)
    lines = tuple(
        Line(
            layer=str(layer),
            name=found.weight.name,
            form=found.form,
            action="",
            gate_order=found.gate_order,
            shape=found.weight.shape,
            scale_range=found.open().scale_range(),
            snr_db=None,
        )
        for layer, found in layers.items()
    )
    own = sum(len(found.consumed) + 1 for found in layers.values())  # the norm weight too
    return _inspected(container, False, own, lines, {})


def _prepared(prepared: Prepared) -> Inspected:
    description, lines = prepared.description, []
    for layer in prepared.layers:
        of_layer = description.layers[str(layer)]
        scale = prepared.load(layer, SCALE, copy=True)
        weight = prepared.stored(layer, WEIGHT)
        line = Line(
            layer=str(layer),
            name=weight.name,
            form=of_layer["form"],
            action=of_layer["action"],
            gate_order=of_layer["gate_order"],
            shape=weight.shape,
            scale_range=(scale.min().item(), scale.max().item()),
            snr_db=of_layer["snr_db"],
        )
        lines.append(line)
    origin = {name: getattr(description, name) for name in ("sources", "loras", "layout", "rounding", "made_by")}
    return _inspected(prepared.container, True, 4 * len(lines), tuple(lines), origin)


def _inspected(container: Container, prepared: bool, own: int, lines: tuple[Line, ...], origin: dict) -> Inspected:
    others = len(container.tensors) - own
    return Inspected(container.path, prepared, len(container.files), container.nbytes, others, lines, origin)
