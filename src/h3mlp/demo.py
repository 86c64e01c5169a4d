"""``h3mlp demo``: one real-size FC1 layer, prepared, run, and compared with the BF16 layer and the FP64 reference."""

import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path

import torch
from rich.console import Group, RenderableType
from rich.table import Table

from . import contract, dispatch, doctor, reference, synthetic
from .accuracy import Accuracy, bf16_steps, compare
from .operator import minimax_h3_fc1_swiglu_fp8
from .weights import prepare_minimax_h3_fc1_weight_fp8

BLOCKS = 50
"""Transformer blocks of the model, each with one such layer."""

SAMPLE_ROWS = 16
"""Rows compared with the FP64 reference, which takes 40 ms a row on two cores."""

REPEATS = 3
REPEAT_LIMIT = 5.0
"""A step that takes longer than this many seconds is timed once."""

EQUAL_SHARE_MIN = 0.999
SNR_DB_MIN = 24.0
"""E4M3 has 3 mantissa bits: rounding errors of 2.6% RMS in a and in w add up to 3.7% in h; SwiGLU multiplies two such
values, for about 5.3% or 25.5 dB. A wrong row order or scale gives about 0 dB."""


@dataclass
class Demo:
    """What the demo measured; times in seconds, memory in bytes."""

    rows: int
    seed: int
    device: str
    backend: str
    reason: str
    weight_bytes_bf16: int = 0
    weight_bytes_fp8: int = 0
    seconds: dict[str, float] = field(default_factory=dict)
    against_bf16: Accuracy | None = None
    against_fp64: Accuracy | None = None
    stage1_identical: bool = False
    environment: dict = field(default_factory=doctor.environment)
    error_of_rms: torch.Tensor | None = field(default=None, repr=False)  # against BF16, on the sample
    steps_from_fp64: torch.Tensor | None = field(default=None, repr=False)  # in BF16 numbers, on the sample

    @property
    def ok(self) -> bool:
        """Whether the operator is right on this machine."""
        return (
            self.stage1_identical
            and self.against_fp64.equal_share >= EQUAL_SHARE_MIN
            and self.against_bf16.snr_db >= SNR_DB_MIN
        )

    def as_json(self) -> dict:
        """Everything but the samples of the plot, and the verdict."""
        plain = {name: value for name, value in vars(self).items() if not isinstance(value, torch.Tensor)}
        for name in ("against_bf16", "against_fp64"):
            plain[name] = asdict(plain[name])
        return plain | {"ok": self.ok}


def run(rows: int, seed: int, announce: Callable[[str], None] = lambda _: None) -> Demo:
    """Run the demo on the best device; ``announce`` is called with the name of each step as it begins."""
    device, reason = dispatch.best()
    demo = Demo(rows, seed, str(device), dispatch.select(device).NAME, reason)

    @contextmanager
    def timed(step: str) -> Iterator[None]:
        announce(step)
        start = _now(device)
        yield
        demo.seconds[step] = _now(device) - start

    with timed("make_layer"):
        layer = synthetic.layer(rows, seed=seed).to(device)
    with timed("prepare_weight"):
        weight = prepare_minimax_h3_fc1_weight_fp8(layer.weight)
    demo.weight_bytes_bf16 = layer.weight.nbytes
    demo.weight_bytes_fp8 = sum(part.nbytes for part in weight)

    rows_of_out = contract.Buffers(
        layer.x.new_empty((rows, contract.FFN)),
        layer.x.new_empty((rows, contract.HIDDEN), dtype=contract.QUANTIZED),
        layer.x.new_empty(rows, dtype=contract.SCALE),
    )
    operator = lambda: minimax_h3_fc1_swiglu_fp8(*layer.activations, *weight, **rows_of_out._asdict())  # noqa: E731
    with timed("operator_first_call"):
        y = operator()
    announce("operator")
    demo.seconds["operator"] = _median_seconds(operator, demo.seconds["operator_first_call"], device)
    with timed("bf16_layer_first_call"):
        y_bf16 = layer.forward_bf16()
    announce("bf16_layer")
    demo.seconds["bf16_layer"] = _median_seconds(layer.forward_bf16, demo.seconds["bf16_layer_first_call"], device)

    with timed("fp64_reference"):
        sample = torch.linspace(0, rows - 1, min(rows, SAMPLE_ROWS), dtype=torch.float64).round().long().to(device)
        exact = reference.fc1_swiglu_fp8(*layer.rows(sample).activations, *weight, return_intermediates=True)
    announce("compare")
    demo.against_bf16 = compare(y, y_bf16)
    demo.against_fp64 = compare(y[sample], exact.y)
    demo.stage1_identical = torch.equal(
        rows_of_out.workspace_q[sample].view(torch.uint8), exact.a_q.view(torch.uint8)
    ) and torch.equal(rows_of_out.workspace_scale[sample], exact.s_row)
    wanted = y_bf16[sample].float()
    demo.error_of_rms = ((y[sample].float() - wanted) / wanted.square().mean().sqrt()).flatten().cpu()
    demo.steps_from_fp64 = bf16_steps(y[sample], exact.y).flatten().cpu()
    return demo


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
    partial = path.with_name(f".{path.name}.partial")
    try:
        figure.savefig(partial, format=path.suffix[1:], dpi=120)
        partial.replace(path)
    finally:
        partial.unlink(missing_ok=True)


def _now(device: torch.device) -> float:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter()


def _median_seconds(call: Callable[[], object], first: float, device: torch.device) -> float:
    if first > REPEAT_LIMIT:
        return first
    seconds = []
    for _ in range(REPEATS):
        start = _now(device)
        call()
        seconds.append(_now(device) - start)
    return statistics.median(seconds)


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
    return (
        f"FP8 codes and scales: {identical} the reference.\n"
        f"{'OK' if demo.ok else 'WRONG'}: needs identical codes, {EQUAL_SHARE_MIN:.1%} equal to FP64, "
        f"{SNR_DB_MIN:.0f} dB to BF16."
    )
