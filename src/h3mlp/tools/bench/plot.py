"""A record as a picture: each peer's time over the limit, by the number of rows."""

from pathlib import Path
from typing import TYPE_CHECKING

from ...files import whole
from .peers import BF16, CHAIN, CHAIN_EAGER, GEMM, GEMM_FP32, OURS, OURS_FAST
from .record import Record
from .render import NAMES, title

if TYPE_CHECKING:
    from matplotlib.figure import Figure

STYLES = {
    OURS: {"color": "#c1121f", "linewidth": 2.8, "marker": "o", "zorder": 5},
    OURS_FAST: {"color": "#f28482", "linewidth": 2.0, "marker": "o", "zorder": 4},
    GEMM: {"color": "#1d3557", "linewidth": 1.6, "marker": "s"},
    GEMM_FP32: {"color": "#457b9d", "linewidth": 1.6, "marker": "s", "linestyle": "--"},
    CHAIN: {"color": "#2a9d8f", "linewidth": 1.6, "marker": "^"},
    CHAIN_EAGER: {"color": "#8a817c", "linewidth": 1.6, "marker": "v"},
    BF16: {"color": "#b58900", "linewidth": 1.6, "marker": "d", "linestyle": ":"},
}
"""The peers that are drawn. Stage 1 alone has another limit."""

TOP = 4.0
"""Times beyond so many limits leave the picture: on an H200 the eager chain of few rows."""


def plot(record: Record, path: Path) -> None:
    """Draw the record into ``path``, whose ending names the format. The file appears whole or not at all."""
    from matplotlib.figure import Figure  # an extra, asked for by --plot alone
    from matplotlib.ticker import FixedLocator, FuncFormatter, NullLocator

    figure = Figure(figsize=(8, 4.6), layout="constrained")
    axes = figure.subplots()
    lines = _lines(record)
    for name, (rows, lower, median, upper) in lines.items():
        axes.plot(rows, median, label=name, markersize=5, **STYLES[name])
        axes.fill_between(rows, lower, upper, color=STYLES[name]["color"], alpha=0.15, linewidth=0)
    axes.axhline(1.0, color="black", linewidth=1.2)
    axes.set_xscale("log", base=2)
    axes.xaxis.set_major_locator(FixedLocator(record.row_counts))
    axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:.0f}"))
    axes.xaxis.set_minor_locator(NullLocator())
    axes.tick_params(axis="x", labelrotation=45)
    axes.set_xlim(record.row_counts[0] / 1.2, record.row_counts[-1] * 1.2)
    medians = [value for _, _, median, _ in lines.values() for value in median] or [1.0]
    axes.set_ylim(min(0.9, 0.95 * min(medians)), _top(record, max(medians)))
    axes.set(
        xlabel="rows",
        ylabel="time / limit (1 is the best possible)",
        title=f"MiniMax-H3 {NAMES[record.operator]} on {title(record)}",
    )
    axes.grid(axis="y", color="0.88", linewidth=0.8)
    axes.set_axisbelow(True)
    axes.spines[["top", "right"]].set_visible(False)
    _name_lines(axes, lines)
    save_figure(figure, path)


def save_figure(figure: "Figure", path: Path) -> None:
    """Write the figure in the format that the ending of ``path`` names, whole or not at all."""
    with whole(path) as partial:
        figure.savefig(partial, format=path.suffix[1:].lower(), dpi=150)


def _lines(record: Record) -> dict[str, tuple[list, ...]]:
    """Rows, lower quartile, median and upper quartile over the limit, by peer."""
    lines: dict[str, tuple[list, ...]] = {}
    for name in STYLES:
        found = [(rows, record.at(rows).get(name)) for rows in record.row_counts]
        points = [
            (rows, *(us / record.limit_us(rows) for us in (r.times.lower_us, r.times.median_us, r.times.upper_us)))
            for rows, r in found
            if r and r.times
        ]
        if points:
            lines[name] = tuple(map(list, zip(*points, strict=True)))
    return lines


def _name_lines(axes, lines: dict[str, tuple[list, ...]]) -> None:
    """The name of each line at its right end, pushed apart where ends meet."""
    bottom, top = axes.get_ylim()
    ends = sorted([*((min(median[-1], top), name) for name, (_, _, median, _) in lines.items()), (1.0, "limit")])
    for height, (_, name) in zip(apart([end for end, _ in ends], 0.05 * (top - bottom)), ends, strict=True):
        axes.annotate(
            name,
            xy=(1.0, height),
            xycoords=("axes fraction", "data"),
            xytext=(4, 0),
            textcoords="offset points",
            va="center",
            color=STYLES[name]["color"] if name in STYLES else "black",
            fontweight="bold" if name == OURS else None,
            annotation_clip=False,
        )


def apart(heights: list[float], gap: float) -> list[float]:
    """Ascending heights moved as little as keeps neighbours at least ``gap`` apart: those too near share a centre."""
    groups: list[list[float]] = []
    for height in heights:
        groups.append([height])
        while len(groups) > 1 and _centre(groups[-1]) - _centre(groups[-2]) < gap * (len(groups[-1] + groups[-2]) / 2):
            near = groups.pop()
            groups[-1] += near
    return [_centre(group) + gap * (i - (len(group) - 1) / 2) for group in groups for i in range(len(group))]


def _centre(group: list[float]) -> float:
    return sum(group) / len(group)


def _top(record: Record, worst: float) -> float:
    """A CPU is many times the limit away, and is shown whole."""
    return 1.05 * worst if record.device["device"] == "cpu" else max(1.5, min(TOP, 1.05 * worst))
