"""Time one real-size MiniMax-H3 block of diffusers with random weights: the MLP half, and the whole.

The MLP half is norm2, modulation, FC1, SwiGLU, FC2, gate and residual. Four forms side by side and hot: diffusers in
BF16, the same under torch.compile, and the two with h3mlp. Memory is what a call takes beyond model and input, at its
peak; weights are those of FC1, with norm2.
"""

import copy
import datetime
import json
import statistics
from collections.abc import Callable
from functools import partial
from pathlib import Path

import click
import torch
from diffusers.models.transformers.transformer_minimax_h3 import MiniMaxH3Transformer3DModel, MiniMaxH3TransformerBlock
from rich.console import Console
from rich.table import Table

import h3mlp
from h3mlp import accuracy, contract
from h3mlp.integrations import diffusers as integration
from h3mlp.tools import doctor
from h3mlp.tools.bench import harness, timing

TIMESTEPS, MODALITIES = 3, 3


def models(device: torch.device) -> tuple[MiniMaxH3Transformer3DModel, MiniMaxH3Transformer3DModel, integration.Report]:
    """One block of the model's size, as it is and with h3mlp, and what that saved."""
    torch.manual_seed(0)
    with torch.device(device):
        model = MiniMaxH3Transformer3DModel(num_layers=1, num_refiner_layers=0).to(torch.bfloat16)
    model.eval().requires_grad_(False)
    ours = copy.deepcopy(model)
    return model, ours, integration.apply(ours)


def mlp_half(block: MiniMaxH3TransformerBlock, x, shift, scale, gate, index):
    """The second half of diffusers' block."""
    shift, scale, gate = (table.index_select(0, index) for table in (shift, scale, gate))
    return x + gate * block.ff(block.norm2(x) * (1.0 + scale) + shift)


def peak_bytes(call: Callable[[], torch.Tensor]) -> int:
    """Device memory that a call takes beyond what is there, its result included."""
    call()
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    call()
    return torch.cuda.max_memory_allocated() - before


@click.command(help=__doc__)
@click.option("--rows", default=33472, show_default=True, help="Rows of the packed sequence.")
@click.option("--seconds", default=10.0, show_default=True, help="Time for each table.")
@click.option("--json-out", type=click.Path(dir_okay=False, path_type=Path), help="Write the result into FILE.")
@torch.no_grad()
def main(rows: int, seconds: float, json_out: Path | None) -> None:
    device = torch.device("cuda", 0)
    h3mlp.warmup(device, [rows])
    model, with_ours, report = models(device)
    theirs, ours = model.transformer_blocks[0], with_ours.transformer_blocks[0]
    x = torch.randn((1, rows, contract.HIDDEN), device=device).bfloat16()
    temb = torch.randn((TIMESTEPS, theirs.adaln_proj.linear.in_features), device=device)
    index = torch.randint(TIMESTEPS * MODALITIES, (rows,), device=device).sort().values
    positions = torch.arange(rows, device=device)[:, None] // torch.tensor([2048, 64, 1], device=device) % 64
    rotary = model.rope.to(device)(positions)
    tables = theirs.adaln_proj(temb)[3:]
    compiled = partial(torch.compile, dynamic=False, fullgraph=True)
    halves = {
        "diffusers": partial(mlp_half, theirs),
        "diffusers, compiled": partial(compiled(mlp_half), theirs),
        "h3mlp": ours.feed_forward,
        "h3mlp, compiled": compiled(ours.feed_forward),
    }
    blocks = {
        "diffusers": theirs,
        "diffusers, compiled": compiled(theirs),
        "h3mlp": ours,
        "h3mlp, compiled": compiled(ours),
    }
    found = {
        "date": datetime.date.today().isoformat(),
        "environment": doctor.environment(),
        "gpu": harness.gpu(device),
        "rows": rows,
        "fc1_bytes": {"diffusers": report.bytes_before, "h3mlp": report.bytes_after},
    }
    for part, calls, arguments in (
        ("MLP half", halves, (x, *tables, index)),
        ("whole block", blocks, (x, temb, index, rotary)),
    ):
        calls = {name: partial(call, *arguments) for name, call in calls.items()}
        found[part] = measure(calls, x, seconds)
        Console().print(table(f"{part}, M = {rows}", found[part]))
    saved = f"{report.bytes_before / 1e6:.1f} MB in BF16, {report.bytes_after / 1e6:.1f} MB with h3mlp"
    Console().print(f"FC1 weights of a block: {saved}")
    if json_out:
        json_out.write_text(json.dumps(found, indent=1) + "\n")


def measure(calls: dict[str, Callable], x: torch.Tensor, seconds: float) -> dict[str, dict[str, float]]:
    """Milliseconds, peak memory, and the error of what is added to x against the first, in dB, by name."""
    exact, found = None, {}
    for name, call in calls.items():
        added = call()[0, ::64].float() - x[0, ::64].float()
        exact = added if exact is None else exact
        snr_db = None if exact is added else accuracy.compare(added, exact).snr_db
        found[name] = {"snr_db": snr_db, "peak_bytes": peak_bytes(call)}
    timer = timing.CudaTimer()
    runs = {name: timing.Run(call) for name, call in calls.items()}
    samples, failed = timing.interleave(runs, timer, timing.Plan(seconds=seconds, rounds=10))
    assert not failed, failed
    for name, values in samples.items():
        lower, median, upper = statistics.quantiles(values, n=4)
        found[name] |= {"lower_ms": 1e3 * lower, "ms": 1e3 * median, "upper_ms": 1e3 * upper}
    return found


def table(title: str, found: dict[str, dict[str, float]]) -> Table:
    shown = Table(
        title, "ms", "quartiles", "of diffusers", "peak memory, MB", "SNR, dB", show_edge=False, pad_edge=False
    )
    first = next(iter(found.values()))
    for name, row in found.items():
        quartiles = f"{row['lower_ms']:.2f} to {row['upper_ms']:.2f}"
        snr = "" if row["snr_db"] is None else f"{row['snr_db']:.1f}"
        numbers = f"{row['ms']:.2f}", quartiles, f"{row['ms'] / first['ms']:.2f}", f"{row['peak_bytes'] / 1e6:,.0f}"
        shown.add_row(name, *numbers, snr)
    return shown


if __name__ == "__main__":
    main()
