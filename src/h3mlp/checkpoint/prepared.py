"""The format of prepared checkpoints: FC1 layers as the kernels take them, in safetensors.

A layer is the state_dict of an ``FC1SwiGLU``, under a name that is the same whatever the layer was called where it came
from, and that no other program mistakes for a weight it knows::

    blocks.{i}.fc1_swiglu.weight          F8_E4M3 [2F, H], packed row order
    blocks.{i}.fc1_swiglu.weight_scale    F32 [2F], the same order
    blocks.{i}.fc1_swiglu.norm_weight     BF16 [H], of the RMSNorm before
    blocks.{i}.fc1_swiglu._extra_state    U8, the name of the row order

and ``token_refiner.blocks.{i}.fc1_swiglu...`` likewise. The metadata of each file have a JSON object under "h3mlp": see
``Description``. Tensors that were copied beside have the names they had.
"""

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open

from .. import check, contract
from ..weights import PackedFC1
from .container import NAMES, Container, Stored, open_checkpoint
from .names import Layer, parse_layer

FORMAT = "h3mlp.fc1"
VERSION = 1
KEY = "h3mlp"
"""Of the JSON object in the metadata."""

TENSORS = WEIGHT, SCALE, NORM, ROW_ORDER = "weight", "weight_scale", "norm_weight", "_extra_state"

ROUNDING = "E4M3, to nearest even, saturating; scale of a row = max |row| / 448"

FULL_PRECISION = (
    "The source asks for full-precision products (ComfyUI's full_precision_matrix_mult): here activations are "
    "quantized to FP8."
)


@dataclass(frozen=True)
class Description:
    """What a prepared checkpoint says of itself.

    Attributes:
        hidden, ffn: H and F.
        layers: by name, what each was made of: source, form, gate_order, action ("quantized", "repacked" or
            "requantized"), full_precision (whether the source asks for activations that are not quantized), snr_db (of
            the rounding, from every 16th row; null where nothing was rounded) and crc32 of each tensor.
        sources: name, bytes and sha256 of each file (null if it was not asked for).
        loras: the same of each adapter, and what ``lora.Lora.record`` has.
        beside: the SHA-256 of what was copied into the folder beside the files, by name.
        layout: the row order of all weights and scales.
        rounding: how weights were quantized.
        made_by: the version of h3mlp.
    """

    hidden: int
    ffn: int
    layers: dict[str, dict[str, Any]]
    sources: list[dict[str, Any]]
    loras: list[dict[str, Any]] = field(default_factory=list)
    beside: dict[str, str] = field(default_factory=dict)
    layout: str = contract.PACKED
    rounding: str = ROUNDING
    made_by: str = ""
    format: str = FORMAT
    version: int = VERSION

    def as_metadata(self) -> dict[str, str]:
        """Of a safetensors file. "format" is what transformers looks for."""
        return {"format": "pt", KEY: json.dumps(asdict(self), separators=(",", ":"), allow_nan=False)}


def tensor_name(layer: Layer | str, which: str) -> str:
    return f"{layer}.fc1_swiglu.{which}"


def tensors_of(hidden: int, ffn: int) -> dict[str, tuple[str, tuple[int, ...]]]:
    """The dtype, as safetensors calls it, and the shape of each of a layer's tensors."""
    return {
        WEIGHT: (NAMES[contract.QUANTIZED], (2 * ffn, hidden)),
        SCALE: (NAMES[contract.SCALE], (2 * ffn,)),
        NORM: (NAMES[contract.ACTIVATION], (hidden,)),
        ROW_ORDER: (NAMES[torch.uint8], (len(contract.PACKED),)),
    }


def snr_text(action: str, snr_db: float | None) -> str:
    """For tables."""
    return "exact" if action == "repacked" else "-" if snr_db is None else f"{snr_db:.2f}"


def describes_prepared(metadata: Mapping[str, str]) -> bool:
    """Whether these are the metadata of a file that ``h3mlp convert`` wrote, in this version or another."""
    try:
        return json.loads(metadata[KEY])["format"].startswith(FORMAT)
    except (KeyError, TypeError, ValueError, AttributeError):
        return False


def is_prepared(container: Container) -> bool:
    return any(map(describes_prepared, container.metadata_of))


@dataclass(frozen=True)
class Prepared:
    """An opened prepared checkpoint: its tensors and what it says of itself."""

    container: Container
    description: Description

    @property
    def layers(self) -> tuple[Layer, ...]:
        return tuple(parse_layer(name) for name in self.description.layers)

    def stored(self, layer: Layer, which: str) -> Stored:
        return self.container.tensors[tensor_name(layer, which)]

    @property
    def others(self) -> tuple[str, ...]:
        """The names of the tensors that were copied."""
        own = {tensor_name(layer, which) for layer in self.layers for which in TENSORS}
        return tuple(name for name in self.container.tensors if name not in own)

    def get(self, name: str, copy: bool = False) -> torch.Tensor:
        """A tensor on the CPU: a copy, or in the memory of the mapped file, which is read where it is used."""
        stored = self.container.tensors[name]
        if copy:
            return stored.read()
        try:
            with safe_open(stored.file, "pt") as file:
                return file.get_tensor(name)
        except (OSError, RuntimeError, SafetensorError) as error:
            raise OSError(f"{stored.file} cannot be mapped into memory ({error}): load it with copy=True") from None

    def load(self, layer: Layer, which: str, copy: bool = False) -> torch.Tensor:
        """One of a layer's, likewise."""
        return self.get(tensor_name(layer, which), copy)

    def fc1(self, layer: Layer, copy: bool = False) -> PackedFC1:
        return PackedFC1(self.load(layer, WEIGHT, copy), self.load(layer, SCALE, copy), self.description.layout)


def open_prepared(path: Path | str | Prepared) -> Prepared:
    """One that is open already is returned as it is.

    Raises:
        ValueError: it is not a prepared checkpoint, is damaged, or is of a newer version.
        OSError: it cannot be read.
    """
    if isinstance(path, Prepared):
        return path
    container = open_checkpoint(path)
    described = {metadata[KEY] for metadata in container.metadata_of if KEY in metadata}
    if not described:
        raise ValueError(f"{path} must be a prepared checkpoint; it is not: make one of it with `h3mlp convert`")
    if len(described) > 1:
        raise ValueError(f"{path} must be of one conversion; its files are of {len(described)}: convert again")
    try:
        content = json.loads(described.pop())
        if content["format"] != FORMAT or content["version"] != VERSION:
            raise ValueError(
                f"must be {FORMAT!r}, version {VERSION}; it is {content['format']!r}, version {content['version']}: "
                "another h3mlp made it, install that or convert again"
            )
        description = Description(**content)
        layers = {name: parse_layer(name) for name in description.layers}
    except (ValueError, KeyError, TypeError) as error:
        raise ValueError(f"the metadata of {path} are not those of a prepared checkpoint: {error}") from None
    if description.layout != contract.PACKED:
        raise ValueError(f"{path} must have its rows in order {contract.PACKED!r}; it says {description.layout!r}")
    for name, layer in layers.items():
        if layer is None or str(layer) != name:
            raise ValueError(f"the metadata of {path} must name layers such as blocks.0; they name {name!r}")
        _check_layer(container, name, description)
    return Prepared(container, description)


def _check_layer(container: Container, layer: str, description: Description) -> None:
    for which, (dtype, shape) in tensors_of(description.hidden, description.ffn).items():
        stored = container.tensors.get(tensor_name(layer, which))
        if stored is None or (stored.dtype, stored.shape) != (dtype, shape):
            there = stored or "missing"
            raise ValueError(f"{tensor_name(layer, which)} must be {dtype} {list(shape)}; it is {there}")
    order = container.tensors[tensor_name(layer, ROW_ORDER)]
    if bytes(order.read_bytes(0, order.nbytes)) != contract.PACKED.encode():
        raise ValueError(f"{order.name} must say {contract.PACKED!r}, the row order of the metadata; it says another")


def load_layer(
    path: Path | str | Prepared, layer: int | str, device: torch.device | str = "cpu", *, copy: bool = False
) -> tuple[PackedFC1, torch.Tensor]:
    """The prepared weight of one layer, and its norm weight BF16 [H]. As ``load_fc1``; takes an opened one too."""
    prepared = open_prepared(path)
    wanted = parse_layer(layer)
    if wanted not in prepared.layers:
        names = list(prepared.description.layers)
        check.refuse("layer", f"one of {names[0]} to {names[-1]}, or the number of a transformer block", layer)
    packed, norm = prepared.fc1(wanted, copy), prepared.load(wanted, NORM, copy)
    return packed.to(device), norm.to(device)


def load_fc1(
    path: Path | str, layer: int | str, device: torch.device | str = "cpu", *, copy: bool = False
) -> PackedFC1:
    """The prepared FC1 weight of one layer of a checkpoint that ``h3mlp convert`` made.

    On the CPU it lies in the mapped file: nothing is copied, and pages are read when they are used. A file that is
    overwritten in place then changes the weight, and one that is cut off, or on a network disk that fails, ends the
    process by SIGBUS, which is no exception. With ``copy`` it is read at once into memory of its own.

    Args:
        path: the file, its index.json or its folder, or the name of a snapshot in Hugging Face's cache.
        layer: the number of a transformer block, or a block's name in either naming ("blocks.3",
            "transformer_blocks.3", "token_refiner.refiner_blocks.0").
        device: where the weight shall be.
        copy: read the file instead of mapping it.

    Returns:
        E4M3 [2F, H] and FP32 [2F], with the row order checked.

    Raises:
        ValueError: it is not a prepared checkpoint, or is damaged; there is no such layer.
        OSError: a file cannot be read, or not be mapped.
    """
    return load_layer(path, layer, device, copy=copy)[0]
