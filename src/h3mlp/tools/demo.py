"""``h3mlp demo``: one real-size MLP half, prepared, run, and compared with the BF16 half and the FP64 reference."""

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
from ..operators.mlp import minimax_h3_mlp_fp8
from ..weights import PackedMLP
from . import doctor
from .bench import beside
from .bench.error import ABSOLUTE, RELATIVE, violations
from .bench.plot import save_figure
from .bench.record import VIOLATIONS_ALLOWED
from .bench.record import Result as Timed

Result = TypeVar("Result")

BLOCKS = 50
"""Transformer blocks of the model, each with one such half."""

ROWS = {"cpu": 256, "cuda": 4184}
"""Rows unless given. 4184 are a 768p clip of 4 s on one of eight GPUs."""

SAMPLE_ROWS = 16
"""Rows compared with the FP64 reference: its 1.5 s on two cores go into the weights in FP64, whatever the rows."""

REPEATS = 3
REPEAT_LIMIT = 5.0
"""On the CPU a step that takes longer than this many seconds is timed once. On a GPU the first call compiles."""

EQUAL_SHARE_MIN = 0.999
"""On the CPU, which accumulates in plain FP32: of y, and of the output given the codes of y. (One y in 10,000 that is
the neighbouring BF16 can change the scale of its row, and so a third of that row's output by a step.) Hopper's tensor
cores keep about 13 bits between two promotions, which moves a tenth of y by a step of BF16: on a GPU no output may be
out of the benchmark's tolerance."""

SNR_DB_MIN = 22.0
"""E4M3 has 3 mantissa bits: rounding errors of 2.6% RMS in a and in w add up to 3.7% in h; SwiGLU multiplies two such
values, for about 5.3% in y; the rounding of y and of FC2's weight adds 3.7%: 6.5% or 23.8 dB. A wrong row order or
scale gives about 0 dB."""


_ACCURACIES = ("against_bf16", "fc1_against_bf16", "y_against_fp64", "against_fp64")


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
    against_bf16: Accuracy  # of what the half adds to the residual
    fc1_against_bf16: Accuracy  # the same with FC2 in BF16 behind the operator's y
    y_against_fp64: Accuracy
    against_fp64: Accuracy  # of the output, with the codes of y that were written
    violations: int
    codes_identical: bool
    error_of_rms: torch.Tensor = field(repr=False)  # what the half adds minus BF16's over its RMS, on the sample
    steps_from_fp64: torch.Tensor = field(repr=False)  # in BF16 numbers, on the sample
    call_bytes: int | None = None  # on a GPU: peak beyond weights, inputs and output
    chains: tuple[Timed, ...] = ()  # on a GPU: FC1's operator and its chains, side by side

    @property
    def ok(self) -> bool:
        """Whether the operator is right on this machine."""
        equal_share = min(self.y_against_fp64.equal_share, self.against_fp64.equal_share)
        return (
            self.codes_identical
            and self.violations <= VIOLATIONS_ALLOWED
            and (self.device != "cpu" or equal_share >= EQUAL_SHARE_MIN)
            and self.against_bf16.snr_db >= SNR_DB_MIN
        )

    def as_json(self) -> dict:
        """Everything but the samples of the plot, and the verdict. JSON has no Inf and no NaN: they become null."""
        plain = {name: value for name, value in vars(self).items() if not isinstance(value, torch.Tensor)}
        for name in _ACCURACIES:
            plain[name] = {key: v if math.isfinite(v) else None for key, v in asdict(plain[name]).items()}
        return plain | {"chains": [asdict(result) for result in self.chains], "ok": self.ok}


def run(rows: int | None, seed: int, announce: Callable[[str], None] = lambda _: None) -> Demo:
    """Run the demo on the best device, with the rows that suit it unless given; ``announce`` is called with the name of
    each step as it begins."""
    device, reason = dispatch.best()
    on_cuda = device.type == "cuda"
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
        while len(repeats) < REPEATS and (on_cuda or first <= REPEAT_LIMIT):
            timed(step, call)
            repeats.append(seconds[step])
        seconds[step] = statistics.median(repeats or [first])

    half = timed("make_half", lambda: synthetic.mlp(rows, seed=seed).to(device))
    packed = timed("prepare_weights", lambda: PackedMLP.from_bf16(half.fc1.weight, half.fc2_weight))
    inputs = contract.MLPInputs(*half.activations, *packed)
    out = torch.empty_like(inputs.x)

    def operator() -> torch.Tensor:
        return minimax_h3_mlp_fp8(*inputs, out=out)

    timed("operator_first_call", operator)
    timed_again("operator", operator)
    out_bf16 = timed("bf16_half_first_call", half.forward_bf16)
    timed_again("bf16_half", half.forward_bf16)
    call_bytes = _peak_bytes(operator) if on_cuda else None

    sample = spread(rows, SAMPLE_ROWS).to(device)
    sampled_inputs = inputs.rows(sample)
    written = _with_workspaces(sampled_inputs)
    fc1 = timed(
        "fp64_reference_of_fc1", lambda: reference.fc1_swiglu_fp8(*sampled_inputs.fc1, return_intermediates=True)
    )
    exact = timed("fp64_reference_of_fc2", lambda: _exact_out(written, sampled_inputs))

    announce("compare")
    added, added_bf16 = (result.float() - half.residual.float() for result in (out, out_bf16))
    sampled, wanted = added[sample], added_bf16[sample]
    residual = sampled_inputs.residual
    behind_bf16 = residual + half.added_bf16(written.workspace_y, sampled_inputs.adaln_index)
    return Demo(
        rows=rows,
        seed=seed,
        device=str(device),
        backend=dispatch.select(device).NAME,
        reason=reason,
        environment=doctor.environment(),
        weight_bytes_bf16=half.fc1.weight.nbytes + half.fc2_weight.nbytes,
        weight_bytes_fp8=sum(part.nbytes for part in packed),
        seconds=seconds,
        against_bf16=compare(added, added_bf16),
        fc1_against_bf16=compare(behind_bf16.float() - residual.float(), wanted),
        y_against_fp64=compare(written.workspace_y, fc1.y),
        against_fp64=compare(written.out, exact),
        violations=violations(out[sample], exact),
        codes_identical=_codes_identical(written, fc1),
        error_of_rms=((sampled - wanted) / wanted.square().mean().sqrt()).flatten().cpu(),
        steps_from_fp64=bf16_steps(written.out, exact).flatten().cpu(),
        call_bytes=call_bytes,
        chains=beside.measure_chains(half.fc1, tuple(packed.fc1), announce=announce) if on_cuda else (),
    )


def _with_workspaces(inputs: contract.MLPInputs) -> contract.MLPBuffers:
    """The operator's output and all that it makes on the way."""
    kinds = contract.mlp_buffer_rows(*inputs.fc2_weight_q.shape).values()
    rows = inputs.x.shape[0]
    buffers = contract.MLPBuffers(*(inputs.x.new_empty((rows, *row), dtype=dtype) for dtype, row in kinds))
    minimax_h3_mlp_fp8(*inputs, **buffers._asdict())
    return buffers


def _exact_out(got: contract.MLPBuffers, inputs: contract.MLPInputs) -> torch.Tensor:
    """out of these codes of y, accumulated in FP64."""
    acc = reference.accumulate(got.workspace_y_q, inputs.fc2_weight_q)
    o = reference.dequantize(acc, got.workspace_y_scale, inputs.fc2_weight_scale)
    return reference.gated_residual(o, inputs.gate, inputs.residual, inputs.adaln_index)


def _codes_identical(got: contract.MLPBuffers, exact: reference.Stage1) -> bool:
    """Codes and scales of x those of the reference, those of y what the reference makes of the y that was written."""
    s_y = reference.row_scale(got.workspace_y)
    y_q = reference.quantize(got.workspace_y, s_y)
    pairs = (
        (got.workspace_a_q, exact.a_q),
        (got.workspace_a_scale, exact.s_row),
        (got.workspace_y_q, y_q),
        (got.workspace_y_scale, s_y),
    )
    return all(torch.equal(have.view(torch.uint8), want.view(torch.uint8)) for have, want in pairs)


def _peak_bytes(call: Callable[[], object]) -> int:
    """The most that torch's allocator held on the current GPU during a call beyond what it held before."""
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    call()
    return torch.cuda.max_memory_allocated() - before


def render(demo: Demo) -> RenderableType:
    """The demo as short tables for a terminal of 80 columns."""
    return Group(
        f"MiniMax-H3 MLP half: {demo.rows} rows, hidden {contract.HIDDEN}, FFN {contract.FFN}, seed {demo.seed}",
        f"Backend {demo.backend} on {demo.device}: {demo.reason}",
        "",
        _memory(demo),
        "",
        _times(demo),
        "",
        *(["FC1 alone, beside the chain that it replaces:", beside.render(demo.chains), ""] if demo.chains else []),
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
        title=f"FP8 operator minus BF16 half ({demo.against_bf16.snr_db:.1f} dB)",
        xlabel="difference / RMS of what the BF16 half adds",
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
    for name, layers in (("this half", 1), (f"{BLOCKS} blocks", BLOCKS)):
        before, after = demo.weight_bytes_bf16 * layers, demo.weight_bytes_fp8 * layers
        table.add_row(name, f"{before / 1e6:,.1f} MB", f"{after / 1e6:,.1f} MB", f"{1 - after / before:.1%}")
    if demo.call_bytes is not None:
        table.add_row("a call, beside these", "", f"{demo.call_bytes / 1e6:,.1f} MB", "")
    return table


def _times(demo: Demo) -> Table:
    table = _table("Time", "ms", "TFLOPS")
    flops = {"operator", "operator_first_call", "bf16_half", "bf16_half_first_call"}
    for step, seconds in demo.seconds.items():
        rate = 2 * demo.rows * contract.HIDDEN * (contract.FC1_ROWS + contract.FFN) / seconds / 1e12
        table.add_row(step.replace("_", " "), f"{seconds * 1e3:,.2f}", f"{rate:.3f}" if step in flops else "")
    return table


def _errors(demo: Demo) -> Table:
    table = _table("Error", "rows", "relative RMS", "SNR, dB", "equal")
    for name, found in (
        ("of what the half adds, to BF16", demo.against_bf16),
        ("the same with FC2 in BF16", demo.fc1_against_bf16),
        ("of y, to FP64", demo.y_against_fp64),
        ("of the output, to FP64", demo.against_fp64),
    ):
        table.add_row(
            name, str(found.rows), f"{found.relative_rms:.2e}", f"{found.snr_db:.1f}", f"{found.equal_share:.3%}"
        )
    return table


def _verdict(demo: Demo) -> str:
    identical = "bit-identical to" if demo.codes_identical else "DIFFERENT from"
    close = f"{EQUAL_SHARE_MIN:.1%} equal to" if demo.device == "cpu" else f"all within {ABSOLUTE} + {RELATIVE:.1%} of"
    return (
        f"FP8 codes and scales, of x and of y: {identical} the reference.\n"
        f"{'OK' if demo.ok else 'WRONG'}: needs identical codes, {close} FP64, "
        f"{SNR_DB_MIN:.0f} dB to BF16."
    )
