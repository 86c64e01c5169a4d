"""What each way of adding the FP8 products of stage 2 costs in accuracy and in time, on Hopper.

Accuracy: the inputs of the specified operator's own public test (x of N(0, 0.5), FC1 of N(0, 0.02), 4097 rows, runs of
one AdaLN row), everything from the same codes. *Outside* counts outputs further than 1e-2 + 1.6% from exact products,
where that test allows max(4, 2e-7 of them); *equal* is the share that is the same BF16. Time: the whole operator beside
the library's bare GEMM, interleaved and hot.
"""

import datetime
import json
import math
import statistics
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path

import click
import torch
from rich.console import Console
from rich.table import Table

from h3mlp import contract, prepare_fc1_weight_fp8, reference, synthetic, unpack_fc1_rows
from h3mlp.accuracy import compare
from h3mlp.backends.chain import scaled_mm
from h3mlp.backends.cute import launch, variants
from h3mlp.backends.cute.product import fc1
from h3mlp.operators.fc1_swiglu import allocate
from h3mlp.tools.bench import error, harness, timing

HIDDEN, FFN = contract.HIDDEN, contract.FFN
ROWS = 4097
DEVICE = torch.device("cuda", 0)
INTERVALS = (128, 256)
ALLOWED = 2e-7
BLOCK = 1024


def inputs(rows: int) -> contract.FC1Inputs:
    layer = synthetic.as_specified(rows, DEVICE)
    return contract.FC1Inputs(*layer.activations, *prepare_fc1_weight_fp8(layer.weight))


def ours(given: contract.FC1Inputs, accumulate: str, interval: int = 256) -> Callable[[], torch.Tensor]:
    """The operator with this interval of promotion; "fast" has none and only stores by it."""
    rows, gpu = given.x.shape[0], launch._gpu(0)
    gemm = replace(variants.gemm(gpu, fc1(HIDDEN, FFN), rows, accumulate, None), interval=interval)
    kernel = launch._load(gemm, gpu.arch)
    out, a_q, s_row = allocate(given)
    out.fill_(torch.nan)

    def call() -> torch.Tensor:
        launch.stage1(given, contract.EPS, a_q, s_row)
        kernel.launch(rows, a_q, s_row, given.fc1_weight_q, given.fc1_weight_scale, out, gpu.multiprocessors)
        return out

    return call


def codes_of(given: contract.FC1Inputs) -> tuple[torch.Tensor, torch.Tensor]:
    _, a_q, s_row = allocate(given)
    launch.stage1(given, contract.EPS, a_q, s_row)
    return a_q, s_row


def y_of(h: torch.Tensor) -> torch.Tensor:
    """h [M, 2F], gate columns first."""
    return reference.swiglu(*h.chunk(2, dim=-1))


def accuracy() -> list[dict]:
    """Every way against exact products."""
    given = inputs(ROWS)
    a_q, s_row = codes_of(given)
    w_q, w_scale = unpack_fc1_rows(given.fc1_weight_q), unpack_fc1_rows(given.fc1_weight_scale)
    exact, fp32 = [], []
    for codes, scales in zip(a_q.split(BLOCK), s_row.split(BLOCK), strict=True):
        exact.append(y_of(reference.dequantize(reference.accumulate(codes, w_q), scales, w_scale)))
        fp32.append(y_of(reference.dequantize(codes.float() @ w_q.float().T, scales, w_scale)))
    exact = torch.cat(exact)
    ways = {"FP32 torch": torch.cat(fp32)}
    for name, fast in (("library, FP32", False), ("library, fast", True)):
        ways[name] = y_of(scaled_mm(a_q, w_q, s_row, w_scale, fast))
    for interval in INTERVALS:
        ways[f"h3mlp, every {interval}"] = ours(given, "fp32", interval)()
    ways["h3mlp, fast"] = ours(given, "fast")()
    return [
        {
            "way": name,
            "outside": error.violations(y, exact),
            "outputs": y.numel(),
            "equal": compare(y, exact).equal_share,
        }
        for name, y in ways.items()
    ]


def times(rows: int, seconds: float) -> list[dict]:
    """Every way's time for so many rows."""
    given = inputs(rows)
    a_q, s_row = codes_of(given)
    w_q, w_scale = unpack_fc1_rows(given.fc1_weight_q), unpack_fc1_rows(given.fc1_weight_scale)
    calls = {f"h3mlp, every {interval}": ours(given, "fp32", interval) for interval in INTERVALS}
    calls["h3mlp, fast"] = ours(given, "fast")
    calls["library, FP32"] = partial(scaled_mm, a_q, w_q, s_row, w_scale, False)
    calls["library, fast"] = partial(scaled_mm, a_q, w_q, s_row, w_scale, True)
    timer = timing.CudaTimer()
    for call in calls.values():
        call()
    runs = {name: timer.prepare(call, rows) for name, call in calls.items()}
    samples, _ = timing.interleave(runs, timer, timing.Plan(seconds=seconds))
    base = statistics.median(samples["library, fast"])
    return [
        {"way": name, "rows": rows, "us": 1e6 * statistics.median(taken), "over_fast": statistics.median(taken) / base}
        for name, taken in samples.items()
    ]


@click.command(help=__doc__)
@click.option("--rows", default="4184,33472,109952", show_default=True, help="Numbers of rows to time, by commas.")
@click.option("--seconds", default=10.0, show_default=True, help="Time for each number of rows.")
@click.option("--json-out", type=click.Path(dir_okay=False, path_type=Path), help="Write the result into FILE.")
def main(rows: str, seconds: float, json_out: Path | None) -> None:
    counts = [int(part) for part in rows.split(",")]
    found = {
        "date": datetime.date.today().isoformat(),
        "gpu": harness.gpu(DEVICE),
        "allowed": max(4, math.ceil(ALLOWED * ROWS * FFN)),
        "accuracy": accuracy(),
        "times": [row for count in counts for row in times(count, seconds)],
    }
    table = Table("way", "outside", "equal", *(f"M = {count}, us / fast" for count in counts), show_edge=False)
    for way in found["accuracy"]:
        taken = {row["rows"]: row for row in found["times"] if row["way"] == way["way"]}
        shown = (f"{taken[n]['us']:.0f} / {taken[n]['over_fast']:.3f}" if n in taken else "" for n in counts)
        table.add_row(way["way"], f"{way['outside']:,}", f"{way['equal']:.3%}", *shown)
    Console().print(table, f"allowed outside: {found['allowed']} of {ROWS * FFN:,}")
    if json_out:
        json_out.write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
