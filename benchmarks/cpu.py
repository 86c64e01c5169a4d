"""The CPU backend beside its peers, at the real size of the layer: ``make bench ARGS='--rows 256'``.

Peers: the eager chain of the same arithmetic (dequantize all, matmul, silu * up), which is what a user would write; and
the BF16 layer that the operator replaces, whose output is another one and so is not compared.
"""

from dataclasses import asdict

import click
import torch
import torch.nn.functional as F
from rich.console import Console
from rich.progress import Progress
from rich.table import Table

from benchmarks.harness import interleave, save, summary
from h3mlp import (
    contract,
    minimax_h3_fc1_swiglu_fp8,
    prepare_minimax_h3_fc1_weight_fp8,
    reference,
    synthetic,
    unpack_fc1_rows,
)
from h3mlp.accuracy import compare, spread

OURS, CHAIN, BF16 = "h3mlp", "eager FP32 chain", "BF16 layer"
SAMPLE_ROWS = 16


def eager_chain(layer: synthetic.Layer, weight_q: torch.Tensor, weight_scale: torch.Tensor) -> torch.Tensor:
    """The operator as a plain chain of torch calls on weights in their natural row order."""
    stage1 = reference.norm_quant(*layer.activations)
    acc = stage1.a_q.float() @ weight_q.float().T
    gate, up = reference.dequantize(acc, stage1.s_row, weight_scale).chunk(2, dim=-1)
    return F.silu(gate) * up


def measure(layer: synthetic.Layer, weight: tuple[torch.Tensor, torch.Tensor], rounds: int) -> list[dict]:
    """One result a peer: times, rate, ratio to ours, and error against the FP64 reference on a sample of rows."""
    natural = tuple(unpack_fc1_rows(part) for part in weight)
    calls = {
        OURS: lambda: minimax_h3_fc1_swiglu_fp8(*layer.activations, *weight),
        CHAIN: lambda: eager_chain(layer, *natural),
        BF16: layer.forward_bf16,
    }
    rows = layer.x.shape[0]
    sample = spread(rows, SAMPLE_ROWS)
    exact = reference.fc1_swiglu_fp8(*layer.rows(sample).activations, *weight)
    results = []
    for name, seconds in interleave(calls, rounds).items():
        times = summary(seconds)
        flops = 2 * rows * contract.HIDDEN * contract.FC1_ROWS
        results.append(
            {
                "rows": rows,
                "peer": name,
                **times,
                "gflops": flops / times["median_ms"] / 1e6,
                "against_fp64": None if name == BF16 else asdict(compare(calls[name]()[sample], exact)),
            }
        )
    ours = results[0]["median_ms"]
    return [{**result, "h3mlp_over_peer": ours / result["median_ms"]} for result in results]


@click.command()
@click.option("--rows", multiple=True, type=click.IntRange(1), default=(1, 16, 256, 1024), show_default=True)
@click.option("--rounds", type=click.IntRange(1), default=7, show_default=True)
@click.option("--save/--no-save", "keep", default=False, help="Write benchmarks/results/DATE-cpu.json.")
def main(rows: tuple[int, ...], rounds: int, keep: bool) -> None:
    """Time the CPU backend and its peers, interleaved."""
    results = []
    with Progress(console=Console(stderr=True), transient=True) as progress:
        whole = synthetic.layer(max(rows))
        weight = prepare_minimax_h3_fc1_weight_fp8(whole.weight)
        for count in progress.track(rows, description="rows"):
            results += measure(whole.rows(torch.arange(count)), weight, rounds)
    table = Table("rows", "peer", "ms", "GFLOPS", "h3mlp / peer", "equal to FP64")
    for r in results:
        ratio = f"{r['h3mlp_over_peer']:.2f}"
        table.add_row(
            str(r["rows"]),
            r["peer"],
            f"{r['median_ms']:.1f}",
            f"{r['gflops']:.1f}",
            ratio,
            f"{r['against_fp64']['equal_share']:.3%}" if r["against_fp64"] else "",
        )
    Console().print(table)
    if keep:
        click.echo(save("cpu", {"rounds": rounds}, results))


if __name__ == "__main__":
    main()
