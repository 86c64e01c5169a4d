"""LoRA adapters in safetensors, of every naming, and what they add to FC1.

An adapter adds ``scale * alpha / rank * B @ A`` to a weight, A [rank, H] ("down") and B [2F, rank] ("up"). Without an
alpha it is the rank. The rows of B are in the order of the weight that the adapter was trained on, so that its naming
says which half comes first, as it does for a weight.

Adapters of several layers are the rule. Those on FC1 are merged, those on the others are the engine's to load; a key
that is none of MiniMax-H3's is refused, since an adapter of another model would be ignored without a word.
"""

import json
import math
import re
from collections import defaultdict
from dataclasses import dataclass
from pathlib import Path

import torch

from .container import Container, Stored, open_checkpoint
from .names import FC1, PREFIXES, Layer, gate_order, parse

_NATIVE_BLOCK = r"(?:token_refiner\.)?blocks\.\d+"
_DIFFUSERS_BLOCK = r"(?:transformer_blocks|token_refiner\.refiner_blocks)\.\d+"
_MODULES = (
    rf"{_NATIVE_BLOCK}\.(?:attn\.(?:qkv|out)_proj|mlp\.fc[12]|adaln_proj\.linear)",
    r"(?:video_patch|audio_patch|condition)_proj|time_embedder\.proj_(?:in|out)",
    r"final_layer\.(?:adaln_proj\.linear|video_out|audio_out)",
    rf"{_DIFFUSERS_BLOCK}\.(?:attn\.to_(?:q|k|v|out\.0|gate_compress)|ff\.net\.(?:0\.proj|2)|adaln_proj\.linear)",
    r"(?:audio_)?proj_(?:in|out)|context_embedder|time_embedder\.linear_[12]|norm_out\.linear",
)
"""The linear layers of MiniMax-H3 in both namings."""

_LINEAR = re.compile("|".join(_MODULES), re.ASCII)
_PREFIX = re.compile(rf"(?:(?:base_model|dit|unet|transformer_ref|{'|'.join(PREFIXES)})\.)*", re.ASCII)

_FLAT_PREFIX = re.compile(r"(?:lora_unet|lora_transformer|lycoris)_", re.ASCII)
"""Kohya's trainers turn every dot of a module's name into an underscore."""

_FLAT_WORDS = re.compile(
    r"(?P<block>(?:token_refiner_)?(?:transformer_|refiner_)?blocks)_(?P<index>\d+)_(?P<module>\w+)", re.ASCII
)
_FLAT_MODULES = {"mlp_fc1": "mlp.fc1", "ff_net_0_proj": "ff.net.0.proj"}

_DOWN = r"lora_A|lora_down|lora\.down|lora_linear_layer\.down"
_UP = r"lora_B|lora_up|lora\.up|lora_linear_layer\.up"
_PAIR = re.compile(rf"(?P<module>.+)\.(?:(?P<down>{_DOWN})|(?P<up>{_UP}))(?:\.(?!weight$)\w+)?(?:\.weight)?", re.ASCII)
_ALPHA = re.compile(r"(?P<module>.+)\.alpha", re.ASCII)
_LAST = re.compile(r"(?P<module>.+?)\.(?P<last>(?:lora|lokr|hada|oft|diff|dora|alpha)[\w.]*)", re.ASCII)


@dataclass(frozen=True)
class Pair:
    """What an adapter adds to one FC1: ``factor * up @ down``."""

    down: Stored
    up: Stored
    factor: float
    gate_order: str


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


class Delta:
    """What adapters add to one FC1, in FP32 and in the order of the halves."""

    def __init__(self, pairs: list[Pair]):
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


def open_lora(path: Path | str, scale: float, layers: dict[Layer, tuple[int, int]]) -> Lora:
    """Find an adapter's parts.

    Args:
        path: a safetensors file, or the folder of PEFT that has one.
        scale: a factor for all of it.
        layers: the layers of the checkpoint, with [2F, H] of their FC1.

    Raises:
        ValueError: a key matches nothing, belongs to a layer that is not there, has the wrong shape or no counterpart,
            or is of a kind that cannot be merged (DoRA, LoKr and others); nothing touches FC1.
    """
    container = open_checkpoint(path)
    found: dict[str, dict[str, Stored]] = defaultdict(dict)
    others = set()
    for key, stored in container.tensors.items():
        module, role = _role(key, container.files[0])
        if not _is_fc1(module):
            others.add(module)
        elif role is None:
            raise ValueError(
                f"{key} of {path} must be a pair of LoRA matrices or an alpha; other adapters cannot be merged"
            )
        elif role in found[module]:
            raise ValueError(
                f"{path} must have one {role} matrix for {module}; it has {found[module][role].name} and {key}"
            )
        else:
            found[module][role] = stored
    if not found:
        raise ValueError(f"{path} must touch FC1; it only has {', '.join(sorted(others)[:3])} and such")
    config = _config(container)
    pairs: dict[Layer, Pair] = {}
    for module, roles in found.items():
        part = parse(f"{module}.weight")
        if part.layer in pairs:
            raise ValueError(f"{path} must have one pair for {part.layer}; it has several")
        if part.layer not in layers:
            raise ValueError(
                f"{module} of {path} must be one of the checkpoint's layers; it has {len(layers)}, not this"
            )
        for role in ("down", "up"):
            if role not in roles:
                raise ValueError(
                    f"{module} of {path} must have both matrices of its pair; the one for {role} is missing"
                )
        _check_shapes(path, roles["down"], roles["up"], layers[part.layer])
        rank = roles["down"].shape[0]
        alpha = roles["alpha"].read().float().item() if "alpha" in roles else config.alpha(module, rank)
        factor = scale * alpha / (math.sqrt(rank) if config.rank_stabilized else rank)
        if not math.isfinite(factor):
            raise ValueError(f"{module} of {path} must have a finite alpha; it has {alpha}")
        pairs[part.layer] = Pair(roles["down"], roles["up"], factor, gate_order(part.naming, None, module))
    return Lora(container.files[0], scale, pairs, tuple(sorted(others)))


def _role(key: str, file: Path) -> tuple[str, str | None]:
    """The module's name without prefixes and with its dots, and "down", "up", "alpha" or None."""
    for pattern in (_PAIR, _ALPHA, _LAST):
        match = pattern.fullmatch(key)
        module = match and _module(match["module"])
        if module:
            role = None
            if pattern is _PAIR:
                role = "down" if match["down"] else "up"
            elif pattern is _ALPHA:
                role = "alpha"
            return module, role
    raise ValueError(f"{key} of {file} must belong to a linear layer of MiniMax-H3; it matches none")


def _module(name: str) -> str | None:
    flat = _FLAT_PREFIX.match(name)
    if flat:
        name = name[flat.end() :]
        match = _FLAT_WORDS.fullmatch(name)
        if match and match["module"] in _FLAT_MODULES:
            block = match["block"].replace("token_refiner_", "token_refiner.")
            return f"{block}.{match['index']}.{_FLAT_MODULES[match['module']]}"
        return name if _FLAT_LINEAR.fullmatch(name) else None
    name = name[_PREFIX.match(name).end() :]
    return name if _LINEAR.fullmatch(name) else None


_FLAT_LINEAR = re.compile(_LINEAR.pattern.replace(r"\.", "_"), re.ASCII)


def _is_fc1(module: str) -> bool:
    part = parse(f"{module}.weight")
    return part is not None and part.module == FC1


def _check_shapes(path: Path | str, down: Stored, up: Stored, weight: tuple[int, int]) -> None:
    rows, hidden = weight
    for stored, want in ((down, f"[rank, {hidden}]"), (up, f"[{rows}, rank]")):
        if stored.dtype not in ("BF16", "F16", "F32") or len(stored.shape) != 2:
            raise ValueError(f"{stored.name} of {path} must be BF16, F16 or F32 {want}; it is {stored}")
    if down.shape[1] != hidden or up.shape != (rows, down.shape[0]) or not down.shape[0]:
        raise ValueError(
            f"{path} must have [rank, {hidden}] and [{rows}, rank], as the weight has [{rows}, {hidden}]; "
            f"it has {down} and {up}"
        )


@dataclass(frozen=True)
class _Config:
    """Where an adapter without alpha tensors says its alphas."""

    lora_alpha: float | None = None
    patterns: tuple[tuple[str, float], ...] = ()
    rank_stabilized: bool = False

    def alpha(self, module: str, rank: int) -> float:
        for pattern, alpha in self.patterns:
            if re.fullmatch(rf"(?:.*\.)?(?:{pattern})", module):
                return alpha
        return rank if self.lora_alpha is None else self.lora_alpha


def _config(container: Container) -> _Config:
    """From adapter_config.json (PEFT), from what diffusers puts into the metadata, or from an alpha there."""
    beside = container.files[0].with_name("adapter_config.json")
    try:
        if beside.is_file():
            config = json.loads(beside.read_text(encoding="utf-8"))
        elif "lora_adapter_metadata" in container.metadata:
            packed = json.loads(container.metadata["lora_adapter_metadata"])
            config = {key.removeprefix("transformer.").removeprefix("transformer_ref."): packed[key] for key in packed}
        else:
            config = {"lora_alpha": container.metadata.get("alpha")}
        alpha = config.get("lora_alpha")
        patterns = tuple(
            (key.removeprefix("^"), float(value)) for key, value in config.get("alpha_pattern", {}).items()
        )
        return _Config(None if alpha is None else float(alpha), patterns, bool(config.get("use_rslora")))
    except (ValueError, TypeError, AttributeError) as error:
        raise ValueError(f"{container.files[0]} must say its alpha as a number; it does not: {error}") from None
