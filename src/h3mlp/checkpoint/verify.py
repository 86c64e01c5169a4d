"""``h3mlp verify``: whether a prepared checkpoint is its source, layer by layer.

The usual mistakes are silent: halves exchanged, rows reordered without their scales, or not reordered. All of them
leave numbers that look like weights. So every weight is compared with its source's, in the order that is claimed and in
those that the mistakes would give, and the operator's output with that of the BF16 layer.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch

from .. import contract, synthetic
from ..accuracy import compare, decibels
from ..files import finite
from ..operators import dispatch
from ..operators.fc1_swiglu import fc1_swiglu_fp8
from .comparison import SAME_WEIGHT_DB, Comparison
from .container import open_checkpoint
from .lora import Adapter
from .lora import describe as describe_lora
from .prepared import NORM, Prepared, open_prepared
from .source import FC1Layer, fc1_layers, with_loras

ROUNDED_ONCE_DB = 24.5
"""Of a row. Rounding to E4M3 changes a number by 1/17 of it at most: 24.6 dB. Subnormal codes, below a 28,672th of the
row's largest number, add 10^-7 of its power at most."""

OUTPUT_DB = 20.0
"""Rounding errors of 2.6% RMS in x and one or two of them in the weight are 26 to 24 dB in the output. Exchanged halves
give about 0 dB."""

E5M2_WEIGHT_DB = 15.3
E5M2_OUTPUT_DB = 16.5
"""The same between a weight in E5M2 and another form of it. E5M2 rounds by a 9th at most, which with E4M3's 17th is
15.4 dB of a row; right ones had 19.6 to 21.7 dB in the output, 3.5 dB less than in other forms."""


@dataclass(frozen=True)
class Check:
    """A layer beside its source.

    Attributes:
        layer: its place in the model.
        form: of the source.
        snr_db: of the dequantized weight; infinite where it is exact.
        worst_row: in the source's order, and
        worst_row_db: its SNR.
        exchanged_db: the SNR if the halves were the other way round.
        output_db: of the operator's output against the BF16 layer's.
        exchanged_output_db: the same with the halves the other way round; None for a layer that is right.
        full_precision: the source asks for activations that are not quantized.
        faults: what is wrong.
    """

    layer: str
    form: str
    snr_db: float
    worst_row: int
    worst_row_db: float
    exchanged_db: float
    output_db: float
    exchanged_output_db: float | None
    full_precision: bool
    faults: tuple[str, ...]


@dataclass(frozen=True)
class Verified:
    """A prepared checkpoint beside its source."""

    path: Path
    against: Path
    rows: int
    device: str
    checks: tuple[Check, ...]

    @property
    def ok(self) -> bool:
        return not any(check.faults for check in self.checks)

    def as_json(self) -> dict[str, Any]:
        """JSON has no infinity: where the weight is exact, the SNR is null."""
        plain = {"path": str(self.path), "against": str(self.against), "rows": self.rows, "device": self.device}
        return finite({**plain, "ok": self.ok, "layers": [asdict(check) for check in self.checks]})


def run(
    path: Path,
    against: Path,
    rows: int = 64,
    *,
    gate_order: str | None = None,
    loras: Sequence[Adapter | tuple] = (),
    progress: Callable[[str, float, float], None] = lambda *_: None,
) -> Verified:
    """Compare a prepared checkpoint with the one it was made of, or with another of the same weights.

    Args:
        path: the prepared checkpoint.
        against: its source, in any form.
        rows: of the synthetic activations.
        gate_order: of the source, where it is not as its names say.
        loras: the adapters that were merged, as they were given to ``convert``.
        progress: takes the current step, and how many layers of how many are done.

    Raises:
        ValueError: one of them is not what it must be, they have other layers or sizes, or the adapters are not those
            that were merged.
        OSError: a file cannot be read.
    """
    prepared = open_prepared(path)
    layers, adapters = with_loras(fc1_layers(open_checkpoint(against), gate_order), [Adapter(*lora) for lora in loras])
    given = [{"name": adapter.path.name, **adapter.record} for adapter in adapters]
    _check_adapters(path, prepared.description.loras, given)
    if set(prepared.layers) != set(layers):
        odd = min(set(prepared.layers) ^ set(layers))
        raise ValueError(f"{path} and {against} must have the same layers; only one has {odd}")
    size, wanted = (2 * prepared.description.ffn, prepared.description.hidden), next(iter(layers.values())).weight.shape
    if size != wanted:
        raise ValueError(f"{path} must be as large as {against}, {list(wanted)}; it is {list(size)}")
    device, _ = dispatch.best()
    checks = []
    for number, (layer, found) in enumerate(layers.items()):
        progress(str(layer), number, len(layers))
        checks.append(_check(prepared, found, rows, device))
    return Verified(path, against, rows, str(device), tuple(checks))


def _check_adapters(path: Path, merged: Sequence[Mapping[str, Any]], given: Sequence[Mapping[str, Any]]) -> None:
    """The same adapters, merged in the same way as far as that was recorded."""
    unlike = len(merged) != len(given) or any(
        recorded.get(key, value) != value
        for recorded, found in zip(*(sorted(loras, key=_name_and_scale) for loras in (merged, given)), strict=True)
        for key, value in found.items()
    )
    if unlike:
        texts = ("; ".join(map(describe_lora, loras)) or "none" for loras in (merged, given))
        raise ValueError("--lora must be given as for {}, which has {}; given: {}".format(path, *texts))


def _name_and_scale(lora: Mapping[str, Any]) -> tuple[str, float]:
    return lora["name"], lora["scale"]


def _check(prepared: Prepared, source: FC1Layer, rows: int, device: torch.device) -> Check:
    layer = source.layer
    recorded = prepared.description.layers[str(layer)]
    weights = Comparison(prepared, source)
    faults = [*weights.damaged]
    if not torch.equal(prepared.load(layer, NORM, copy=True), source.read_norm()):
        faults.append("its norm weight is another")
    least_db, least_output_db = _least_db(source, recorded)
    faults += weights.faults(least_db)
    output, exchanged = _outputs(prepared, source, weights.bf16, rows, device, both=bool(faults))
    if not output >= least_output_db:
        if exchanged is None:
            output, exchanged = _outputs(prepared, source, weights.bf16, rows, device, both=True)
        faults.append(f"its output is off: {output:.1f} dB, {exchanged:.1f} dB with the halves exchanged")
    worst = weights.worst
    return Check(
        layer=str(layer),
        form=source.form,
        snr_db=decibels(weights.signal.sum().item(), weights.noise.sum().item()),
        worst_row=source.stored_row(worst % source.ffn, is_up=worst >= source.ffn),
        worst_row_db=weights.snr_db[worst].item(),
        exchanged_db=decibels(*weights.exchanged),
        output_db=output,
        exchanged_output_db=exchanged,
        full_precision=source.full_precision,
        faults=tuple(faults),
    )


def _least_db(source: FC1Layer, recorded: dict[str, Any]) -> tuple[float, float]:
    """What every row must have, and the output. Another form of the same weights was rounded by itself."""
    form = recorded["form"].split(" + ")[0]
    if (recorded["source"], form) == (source.weight.name, source.form):
        return math.inf if source.repacked else ROUNDED_ONCE_DB, OUTPUT_DB
    if any(name.startswith("E5M2") for name in (form, source.form)):
        return E5M2_WEIGHT_DB, E5M2_OUTPUT_DB
    return SAME_WEIGHT_DB, OUTPUT_DB


def _outputs(
    prepared: Prepared, source: FC1Layer, bf16: torch.Tensor, rows: int, device: torch.device, both: bool
) -> tuple[float, float | None]:
    """SNR of the operator's output against the BF16 layer's, and against that of the halves exchanged."""
    batch = synthetic.layer(rows, source.hidden, contract.FFN_MULTIPLE)
    layer = replace(batch, weight=bf16, x_norm_weight=source.read_norm()).to(device)
    fc1 = prepared.fc1(source.layer, copy=True).to(device)
    norm = prepared.load(source.layer, NORM, copy=True).to(device)
    y = fc1_swiglu_fp8(layer.x, norm, *layer.activations[2:], *fc1)
    output = compare(y, layer.forward_bf16()).snr_db
    if not both:
        return output, None
    exchanged = replace(layer, weight=torch.cat(layer.weight.chunk(2)[::-1]))
    return output, compare(y, exchanged.forward_bf16()).snr_db
