"""What the commands for checkpoints show: tables, and the SNR by layer as a plot."""

import math
from collections.abc import Iterator
from pathlib import Path

from rich.console import Group, RenderableType
from rich.table import Table

from ..checkpoint.convert import Report
from ..checkpoint.inspect import Inspected
from ..checkpoint.lora import describe as describe_lora
from ..checkpoint.prepared import FULL_PRECISION, snr_text
from ..checkpoint.verify import OUTPUT_DB, Verified
from . import terminal
from .bench.plot import save_figure


def report_table(report: Report) -> RenderableType:
    """A line a layer, and what else happened."""
    description = report.description
    table = Table(box=None, header_style="bold", pad_edge=False)
    for title, justify in (
        ("layer", "left"),
        ("from", "left"),
        ("halves", "left"),
        ("became FP8 by", "left"),
        ("SNR dB", "right"),
    ):
        table.add_column(title, justify=justify)
    for name, layer in description.layers.items():
        snr = snr_text(layer["action"], layer["snr_db"])
        table.add_row(name, layer["form"], layer["gate_order"], _ACTIONS[layer["action"]], snr)
    return Group(table, *map(terminal.line, summary(report)))


_ACTIONS = {
    "quantized": "quantizing",
    "repacked": "reordering rows",
    "requantized": "quantizing again",
}


def summary(report: Report) -> Iterator[str]:
    layers = report.description.layers
    yield ""
    if any(layer["action"] == "requantized" for layer in layers.values()):
        yield "Layers quantized again were rounded to FP8 a second time: a BF16 checkpoint gives better ones."
    if any(layer["full_precision"] for layer in layers.values()):
        yield FULL_PRECISION
    for lora in report.description.loras:
        yield describe_lora(lora)
    if report.left_to_engine:
        count, some = len(report.left_to_engine), ", ".join(report.left_to_engine[:2])
        yield f"Adapters of {count} other modules ({some} ...) are left to the engine: load them there."
    beside = f"{len(report.copied)} tensors copied, {report.left_out} left out"
    yield f"{len(layers)} layers; {beside}" + (f"; {report.resumed} parts kept from before" if report.resumed else "")
    speed = report.bytes_read / report.seconds / 1e9
    yield (
        f"{report.destination}: {report.bytes_written / 1e9:.3f} GB in {len(report.files)} "
        f"file{'s' if len(report.files) > 1 else ''}, {report.seconds:.1f} s, {speed:.2f} GB/s"
    )


def inspected_table(found: Inspected) -> RenderableType:
    """What it is, and the lines as a table."""
    table = Table(box=None, header_style="bold", pad_edge=False)
    for title in ("layer", "made of" if found.prepared else "form", "halves", "shape", "scales"):
        table.add_column(title)
    table.add_column("SNR dB", justify="right")
    for line in found.lines:
        scales = "-" if line.scale_range is None else "{:.1e}-{:.1e}".format(*line.scale_range)
        shape, snr = "{}x{}".format(*line.shape), snr_text(line.action, line.snr_db)
        table.add_row(line.layer, line.form, line.gate_order, shape, scales, snr)
    return Group(*map(terminal.line, inspected_head(found)), "", table)


def inspected_head(found: Inspected) -> Iterator[str]:
    what = "a prepared checkpoint of h3mlp" if found.prepared else "a checkpoint to be prepared by `h3mlp convert`"
    files = f"{found.files} file{'s' if found.files > 1 else ''}"
    yield f"{found.path}: {what}"
    yield f"{files}, {found.bytes / 1e9:.3f} GB; {len(found.lines)} FC1 layers, {found.other_tensors} other tensors"
    if found.prepared:
        names = [source["name"] for source in found.origin["sources"]]
        yield f"Made by h3mlp {found.origin['made_by']} of {names[0]}" + (
            f" and {len(names) - 1} more" if names[1:] else ""
        )
        for lora in found.origin["loras"]:
            yield f"with {describe_lora(lora)}"


def verified_table(verified: Verified) -> RenderableType:
    """A line a layer, and the verdict."""
    table = Table(box=None, header_style="bold", pad_edge=False)
    table.add_column("layer")
    table.add_column("source")
    for title in ("weight dB", "worst row", "output dB"):
        table.add_column(title, justify="right")
    table.add_column("")
    for check in verified.checks:
        worst = "-" if check.worst_row_db == math.inf else f"{check.worst_row_db:.1f} ({check.worst_row})"
        weight, off = _cell(check.snr_db), "OFF" if check.faults else "ok"
        table.add_row(check.layer, check.form, weight, worst, f"{check.output_db:.1f}", off)
    return Group(table, "", *map(terminal.line, verdict(verified)))


def _cell(db: float) -> str:
    return "exact" if db == math.inf else f"{db:.2f}"


def verdict(verified: Verified) -> Iterator[str]:
    """What is off, and whether anything is."""
    off = [check for check in verified.checks if check.faults]
    for check in off:
        for fault in check.faults:
            yield f"{check.layer}: {fault}"
    count = len(verified.checks)
    if any(check.full_precision for check in verified.checks):
        yield FULL_PRECISION
    if off:
        yield f"FAILED: {len(off)} of {count} layers are off"
    else:
        yield f"OK: {count} layers are those of {verified.against}"


def plot_verified(verified: Verified, path: Path) -> None:
    """Draw the SNR by layer into ``path``, whose ending names the format. The file appears whole or not at all."""
    from matplotlib.figure import Figure  # an extra, asked for by --plot alone
    from matplotlib.ticker import MaxNLocator

    figure = Figure(figsize=(9, 4.2), layout="constrained")
    axes = figure.subplots()
    lines = {
        "dequantized weight": ([check.snr_db for check in verified.checks], "#1d3557", "s"),
        "its worst row": ([check.worst_row_db for check in verified.checks], "#457b9d", "v"),
        "output": ([check.output_db for check in verified.checks], "#c1121f", "o"),
    }
    for label, (values, color, marker) in lines.items():
        finite = [(i, value) for i, value in enumerate(values) if math.isfinite(value)]
        exact = "" if finite else " (exact)"
        axes.plot(
            *zip(*finite, strict=True) if finite else ([], []),
            label=label + exact,
            color=color,
            marker=marker,
            markersize=5,
        )
    off = [i for i, check in enumerate(verified.checks) if check.faults]
    for i in off:
        axes.axvspan(i - 0.5, i + 0.5, color="#f28482", alpha=0.35, linewidth=0, label="off" if i == off[0] else None)
    axes.axhline(OUTPUT_DB, color="#c1121f", linewidth=1, linestyle=":", label="least output")
    names = [check.layer for check in verified.checks]
    axes.xaxis.set_major_locator(MaxNLocator(nbins=16, integer=True))
    axes.xaxis.set_major_formatter(lambda value, _: names[int(value)] if value in range(len(names)) else "")
    axes.tick_params(axis="x", labelrotation=45)
    title = terminal.printable(f"{verified.path.name} against {verified.against.name}")
    axes.set(ylabel="SNR / dB", title=title)
    axes.set_xlim(-0.6, len(names) - 0.4)
    axes.grid(axis="y", color="0.88", linewidth=0.8)
    axes.set_axisbelow(True)
    axes.spines[["top", "right"]].set_visible(False)
    figure.legend(loc="outside lower center", frameon=False, ncols=5)
    save_figure(figure, path)
