"""The FC1 layers of any checkpoint: found by name, in every form, handed out as gate and up rows.

A weight's form is its dtype and, of FP8, what its scale belongs to:

* BF16, FP16, FP32: as they are.
* FP8 with a scale per channel ([2F], [2F, 1]), per half ([2], in the order of the halves, as vLLM fuses static
  scales), per tensor ([], [1]) or per block of 128 x 128: ``weight = code * scale``, whether the scale is called
  weight_scale, scale_weight or, as DeepSeek does, weight_scale_inv.

E4M3 codes with one scale a row, or one for many rows, are what the kernels take, so that they need no second rounding.
Scales are always read by the row of the weight that they stand beside, whatever happens to that row afterwards.
"""

import json
import math
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch

from .. import check, contract
from .container import DTYPES, Container, Stored
from .lora import Adapter, Delta, Lora, Pair, Target, open_lora
from .names import FC1, FC2, NORM, Layer, Part, gate_order, parse

BLOCK = 128
"""Rows and columns that share a scale in block-quantized FP8."""

PER_BLOCK = f"{BLOCK}x{BLOCK} block"

SCALE_TAILS = ("weight_scale", "scale_weight", "weight_scale_inv")
UNUSED_TAILS = ("input_scale", "scale_input")
"""Scales of activations, fixed ahead. Here each row has its own, so that they are not needed."""

FLOATS = {"BF16": "BF16", "F16": "FP16", "F32": "FP32"}
FP8 = {"F8_E4M3": "E4M3", "F8_E5M2": "E5M2"}

E4M3_HALF_STEP = 2.0**-10
E5M2_HALF_STEP = 2.0**-17
"""Half the distance of two subnormal codes."""

LARGEST_WEIGHT = 1e4
"""Weights of this model are around 0.01. Codes times the reciprocal of their scale are 10^6 and more."""


@dataclass(frozen=True)
class Rows:
    """Corresponding rows of the two halves, as they are stored."""

    first: int
    gate: torch.Tensor
    up: torch.Tensor


@dataclass(frozen=True)
class FC1Layer:
    """An FC1 weight in a checkpoint, its norm weight, and what adapters add to it.

    Attributes:
        layer: its place in the model.
        weight: [2F, H].
        scale: of FP8, else None.
        norm: [H].
        granularity: of the scale: "channel", "half", "tensor", "128x128 block", or "".
        naming: that of its name.
        gate_order: which half comes first.
        consumed: the names of all tensors that belong to the weight.
        full_precision: ComfyUI's marker asks for products of activations that are not quantized.
        pairs: of the adapters.
    """

    layer: Layer
    weight: Stored
    scale: Stored | None
    norm: Stored
    granularity: str
    naming: str
    gate_order: str
    consumed: tuple[str, ...]
    full_precision: bool = False
    pairs: tuple[Pair, ...] = ()

    @property
    def ffn(self) -> int:
        return self.weight.shape[0] // 2

    @property
    def hidden(self) -> int:
        return self.weight.shape[1]

    @property
    def form(self) -> str:
        """For people: "BF16", "E4M3 per channel"."""
        if self.weight.dtype in FLOATS:
            return FLOATS[self.weight.dtype]
        return f"{FP8[self.weight.dtype]} per {self.granularity}"

    @property
    def repacked(self) -> bool:
        """Whether its codes are taken over as they are."""
        return self.weight.dtype == "F8_E4M3" and self.granularity != PER_BLOCK and not self.pairs

    def stored_row(self, row: int, is_up: bool) -> int:
        """Where a row of the gate or the up half is in the weight as it is stored."""
        return row + (self.ffn if is_up == (self.gate_order == "gate_up") else 0)

    def read(self, first: int, count: int) -> Rows:
        """Rows [first, first + count) of both halves."""
        gate, up = (self.weight.read(self.stored_row(first, is_up), count) for is_up in (False, True))
        return Rows(first, gate, up)

    def read_norm(self) -> torch.Tensor:
        """BF16 [H].

        Raises:
            ValueError: an element is not finite in BF16.
        """
        norm = self.norm.read().bfloat16()
        if not norm.isfinite().all():
            raise ValueError(f"{self.norm.name} must be finite; element {_first(~norm.isfinite())} is not")
        return norm

    def open(self) -> "Opened":
        """With scales and adapters in memory."""
        return Opened(self)


class Opened:
    """A layer whose scales and adapters are in memory, to make numbers of its stored rows."""

    def __init__(self, source: FC1Layer):
        self.source = source
        self._memory = _Memory()
        self._scale = None if source.scale is None else _read_scale(source)
        self._delta = Delta(source.pairs) if source.pairs else None

    def fp32(self, rows: Rows, is_up: bool) -> torch.Tensor:
        """FP32 rows of one half, adapters included; valid until the next call, which uses the same memory."""
        stored = rows.up if is_up else rows.gate
        fp32 = self._memory.like(stored).copy_(stored)
        if self._scale is not None:
            self._apply_scale_(fp32, self.source.stored_row(rows.first, is_up))
        if self._delta is not None:
            self._delta.add_(fp32, rows.first, is_up)
        return fp32

    def row_scales(self) -> tuple[torch.Tensor, torch.Tensor]:
        """FP32 [F] of the gate rows and of the up rows, of a layer that is repacked."""
        first, second = self._scale.chunk(2)
        return (first, second) if self.source.gate_order == "gate_up" else (second, first)

    def half_steps(self, first: int, count: int, is_up: bool) -> torch.Tensor | float:
        """FP32 [count]: by how much rounding to this form, if it is FP8, moves small numbers of these rows of one
        half."""
        if self._scale is None:
            return 0.0
        stored = self.source.stored_row(first, is_up)
        if self.source.granularity == PER_BLOCK:
            of_row = self._scale[_blocks_of(stored, count)].amax(1)
        else:
            of_row = self._scale[stored : stored + count]
        return of_row * (E4M3_HALF_STEP if self.source.weight.dtype == "F8_E4M3" else E5M2_HALF_STEP)

    def scale_range(self) -> tuple[float, float] | None:
        """The least and the largest scale, if there are any."""
        return None if self._scale is None else (self._scale.min().item(), self._scale.max().item())

    def check(self, rows: Rows) -> None:
        """
        Raises:
            ValueError: a number is NaN or Inf; says the row.
        """
        for half, is_up in ((rows.gate, False), (rows.up, True)):
            bad = ~half.float().isfinite()
            if bad.any():
                row = _first(bad.any(dim=1))
                value = half[row].float()[bad[row]][0].item()
                row += self.source.stored_row(rows.first, is_up)
                raise ValueError(f"{self.source.weight.name} must be finite; row {row} has {value}")

    def _apply_scale_(self, fp32: torch.Tensor, first: int) -> None:
        if self.source.granularity == PER_BLOCK:
            fp32.view(len(fp32), -1, BLOCK).mul_(self._scale[_blocks_of(first, len(fp32)), :, None])
        else:
            fp32.mul_(self._scale[first : first + len(fp32), None])


def _blocks_of(first: int, count: int) -> torch.Tensor:
    """In which block each of these rows is."""
    return torch.arange(first, first + count, dtype=torch.long, device="cpu") // BLOCK


class _Memory:
    """FP32 memory that is used again: to fill fresh memory takes 3 to 8 times as long."""

    def __init__(self) -> None:
        self._held = _fp32(0)

    def like(self, tensor: torch.Tensor) -> torch.Tensor:
        if self._held.numel() < tensor.numel():
            self._held = _fp32(tensor.numel())
        return self._held[: tensor.numel()].view(tensor.shape)


def _fp32(count: int) -> torch.Tensor:
    return torch.empty(count, dtype=torch.float32, device="cpu")


def fc1_layers(container: Container, given_gate_order: str | None = None) -> dict[Layer, FC1Layer]:
    """All FC1 layers of a checkpoint, in order.

    Args:
        container: the checkpoint.
        given_gate_order: "gate_up" or "up_gate", where it is not what the names say.

    Raises:
        ValueError: there are none; a layer, a half, a scale or a norm weight is missing, there twice, or of a shape,
            dtype or quantization that is not known; a gate order cannot be known.
    """
    if given_gate_order is not None:
        check.gate_order(given_gate_order)
    parts: dict[Layer, dict[str, dict[str, tuple[Part, Stored]]]] = defaultdict(lambda: defaultdict(dict))
    names: dict[tuple[str, str], str] = {}
    names_of_fc1: dict[str, str] = {}
    for name, stored in container.tensors.items():
        part = parse(name)
        if part is None:
            continue
        of_module = parts[part.layer][part.module]
        if part.tail in of_module:
            raise ValueError(f"{part.layer} must be there once; it is as {of_module[part.tail][1].name} and as {name}")
        of_module[part.tail] = (part, stored)
        names.setdefault((part.prefix, part.of_block), name)
        if part.module == FC1:
            names_of_fc1.setdefault(part.naming, name)
    _check_one_naming(container, (*names.values(),), (*names_of_fc1.values(),))
    layers = {
        layer: _layer(layer, modules, given_gate_order) for layer, modules in sorted(parts.items()) if modules[FC1]
    }
    if not layers:
        _none_found(container)
    _check_complete(container, layers, set(parts))
    return layers


def with_loras(
    layers: dict[Layer, FC1Layer], adapters: Sequence[Adapter]
) -> tuple[dict[Layer, FC1Layer], tuple[Lora, ...]]:
    """The same layers with what adapters add, and the adapters.

    Raises:
        ValueError: as ``open_lora``.
    """
    targets = {layer: Target(source.weight.shape, source.naming, source.gate_order) for layer, source in layers.items()}
    loras = tuple(open_lora(adapter, targets) for adapter in adapters)
    merged = {
        layer: replace(source, pairs=tuple(lora.pairs[layer] for lora in loras if layer in lora.pairs))
        for layer, source in layers.items()
    }
    return merged, loras


def _check_one_naming(container: Container, *alternatives: tuple[str, ...]) -> None:
    """Tensors of several models, or of one in two namings, are not put together."""
    for names in alternatives:
        if len(names) > 1:
            first, second, *_ = sorted(names)
            raise ValueError(f"{container.path} must name all its layers in one way; it has {first} and {second}")


def _layer(layer: Layer, modules: dict, given: str | None) -> FC1Layer:
    fc1 = {tail: stored for tail, (_, stored) in modules[FC1].items()}
    part, some = next(iter(modules[FC1].values()))
    known = {"weight", "comfy_quant", *SCALE_TAILS, *UNUSED_TAILS}
    for tail, stored in fc1.items():
        if tail not in known:
            raise ValueError(f"{stored.name} must not be there: FC1 has a weight and, in FP8, a scale, nothing else")
    if "weight" not in fc1:
        raise ValueError(f"{layer} must have its FC1 weight; {some.name} is there alone")
    full_precision = "comfy_quant" in fc1 and _asks_for_full_precision(fc1["comfy_quant"])
    weight = fc1["weight"]
    fc2 = modules[FC2].get("weight")
    _check_weight(weight, fc2 and fc2[1])
    scales = [fc1[tail] for tail in SCALE_TAILS if tail in fc1]
    norm = modules[NORM].get("weight")
    if norm is None:
        raise ValueError(f"{layer} must have its norm weight, norm2.weight, beside {weight.name}; it is missing")
    _check_norm(norm[1], weight)
    return FC1Layer(
        layer=layer,
        weight=weight,
        scale=scales[0] if scales else None,
        norm=norm[1],
        granularity=_granularity(weight, scales),
        naming=part.naming,
        gate_order=gate_order(part.naming, given, weight.name),
        consumed=tuple(stored.name for stored in fc1.values()),
        full_precision=full_precision,
    )


def _check_weight(weight: Stored, fc2: Stored | None) -> None:
    if weight.dtype not in FLOATS and weight.dtype not in FP8:
        raise ValueError(f"{weight.name} must be BF16, FP16, FP32, E4M3 or E5M2; it is {weight}")
    rows, hidden = weight.shape if len(weight.shape) == 2 else (0, 0)
    ffn = fc2.shape[-1] if fc2 is not None and fc2.dtype in {**FLOATS, **FP8} else None
    if ffn is None and hidden == contract.HIDDEN:
        ffn = contract.FFN
    if ffn and rows == ffn:
        raise ValueError(
            f"{weight.name} must have a gate and an up half, [{2 * ffn}, {hidden}]; one is missing: {weight}"
        )
    if ffn and rows != 2 * ffn:
        raise ValueError(f"{weight.name} must be [{2 * ffn}, {hidden}]; it is {weight}")
    if not rows or rows % (2 * contract.FFN_MULTIPLE) or not hidden or hidden % contract.HIDDEN_MULTIPLE:
        want = f"[2F, H], F a multiple of {contract.FFN_MULTIPLE}, H of {contract.HIDDEN_MULTIPLE}"
        raise ValueError(f"{weight.name} must be {want}; it is {weight}")


def _check_norm(norm: Stored, weight: Stored) -> None:
    if norm.dtype not in FLOATS or norm.shape != weight.shape[1:]:
        raise ValueError(f"{norm.name} must be BF16, FP16 or FP32 [{weight.shape[1]}]; it is {norm}")


def _granularity(weight: Stored, scales: list[Stored]) -> str:
    if len(scales) > 1:
        raise ValueError(f"{weight.name} must have one scale; it has {scales[0].name} and {scales[1].name}")
    if weight.dtype in FLOATS:
        if scales:
            raise ValueError(f"{scales[0].name} must not be there: {weight} needs no scale")
        return ""
    if not scales:
        raise ValueError(f"{weight} must have a scale: {', '.join(SCALE_TAILS)}; none is there")
    (scale,), (rows, hidden) = scales, weight.shape
    of_shape = {
        (): "tensor",
        (1,): "tensor",
        (2,): "half",
        (rows,): "channel",
        (rows, 1): "channel",
        (math.ceil(rows / BLOCK), math.ceil(hidden / BLOCK)): PER_BLOCK,
    }
    if scale.shape not in of_shape or scale.dtype not in ("F64", *FLOATS):
        raise ValueError(
            f"{scale.name} must be floating point of shape {', '.join(str(list(shape)) for shape in of_shape)} for "
            f"[{rows}, {hidden}]; it is {scale}"
        )
    return of_shape[scale.shape]


def _read_scale(source: FC1Layer) -> torch.Tensor:
    """FP32: a scale a row, [2F], or blocks."""
    scale = source.scale.read().float()
    bad = ~(scale.isfinite() & (scale >= 0))
    if bad.any():
        raise ValueError(f"{source.scale.name} must be finite and not negative; it has {scale[bad][0].item()}")
    largest = scale.max().item() * torch.finfo(DTYPES[source.weight.dtype]).max
    if largest > LARGEST_WEIGHT:
        raise ValueError(
            f"{source.scale.name} must be what the codes are multiplied by; up to {scale.max().item():.3g} it allows "
            f"weights of {largest:.3g}, as a reciprocal would"
        )
    if source.granularity == PER_BLOCK:
        return scale
    scale = scale.flatten()
    return scale.repeat_interleave(2 * source.ffn // len(scale))


def _asks_for_full_precision(marker: Stored) -> bool:
    """ComfyUI says in JSON how a layer was quantized; rotated ones ("convrot") look like any other FP8. Products that
    it asks for in full precision are those of activations that are not quantized."""
    try:
        settings = json.loads(bytes(marker.read_bytes(0, marker.nbytes)))
        plain = settings.pop("format") in ("float8_e4m3fn", "float8_e5m2")
    except (ValueError, KeyError, AttributeError, TypeError):
        settings, plain = {}, False
    strange = [key for key in settings if key != "full_precision_matrix_mult"]
    if not plain or strange:
        content = bytes(marker.read_bytes(0, min(marker.nbytes, 200))).decode(errors="replace")
        raise ValueError(f"{marker.name} must say that the weight is plain FP8; it says {content!r}")
    return bool(settings.get("full_precision_matrix_mult"))


def _check_complete(container: Container, layers: dict[Layer, FC1Layer], named: set[Layer]) -> None:
    """No layer is missing, and all are of one size."""
    for layer in sorted(named - set(layers)):
        raise ValueError(f"{layer} must have its FC1 weight; it is missing, while others are there")
    expected = _configured(container)
    for stack in ("blocks", "token_refiner.blocks"):
        indices = [layer.index for layer in layers if layer.stack == stack]
        count = expected.get(stack, len(indices))
        missing = sorted(set(range(max([count, *(index + 1 for index in indices)]))) - set(indices))
        if missing:
            raise ValueError(f"{container.path} must have the FC1 weight of {stack}.{missing[0]}; it is missing")
        if len(indices) > count:
            raise ValueError(f"{container.path} must have {count} {stack}, as config.json says; it has {len(indices)}")
    first = next(iter(layers.values()))
    for source in layers.values():
        if source.weight.shape != first.weight.shape:
            raise ValueError(f"{source.weight.name} must be as large as {first.weight}; it is {source.weight}")


def _configured(container: Container) -> dict[str, int]:
    """How many layers the config.json beside the files wants, if there is one that says it."""
    file = container.files[0].with_name("config.json")
    try:
        config = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    found = {}
    for stack, name in (("blocks", "num_layers"), ("token_refiner.blocks", "num_refiner_layers")):
        count = config.get(name) if isinstance(config, dict) else None
        if count is None:
            continue
        if not isinstance(count, int) or isinstance(count, bool) or count < 0:
            raise ValueError(f"{name} of {file} must be a number of layers; it is {count!r}")
        found[stack] = count
    return found


def _none_found(container: Container) -> None:
    nearest = [name for name in container.tensors if "fc1" in name or ".ff.net.0." in name or "mlp" in name]
    some = nearest or list(container.tensors)
    raise ValueError(
        f"{container.path} must have FC1 weights under MiniMax's names (blocks.0.mlp.fc1.weight) or those of diffusers "
        f"(transformer_blocks.0.ff.net.0.proj.weight); it has none"
        + (f", but {', '.join(some[:3])} and {len(container.tensors) - len(some[:3])} others" if some else " at all")
    )


def _first(flags: torch.Tensor) -> int:
    return int(flags.nonzero()[0, 0])
