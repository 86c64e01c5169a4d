"""``h3mlp demo``: one real-size FC1 layer, prepared, run, and compared with the BF16 layer and the FP64 reference."""

import math
import statistics
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TypeVar

import torch
from rich.console import Group, RenderableType
from rich.table import Table

from .. import contract, reference, synthetic
from ..accuracy import Accuracy, bf16_steps, compare, spread
from ..operators import dispatch
from ..operators.fc1_swiglu import allocate, minimax_h3_fc1_swiglu_fp8
from ..weights import prepare_minimax_h3_fc1_weight_fp8
from . import doctor
from .bench import beside
from .bench.harness import ABSOLUTE, RELATIVE, violations
from .bench.plot import save_figure
from .bench.record import VIOLATIONS_ALLOWED
from .bench.record import Result as Timed

Result = TypeVar("Result")

BLOCKS = 50
"""Transformer blocks of the model, each with one such layer."""

ROWS = {"cpu": 256, "cuda": 4184}
"""Rows unless given. 4184 are a 768p clip of 4 s on one of eight GPUs: the operator takes 1 ms there."""

SAMPLE_ROWS = 16
"""Rows compared with the FP64 reference: its 1 s on two cores goes into the weight in FP64, whatever the rows."""

REPEATS = 3
REPEAT_LIMIT = 5.0
"""A step that takes longer than this many seconds is timed once."""

EQUAL_SHARE_MIN = 0.999
"""On the CPU, which accumulates in plain FP32. Hopper's tensor cores keep about 13 bits between two promotions, which
moves a tenth of the outputs by a step of BF16: on a GPU no output may be out of the benchmark's tolerance."""

SNR_DB_MIN = 24.0
"""E4M3 has 3 mantissa bits: rounding errors of 2.6% RMS in a and in w add up to 3.7% in h; SwiGLU multiplies two such
values, for about 5.3% or 25.5 dB. A wrong row order or scale gives about 0 dB."""


@dataclass(frozen=True)
class Demo:
    """What the demo measured; times in seconds, memory in bytes."""

    rows: int
    seed: int
    device: str
    backend: str
    reason: str
    environment: dict
    weight_bytes_bf16: int
    weight_bytes_fp8: int
    seconds: dict[str, float]
    against_bf16: Accuracy
    against_fp64: Accuracy
    violations: int
    stage1_identical: bool
    error_of_rms: torch.Tensor = field(repr=False)  # y minus the BF16 layer's over its RMS, on the sample
    steps_from_fp64: torch.Tensor = field(repr=False)  # in BF16 numbers, on the sample
    chains: tuple[Timed, ...] = ()  # on a GPU: the operator and the chains, side by side

    @property
    def ok(self) -> bool:
        """Whether the operator is right on this machine."""
        return (
            self.stage1_identical
            and self.violations <= VIOLATIONS_ALLOWED
            and (self.device != "cpu" or self.against_fp64.equal_share >= EQUAL_SHARE_MIN)
            and self.against_bf16.snr_db >= SNR_DB_MIN
        )

    def as_json(self) -> dict:
        """Everything but the samples of the plot, and the verdict. JSON has no Inf and no NaN: they become null."""
        plain = {name: value for name, value in vars(self).items() if not isinstance(value, torch.Tensor)}
        for name in ("against_bf16", "against_fp64"):
            plain[name] = {key: v if math.isfinite(v) else None for key, v in asdict(plain[name]).items()}
        return plain | {"chains": [asdict(result) for result in self.chains], "ok": self.ok}


def run(rows: int | None, seed: int, announce: Callable[[str], None] = lambda _: None) -> Demo:
    """Run the demo on the best device, with the rows that suit it unless given; ``announce`` is called with the name of
    each step as it begins."""
    device, reason = dispatch.best()
    rows = rows or ROWS[device.type]
    seconds = {}

    def timed(step: str, call: Callable[[], Result]) -> Result:
        announce(step.replace("_", " "))
        start = _now(device)
        result = call()
        seconds[step] = _now(device) - start
        return result

    def timed_again(step: str, call: Callable[[], object]) -> None:
        first, repeats = seconds[f"{step}_first_call"], []
        while first <= REPEAT_LIMIT and len(repeats) < REPEATS:
            timed(step, call)
            repeats.append(seconds[step])
        seconds[step] = statistics.median(repeats or [first])

    layer = timed("make_layer", lambda: synthetic.layer(rows, seed=seed).to(device))
    weight = timed("prepare_weight", lambda: prepare_minimax_h3_fc1_weight_fp8(layer.weight))
    inputs = contract.FC1Inputs(*layer.activations, *weight)
    buffers = allocate(inputs)

    def operator() -> torch.Tensor:
        return minimax_h3_fc1_swiglu_fp8(*inputs, **buffers._asdict())

    y = timed("operator_first_call", operator)
    timed_again("operator", operator)
    y_bf16 = timed("bf16_layer_first_call", layer.forward_bf16)
    timed_again("bf16_layer", layer.forward_bf16)

    sample = spread(rows, SAMPLE_ROWS).to(device)
    sampled = (*layer.rows(sample).activations, *weight)
    exact = timed("fp64_reference", lambda: reference.fc1_swiglu_fp8(*sampled, return_intermediates=True))

    announce("compare")
    codes = buffers.workspace_q.view(torch.uint8)[sample]
    wanted = y_bf16[sample].float()
    found = {
        "against_bf16": compare(y, y_bf16),
        "against_fp64": compare(y[sample], exact.y),
        "violations": violations(y[sample], exact.y),
        "stage1_identical": torch.equal(codes, exact.a_q.view(torch.uint8))
        and torch.equal(buffers.workspace_scale[sample], exact.s_row),
        "error_of_rms": ((y[sample].float() - wanted) / wanted.square().mean().sqrt()).flatten().cpu(),
        "steps_from_fp64": bf16_steps(y[sample], exact.y).flatten().cpu(),
    }
    on_cuda = device.type == "cuda"
    return Demo(
        rows=rows,
        seed=seed,
        device=str(device),
        backend=dispatch.select(device).NAME,
        reason=reason,
        environment=doctor.environment(),
        weight_bytes_bf16=layer.weight.nbytes,
        weight_bytes_fp8=sum(part.nbytes for part in weight),
        seconds=seconds,
        chains=beside.measure_chains(layer, weight, announce=announce) if on_cuda else (),
        **found,
    )


def render(demo: Demo) -> RenderableType:
    """The demo as short tables for a terminal of 80 columns."""
    return Group(
        f"MiniMax-H3 FC1 layer: {demo.rows} rows, hidden {contract.HIDDEN}, FFN {contract.FFN}, seed {demo.seed}",
        f"Backend {demo.backend} on {demo.device}: {demo.reason}",
        "",
        _memory(demo),
        "",
        _times(demo),
        "",
        *([beside.render(demo.chains), ""] if demo.chains else []),
        _errors(demo),
        "",
        _verdict(demo),
    )


def plot(demo: Demo, path: Path) -> None:
    """Draw the error histograms into ``path``, whose ending names the format. The file appears whole or not at all."""
    from matplotlib.figure import Figure  # an extra, asked for by --plot alone

    figure = Figure(figsize=(10, 4), layout="constrained")
    left, right = figure.subplots(1, 2)
    left.hist(demo.error_of_rms.numpy(), bins=60, range=(-0.5, 0.5), log=True, color="tab:blue")
    left.set(
        title=f"FP8 operator minus BF16 layer ({demo.against_bf16.snr_db:.1f} dB)",
        xlabel="difference / RMS of the BF16 output",
        ylabel="outputs",
    )
    counts = demo.steps_from_fp64.clamp(max=4).bincount(minlength=5)
    right.bar(["equal", "1", "2", "3", "4 or more"], counts.tolist(), log=True, color="tab:green")
    right.set(
        title=f"FP8 operator from FP64 reference ({demo.against_fp64.equal_share:.3%} equal)",
        xlabel="distance in BF16 numbers",
        ylabel="outputs",
    )
    save_figure(figure, path)


def _now(device: torch.device) -> float:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter()


def _table(*columns: str) -> Table:
    table = Table(show_edge=False, pad_edge=False)
    table.add_column(columns[0])
    for column in columns[1:]:
        table.add_column(column, justify="right")
    return table


def _memory(demo: Demo) -> Table:
    table = _table("Memory of the weights", "BF16", "FP8", "saved")
    for name, layers in (("this layer", 1), (f"{BLOCKS} blocks", BLOCKS)):
        before, after = demo.weight_bytes_bf16 * layers, demo.weight_bytes_fp8 * layers
        table.add_row(name, f"{before / 1e6:,.1f} MB", f"{after / 1e6:,.1f} MB", f"{1 - after / before:.1%}")
    return table


def _times(demo: Demo) -> Table:
    table = _table("Time", "ms", "TFLOPS")
    flops = {"operator", "operator_first_call", "bf16_layer", "bf16_layer_first_call"}
    for step, seconds in demo.seconds.items():
        rate = 2 * demo.rows * contract.HIDDEN * contract.FC1_ROWS / seconds / 1e12
        table.add_row(step.replace("_", " "), f"{seconds * 1e3:,.2f}", f"{rate:.3f}" if step in flops else "")
    return table


def _errors(demo: Demo) -> Table:
    table = _table("Error of y", "rows", "relative RMS", "SNR, dB", "equal BF16")
    for name, found in (("against the BF16 layer", demo.against_bf16), ("against FP64", demo.against_fp64)):
        table.add_row(
            name, str(found.rows), f"{found.relative_rms:.2e}", f"{found.snr_db:.1f}", f"{found.equal_share:.3%}"
        )
    return table


def _verdict(demo: Demo) -> str:
    identical = "bit-identical to" if demo.stage1_identical else "DIFFERENT from"
    close = f"{EQUAL_SHARE_MIN:.1%} equal to" if demo.device == "cpu" else f"all within {ABSOLUTE} + {RELATIVE:.1%} of"
    return (
        f"FP8 codes and scales: {identical} the reference.\n"
        f"{'OK' if demo.ok else 'WRONG'}: needs identical codes, {close} FP64, "
        f"{SNR_DB_MIN:.0f} dB to BF16."
    )
