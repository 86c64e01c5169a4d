"""A record as tables for a terminal."""

from rich.box import SIMPLE_HEAD
from rich.console import Group, RenderableType
from rich.table import Table

from .peers import CHAIN, CHAIN_EAGER, GEMM, STAGE1
from .record import Record, Result

NAMES = {"fc1": "FC1 layer", "mlp": "MLP half of a block"}
"""Of the operators."""

COLUMNS = ("us", "burst", "TFLOPS", "GB/s", "/GEMM", "/chain", "RMS", "off")

LEGEND = """\
us      median of the hot, interleaved rounds
burst   best of the first calls after a pause, us
GB/s    least bytes of a call over its time
/GEMM   time over that of the bare fast GEMM, or both; below 1 is faster
/chain  time over that of the chain (compiled, where it is)
RMS     relative RMS error against the contract in FP64, on sampled rows
off     sampled elements off by more than 0.01 + 1.6%; of the MLP, an ulp
        more of each of its roundings
alone   by itself, back to back: each at the clock that its power allows
limit   least bytes of the operator at the copy bandwidth, or its operations
        at the highest rate of the run, whichever takes longer"""


def render(record: Record) -> RenderableType:
    """One table a number of rows, one line a peer."""
    tables = [table for rows in record.row_counts for table in (_table(record, rows), *_alone(record, rows))]
    return Group(*_head(record), *tables, *_skipped(record), *_host(record), _peers(record), "", LEGEND)


def title(record: Record) -> str:
    """The device in a line."""
    device, environment = record.device, record.environment
    if "name" not in device:
        return f"{environment['cpu']}, {environment['threads']} threads"
    power = device.get("power_limit_w")
    return device["name"] + (f", {power:.0f} W" if isinstance(power, float) else "")


def _head(record: Record) -> list[str]:
    index = f", index {kind}" if (kind := record.settings.get("index")) else ""
    versions = [f"torch {record.environment['torch']}", f"h3mlp {record.environment['h3mlp']}"]
    if driver := record.device.get("driver"):
        versions.insert(0, f"driver {driver}")
    rates = f"Copy bandwidth {record.copy_gb_s:,.0f} GB/s"
    if record.peak_gflops:
        rates += f", highest rate {_significant(record.peak_gflops / 1e3)} TFLOPS"
    return [
        f"MiniMax-H3 {NAMES[record.operator]}: hidden {record.hidden}, FFN {record.ffn}{index}",
        f"{title(record)}; {', '.join(versions)}; {record.date}",
        f"{rates}.",
        *([f"Backend {record.device['backend']}: {serves}"] if (serves := record.device.get("serves")) else []),
        "",
    ]


def _table(record: Record, rows: int) -> Table:
    found = record.at(rows)
    table = Table(
        title=f"{rows:,} rows; limit {_significant(record.limit_us(rows))} us",
        caption=_stage1(record, found),
        title_justify="left",
        caption_justify="left",
        title_style="bold",
        caption_style="",
        box=SIMPLE_HEAD,
        pad_edge=False,
        padding=(0, 0, 0, 1),
    )
    gemm, chain = _median(found, GEMM), _median(found, CHAIN) or _median(found, CHAIN_EAGER)
    lines = {name: _cells(result, gemm, chain) for name, result in found.items()}
    columns = [c for c in COLUMNS if any(cells.get(c) for cells in lines.values())]
    table.add_column("peer", no_wrap=True)
    for column in columns:
        table.add_column(column, justify="right", no_wrap=True)
    for name, cells in lines.items():
        table.add_row(name, *(cells.get(column, "") for column in columns))
    return table


def _cells(result: Result, gemm: float | None, chain: float | None) -> dict[str, str]:
    if not result.times:
        return {"us": "skipped"}
    us, burst, error = result.times.median_us, result.times.burst_us, result.error
    cells = {"us": _significant(us), "GB/s": _significant(result.bytes / us / 1e3)}
    if burst:
        cells["burst"] = _significant(burst)
    if result.flops:
        cells["TFLOPS"] = _significant(result.flops / us / 1e6)
    if gemm:
        cells["/GEMM"] = f"{us / gemm:.3f}"
    if chain:
        cells["/chain"] = f"{us / chain:.3f}"
    if error:
        cells["RMS"] = "nan" if error.relative_rms is None else f"{error.relative_rms:.1e}"
        cells["off"] = f"{error.violations:,}"
    return cells


def _alone(record: Record, rows: int) -> list[RenderableType]:
    """Time, power and energy of each peer by itself, where that was measured."""
    found = {name: result.alone for name, result in record.at(rows).items() if result.alone}
    if not found:
        return []
    gemm = found.get(GEMM)
    table = Table("alone", box=SIMPLE_HEAD, pad_edge=False, padding=(0, 0, 0, 1))
    for column in ("us", "W", "J", "/GEMM", "J/GEMM"):
        table.add_column(column, justify="right", no_wrap=True)
    for name, one in found.items():
        energy = ("", "") if one.joules is None else (f"{one.watts:.0f}", f"{one.joules:.3f}")
        over = [f"{one.us / gemm.us:.3f}"] if gemm else [""]
        if gemm and gemm.joules and one.joules is not None:
            over.append(f"{one.joules / gemm.joules:.3f}")
        table.add_row(name, _significant(one.us), *energy, *over)
    return [table]


def _stage1(record: Record, found: dict[str, Result]) -> str | None:
    us = _median(found, STAGE1)
    share = found[STAGE1].bytes / us / 1e3 / record.copy_gb_s if us else 0.0
    return f"{STAGE1} moves its bytes at {share:.1%} of the copy bandwidth.\n" if us else None


def _skipped(record: Record) -> list[str]:
    lines = [f"{r.peer} at {r.rows:,} rows was skipped: {r.skipped}" for r in record.results if r.skipped]
    return [*lines, ""] if lines else []


def _peers(record: Record) -> Table:
    table = Table(box=None, show_header=False, pad_edge=False)
    for name, what in record.peers.items():
        table.add_row(name, what)
    return table


def _host(record: Record) -> list[str]:
    return [] if record.host_us is None else [f"Host time of a call of h3mlp: {record.host_us:.1f} us.", ""]


def _median(found: dict[str, Result], peer: str) -> float | None:
    return found[peer].times.median_us if peer in found and found[peer].times else None


def _significant(value: float) -> str:
    """Three or four digits: 0.137, 33.40, 1,335, 2,172,000."""
    if value >= 1000:
        return f"{value:,.0f}"
    return f"{value:.3g}" if value < 1 else f"{value:.{3 if value < 10 else 2 if value < 100 else 1}f}"
