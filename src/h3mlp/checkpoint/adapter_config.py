"""What an adapter says of itself beside its matrices: PEFT's adapter_config.json, and the metadata of its file.

diffusers packs PEFT's config into the metadata as "lora_adapter_metadata", with the component's name in front of each
key. Trainers add "swiglu_gate_first" there or beside it, whether the gate rows come first whatever the names say, and
few-step adapters a bare "alpha".
"""

import json
import math
import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from .container import Container

CONFIG = "adapter_config.json"
PACKED = "lora_adapter_metadata"
GATE_FIRST = "swiglu_gate_first"

_CHANGES_THE_BASE = ("pissa", "olora", "corda", "loftq")
"""Initializations of PEFT that subtract from the weight what the adapter begins with."""

_ORDERS = {True: "gate_up", False: "up_gate", "true": "gate_up", "false": "up_gate", "1": "gate_up", "0": "up_gate"}


@dataclass(frozen=True)
class AdapterConfig:
    """What one place says, or all of them do; None and () where it is not said.

    Attributes:
        said_by: where the alpha is said, and
        patterns_by: where the patterns for some modules are.
        lora_alpha, r: of modules that no pattern matches.
        alphas, ranks: of modules, by regular expressions.
        rank_stabilized: the divisor is the root of the rank.
        gate_order: the order of the halves.
    """

    said_by: str
    patterns_by: str
    lora_alpha: float | None = None
    r: float | None = None
    alphas: tuple[tuple[str, float], ...] = ()
    ranks: tuple[tuple[str, float], ...] = ()
    rank_stabilized: bool | None = None
    gate_order: str | None = None

    def alpha(self, module: str, rank: int) -> tuple[float, str] | None:
        """The alpha of a module and where it is from; None if it is not said.

        Raises:
            ValueError: it is one for another rank than the module has.
        """
        alpha = _matching(self.alphas, module)
        if alpha is not None:
            return alpha, self.patterns_by
        if self.lora_alpha is None:
            return None
        said = _matching(self.ranks, module)
        said = self.r if said is None else said
        if said is not None and said != rank:
            raise ValueError(
                f"{module} must have the rank that {self.said_by} says, {said:g}; its matrices have {rank}. For which "
                f"of them alpha {self.lora_alpha:g} is meant cannot be known: give the right one with --lora-alpha"
            )
        return self.lora_alpha, self.said_by


def read_config(container: Container, alpha_given: bool = False, order_given: bool = False) -> AdapterConfig:
    """
    Args:
        container: the adapter.
        alpha_given, order_given: whether it does not matter what it says of these.

    Raises:
        ValueError: it is damaged, two places say different things, or the adapter is for a weight that was changed.
    """
    found = [_parsed(where, content) for where, content in _statements(container)]
    file = container.files[0]

    def agreed(field: str, what: str, advice: str, given: bool = False) -> Any:
        said = {getattr(config, field): config.said_by for config in found if getattr(config, field) not in (None, ())}
        if len(said) > 1 and not given:
            values = " and ".join(f"{value} ({where})" for value, where in said.items())
            raise ValueError(f"{file} must say one {what}; it says {values}. {advice}")
        return next(iter(said), None)

    by_alpha = "Give the alpha that is meant with --lora-alpha"
    return AdapterConfig(
        said_by=next((config.said_by for config in found if config.lora_alpha is not None), ""),
        patterns_by=next((config.said_by for config in found if config.alphas), ""),
        lora_alpha=agreed("lora_alpha", "alpha", by_alpha, alpha_given),
        r=agreed("r", "rank", by_alpha, alpha_given),
        alphas=agreed("alphas", "alpha_pattern", by_alpha, alpha_given) or (),
        ranks=agreed("ranks", "rank_pattern", by_alpha, alpha_given) or (),
        rank_stabilized=agreed("rank_stabilized", "use_rslora", "Correct one of them"),
        gate_order=agreed("gate_order", "order of its halves", "Give it with --lora-gate-order", order_given),
    )


def _statements(container: Container) -> Iterator[tuple[str, dict[str, Any]]]:
    """Each place where the adapter says something, and what."""
    file, metadata = container.files[0], container.metadata
    beside = file.with_name(CONFIG)
    try:
        if beside.is_file():
            yield CONFIG, dict(json.loads(beside.read_text(encoding="utf-8")))
        if PACKED in metadata:
            packed = dict(json.loads(metadata[PACKED]))
            of = re.compile(r"(?:transformer|transformer_ref)\.")
            yield PACKED, {of.sub("", key, count=1) if of.match(key) else key: packed[key] for key in packed}
    except (ValueError, TypeError) as error:
        raise ValueError(f"{file} must say its alpha as JSON; it does not: {error}") from None
    said = {"lora_alpha": metadata.get("alpha"), GATE_FIRST: metadata.get(GATE_FIRST)}
    if any(value is not None for value in said.values()):
        yield "metadata", said


def _parsed(where: str, content: dict[str, Any]) -> AdapterConfig:
    try:
        initial = content.get("init_lora_weights")
        if isinstance(initial, str) and initial.lower().startswith(_CHANGES_THE_BASE):
            raise ValueError(f"init_lora_weights {initial!r} makes an adapter of another weight than the checkpoint's")
        gate_first = content.get(GATE_FIRST)
        gate_first = gate_first.strip().lower() if isinstance(gate_first, str) else gate_first
        if gate_first is not None and gate_first not in _ORDERS:
            raise ValueError(f"{GATE_FIRST} must be true or false; it is {gate_first!r}")
        return AdapterConfig(
            said_by=where,
            patterns_by=where,
            lora_alpha=_number(content.get("lora_alpha")),
            r=_number(content.get("r")),
            alphas=_patterns(content.get("alpha_pattern")),
            ranks=_patterns(content.get("rank_pattern")),
            rank_stabilized=None if content.get("use_rslora") is None else bool(content["use_rslora"]),
            gate_order=None if gate_first is None else _ORDERS[gate_first],
        )
    except (ValueError, TypeError, AttributeError, re.error) as error:
        raise ValueError(f"{where} of the adapter must say how it is meant; it does not: {error}") from None


def _number(value: object) -> float | None:
    if value is None:
        return None
    number = float(value)
    if isinstance(value, bool) or not math.isfinite(number):
        raise ValueError(f"{value!r} is no number")
    return number


def _patterns(given: dict[str, Any] | None) -> tuple[tuple[str, float], ...]:
    found = tuple((key.removeprefix("^"), _number(value)) for key, value in (given or {}).items())
    for pattern, _ in found:
        re.compile(pattern)
    return found


def _matching(patterns: tuple[tuple[str, float], ...], module: str) -> float | None:
    """As PEFT matches: the whole name, or what is behind a dot of it."""
    return next((value for pattern, value in patterns if re.fullmatch(rf"(?:.*\.)?(?:{pattern})", module)), None)
