"""Time the operator whole, with its rows split and with its FFN columns split over the processes of torchrun.

    torchrun --standalone --nproc-per-node 2 benchmarks/split.py

Every process times its own part, all at once and hot; the slowest counts. Nothing is sent: what gathers the parts is
left to the engine. Columns are those of tensor parallel, where every process computes stage 1 for all rows.
"""

import datetime
import json
import os
import statistics
from pathlib import Path

import click
import torch
import torch.distributed as dist
from rich.console import Console
from rich.table import Table

import h3mlp
from h3mlp import PackedFC1, contract, synthetic
from h3mlp.distributed import shard
from h3mlp.operators.fc1_swiglu import allocate
from h3mlp.tools import doctor
from h3mlp.tools.bench import harness, timing


@click.command(help=__doc__)
@click.option("--rows", default="33472,4184", show_default=True, help="Numbers of rows, by commas.")
@click.option("--hidden", default=contract.HIDDEN, show_default=True)
@click.option("--ffn", default=contract.FFN, show_default=True)
@click.option("--seconds", default=5.0, show_default=True, help="Time for each way of splitting.")
@click.option("--json-out", type=click.Path(dir_okay=False, path_type=Path), help="Write the result into FILE.")
def main(rows: str, hidden: int, ffn: int, seconds: float, json_out: Path | None) -> None:
    device = torch.device("cpu")
    if torch.cuda.is_available():
        device = torch.device("cuda", int(os.environ["LOCAL_RANK"]) % torch.cuda.device_count())
        torch.cuda.set_device(device)
    dist.init_process_group("gloo")  # for numbers alone
    rank, world = dist.get_rank(), dist.get_world_size()
    counts = sorted({int(part) for part in rows.split(",")})
    layer = synthetic.layer(max(counts), hidden, ffn).to(device)
    packed = PackedFC1.from_bf16(layer.weight)
    h3mlp.warmup(device, [*counts, *(count // world for count in counts)], hidden=hidden, ffn=ffn)
    h3mlp.warmup(device, counts, hidden=hidden, ffn=ffn // world)
    results = []
    for count in counts:
        whole = contract.FC1Inputs(*layer.rows(torch.arange(count, device=device)).activations, *packed)
        mine = slice(rank * (count // world), (rank + 1) * (count // world))
        ways = {
            "whole": whole,
            "rows split": whole._replace(x=whole.x[mine], adaln_index=whole.adaln_index[mine]),
            "columns split": whole._replace(
                **dict(zip(("fc1_weight_q", "fc1_weight_scale"), shard(packed, rank, world), strict=True))
            ),
        }
        for name, inputs in ways.items():
            ms = slowest(1e3 * seconds_of(inputs, device, seconds))
            results.append({"rows": count, "way": name, "ms": ms})
    if rank == 0:
        Console().print(table(results, world))
        if json_out:
            found = {
                "date": datetime.date.today().isoformat(),
                "environment": doctor.environment(),
                "gpu": harness.gpu(device) if device.type == "cuda" else None,
                "world": world,
                "hidden": hidden,
                "ffn": ffn,
                "results": results,
            }
            json_out.write_text(json.dumps(found, indent=1) + "\n")
    dist.destroy_process_group()


def seconds_of(inputs: contract.FC1Inputs, device: torch.device, seconds: float) -> float:
    """Median of hot calls into buffers, begun by all processes at once."""
    buffers = allocate(inputs)._asdict()
    timer = harness.device_timer(device)

    def call() -> None:
        h3mlp.fc1_swiglu_fp8(*inputs, **buffers)

    call()
    dist.barrier()
    samples, failed = timing.interleave({"": timing.Run(call)}, timer, timing.Plan(seconds=seconds, rounds=5))
    assert not failed, failed
    return statistics.median(samples[""])


def slowest(value: float) -> float:
    found = torch.tensor(value, dtype=torch.float64)
    dist.all_reduce(found, dist.ReduceOp.MAX)
    return found.item()


def table(results: list[dict], world: int) -> Table:
    shown = Table("M", f"{world} processes", "ms", "of whole", show_edge=False, pad_edge=False)
    for row in results:
        whole = next(other["ms"] for other in results if other["rows"] == row["rows"] and other["way"] == "whole")
        shown.add_row(str(row["rows"]), row["way"], f"{row['ms']:.3f}", f"{row['ms'] / whole:.2f}")
    return shown


if __name__ == "__main__":
    main()
