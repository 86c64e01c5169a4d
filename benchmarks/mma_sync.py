"""Time the mma.sync GEMM alone, every tile and way of loading in every form this GPU has, side by side and hot.

On Hopper this is the only way to time it: the operator takes the wgmma kernel there. Prints a table for each number of
rows: microseconds (median, quartiles), TFLOPS, and the share of outputs equal to FP64 accumulation of the same codes.
"""

import datetime
import json
import statistics
from pathlib import Path

import click
import torch
from rich.console import Console
from rich.table import Table

from h3mlp import contract, prepare_fc1_weight_fp8, reference, synthetic
from h3mlp.accuracy import spread
from h3mlp.backends.cute import forms, jit, launch, variants
from h3mlp.backends.cute.product import fc1
from h3mlp.tools.bench import harness, timing, work

HIDDEN, FFN = contract.HIDDEN, contract.FFN


def kernels(gpu: variants.Gpu) -> list:
    tiles = [*variants.SMALL_TILES, *variants.LARGE_TILES.values()]
    if gpu.arch == "sm_90a":
        tiles.append(variants.EMULATED_TILE)
    loads = (False,) if gpu.arch == "sm_89" else (True, False)
    found = forms.OF.get(gpu.arch, (forms.PLAIN,))
    return [
        variants.gemm_sm120(gpu, fc1(HIDDEN, FFN), tile, form, tma) for form in found for tma in loads for tile in tiles
    ]


def equal_share(y: torch.Tensor, codes: list[torch.Tensor]) -> float:
    chosen = spread(y.shape[0], 64).to(y.device)
    a_q, s_row, w_q, w_scale = codes
    h = reference.dequantize(reference.accumulate(a_q[chosen], w_q), s_row[chosen], w_scale)
    return (y[chosen] == reference.swiglu(*reference.gate_and_up(h))).double().mean().item()


@click.command(help=__doc__)
@click.option("--rows", default="128,1024,4184,33472", show_default=True, help="Numbers of rows, by commas.")
@click.option("--seconds", default=3.0, show_default=True, help="Time for each number of rows.")
@click.option("--json-out", type=click.Path(dir_okay=False, path_type=Path), help="Write the result into FILE.")
def main(rows: str, seconds: float, json_out: Path | None) -> None:
    counts = sorted({int(part) for part in rows.split(",")})
    device = torch.device("cuda", 0)
    gpu = launch._gpu(0)
    layer = synthetic.layer(max(counts), HIDDEN, FFN).to(device)
    packed = prepare_fc1_weight_fp8(layer.weight)
    a_q = torch.empty((max(counts), HIDDEN), dtype=contract.QUANTIZED, device=device)
    s_row = torch.empty(max(counts), device=device)
    launch.stage1(contract.FC1Inputs(*layer.activations, *packed), contract.EPS, a_q, s_row)
    del layer
    loaded = {kernel.name: jit.load(kernel, gpu.arch) for kernel in kernels(gpu)}
    today = datetime.date.today().isoformat()
    found = {"date": today, "gpu": harness.gpu(device), "hidden": HIDDEN, "ffn": FFN, "results": []}
    for count in counts:
        codes = [a_q[:count], s_row[:count], *packed]
        out = torch.full((count, FFN), torch.nan, dtype=contract.ACTIVATION, device=device)
        runs, equal = {}, {}
        timer = timing.CudaTimer()
        for name, function in loaded.items():

            def call(function=function, codes=codes, out=out) -> None:
                function(*codes, out, gpu.multiprocessors)

            out.fill_(torch.nan)
            call()
            equal[name] = equal_share(out, codes)
            runs[name] = timer.prepare(call, count)
        samples, failed = timing.interleave(runs, timer, timing.Plan(seconds=seconds, rounds=5))
        for name, values in sorted(samples.items(), key=lambda item: statistics.median(item[1])):
            lower, median, upper = (1e6 * value for value in statistics.quantiles(values, n=4))
            tflops = work.gemm(count, HIDDEN, FFN).flops / median / 1e6
            row = {"rows": count, "kernel": name, "median_us": median, "lower_us": lower, "upper_us": upper}
            found["results"].append(row | {"tflops": tflops, "equal": equal[name]})
        for name, why in failed.items():
            found["results"].append({"rows": count, "kernel": name, "skipped": why})
        Console().print(table(count, [row for row in found["results"] if row["rows"] == count]))
    if json_out:
        json_out.write_text(json.dumps(found, indent=1) + "\n")


def table(count: int, rows: list[dict]) -> Table:
    shown = Table(f"M = {count}", "us", "quartiles", "TFLOPS", "equal to FP64", show_edge=False, pad_edge=False)
    for row in rows:
        if why := row.get("skipped"):
            shown.add_row(row["kernel"], why)
        else:
            quartiles = f"{row['lower_us']:.1f} to {row['upper_us']:.1f}"
            numbers = f"{row['median_us']:.1f}", quartiles, f"{row['tflops']:.0f}", f"{row['equal']:.4%}"
            shown.add_row(row["kernel"], *numbers)
    return shown


if __name__ == "__main__":
    main()
