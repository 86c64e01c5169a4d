"""LoRA adapters in safetensors, of every naming, and what they add to FC1.

An adapter adds ``scale * alpha / rank * B @ A`` to a weight, A [rank, H] ("down") and B [2F, rank] ("up"). Two things
decide whether that is right, and neither shows in the numbers:

* alpha. Given by hand, else that of the module's own tensor, else of PEFT's config or the metadata; with none of these
  it is assumed to be the rank, and everything that reports of the adapter says so.
* the order of B's rows, as of the weight that the adapter was trained on. Given by hand, else what the file says
  ("swiglu_gate_first"), else that of the checkpoint if it has the same naming, else what the adapter's naming says.
"""

import math
from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch

from .. import check
from .adapter_config import AdapterConfig, read_config
from .adapter_keys import ALPHA, DOWN, UP, parse_key
from .container import Container, Stored, open_checkpoint
from .names import Layer, gate_order, parse

GIVEN, TENSOR, ASSUMED = "given", "tensor", "assumed"
"""Where an alpha can be from, besides the places of ``AdapterConfig``."""

_ORIGINS = {GIVEN: "as given", TENSOR: "of its tensors", ASSUMED: "ASSUMED (it says none; --lora-alpha gives it)"}


class Adapter(NamedTuple):
    """An adapter to be merged.

    Attributes:
        path: a safetensors file, or the folder of PEFT that has one.
        scale: a factor for all of it.
        alpha: in the adapter's own units; what it says itself unless given.
        gate_order: of the rows of B; what it says itself unless given.
    """

    path: Path
    scale: float = 1.0
    alpha: float | None = None
    gate_order: str | None = None


class Target(NamedTuple):
    """The FC1 of a layer of the checkpoint: [2F, H], and what its names and options say of it."""

    shape: tuple[int, ...]
    naming: str
    gate_order: str


@dataclass(frozen=True)
class Pair:
    """What an adapter adds to one FC1: ``factor * up @ down``."""

    down: Stored
    up: Stored
    factor: float
    alpha: float
    alpha_from: str
    gate_order: str

    @property
    def rank(self) -> int:
        return self.down.shape[0]

    @property
    def decisions(self) -> list:
        """All that decides about what it adds, but the contents of its files."""
        return [self.down.name, self.up.name, self.factor, self.gate_order]


@dataclass(frozen=True)
class Lora:
    """An adapter.

    Attributes:
        path: its file.
        scale: of the caller; in the factors already.
        pairs: what it adds to FC1, by layer.
        others: the modules besides FC1 that it has something for.
    """

    path: Path
    scale: float
    pairs: dict[Layer, Pair]
    others: tuple[str, ...]

    @property
    def record(self) -> dict[str, Any]:
        """How it is merged: scale, and each rank, alpha, origin of an alpha and order of halves that its pairs have."""
        of_pairs = {
            name: sorted({getattr(pair, name) for pair in self.pairs.values()})
            for name in ("rank", "alpha", "alpha_from", "gate_order")
        }
        return {"scale": self.scale, **of_pairs}


def describe(record: Mapping[str, Any]) -> str:
    """An adapter's record, for people. That of an older checkpoint has only the scale."""
    said = [f"{record['name']} merged, scale {record['scale']:g}"]
    if "alpha" in record:
        ranks, alphas = (" and ".join(f"{number:g}" for number in record[name]) for name in ("rank", "alpha"))
        origin = " and ".join(_ORIGINS.get(place, f"of {place}") for place in record["alpha_from"])
        said += [f"rank {ranks}", f"alpha {alphas} {origin}", f"rows {' and '.join(record['gate_order'])}"]
    return ", ".join(said)


class Delta:
    """What adapters add to one FC1, in FP32 and in the order of the halves."""

    def __init__(self, pairs: Iterable[Pair]):
        """Reads the pairs: 15 MB each at rank 128 and real size."""
        self._pairs = []
        for pair in pairs:
            halves = pair.up.read().float().chunk(2)
            gate_up = halves if pair.gate_order == "gate_up" else halves[::-1]
            self._pairs.append((pair.factor, gate_up, pair.down.read().float()))

    def add_(self, rows: torch.Tensor, first: int, is_up: bool) -> None:
        """Add to these FP32 rows, which begin at row ``first`` of the gate or the up half."""
        for factor, halves, down in self._pairs:
            rows.addmm_(halves[is_up][first : first + len(rows)], down, alpha=factor)


def open_lora(adapter: Adapter, layers: Mapping[Layer, Target]) -> Lora:
    """Find an adapter's parts.

    Args:
        adapter: which, and what is known of it.
        layers: those of the checkpoint.

    Raises:
        ValueError: a number or order given is none; a key matches nothing, belongs to a layer that is not there, has
            the wrong shape or no counterpart, or is of a kind that cannot be merged (DoRA, LoKr and others); nothing
            touches FC1; what the file says of its rank, alpha or order contradicts itself or its tensors.
    """
    path = adapter.path
    for name in ("scale", "alpha"):
        if (value := getattr(adapter, name)) is not None and not math.isfinite(value):
            raise ValueError(f"the {name} of {path} must be finite; it is {value}")
    if adapter.gate_order is not None:
        check.gate_order(adapter.gate_order)
    container = open_checkpoint(path)
    found, others = _modules(container, path)
    config = read_config(container, adapter.alpha is not None, adapter.gate_order is not None)
    pairs: dict[Layer, Pair] = {}
    for module, roles in found.items():
        layer = parse(f"{module}.weight").layer
        if layer in pairs:
            raise ValueError(f"{path} must have one pair for {layer}; it has several")
        if layer not in layers:
            raise ValueError(
                f"{module} of {path} must be one of the checkpoint's layers; it has {len(layers)}, not this"
            )
        pairs[layer] = _pair(module, roles, adapter, config, layers[layer])
    return Lora(container.files[0], adapter.scale, pairs, others)


def _modules(container: Container, path: Path) -> tuple[dict[str, dict[str, Stored]], tuple[str, ...]]:
    """The tensors on FC1 by module and role, and the modules that the others are for."""
    found: dict[str, dict[str, Stored]] = defaultdict(dict)
    others = set()
    for name, stored in container.tensors.items():
        key = parse_key(name, container.files[0])
        if key.role is None:
            others.add(key.module)
        elif key.role in found[key.module]:
            first = found[key.module][key.role].name
            raise ValueError(f"{path} must have one {key.role} matrix for {key.module}; it has {first} and {name}")
        else:
            found[key.module][key.role] = stored
    if not found:
        raise ValueError(f"{path} must touch FC1; it only has {', '.join(sorted(others)[:3])} and such")
    return found, tuple(sorted(others))


def _pair(module: str, roles: Mapping[str, Stored], adapter: Adapter, config: AdapterConfig, target: Target) -> Pair:
    path = adapter.path
    for role in (DOWN, UP):
        if role not in roles:
            raise ValueError(f"{module} of {path} must have both matrices of its pair; the one for {role} is missing")
    down, up = roles[DOWN], roles[UP]
    _check_shapes(path, down, up, target.shape)
    rank = down.shape[0]
    if adapter.alpha is not None:
        alpha, alpha_from = float(adapter.alpha), GIVEN
    elif ALPHA in roles:
        alpha, alpha_from = _read_alpha(roles[ALPHA], path), TENSOR
    else:
        alpha, alpha_from = config.alpha(module, rank) or (float(rank), ASSUMED)
    factor = adapter.scale * alpha / (math.sqrt(rank) if config.rank_stabilized else rank)
    if not math.isfinite(factor):
        raise ValueError(f"{module} of {path} must have a finite alpha; it has {alpha}")
    naming = parse(f"{module}.weight").naming
    of_target = target.gate_order if naming == target.naming else None
    order = adapter.gate_order or config.gate_order or gate_order(naming, of_target, module, "--lora-gate-order")
    return Pair(down, up, factor, alpha, alpha_from, order)


def _read_alpha(stored: Stored, path: Path) -> float:
    if math.prod(stored.shape) != 1:
        raise ValueError(f"{stored.name} of {path} must be one number; it is {stored}")
    return stored.read().float().item()


def _check_shapes(path: Path | str, down: Stored, up: Stored, weight: tuple[int, ...]) -> None:
    rows, hidden = weight
    for stored, want in ((down, f"[rank, {hidden}]"), (up, f"[{rows}, rank]")):
        if stored.dtype not in ("BF16", "F16", "F32") or len(stored.shape) != 2:
            raise ValueError(f"{stored.name} of {path} must be BF16, F16 or F32 {want}; it is {stored}")
    if down.shape[1] != hidden or up.shape != (rows, down.shape[0]) or not down.shape[0]:
        raise ValueError(
            f"{path} must have [rank, {hidden}] and [{rows}, rank], as the weight has [{rows}, {hidden}]; "
            f"it has {down} and {up}"
        )
