"""The operator beside the chain that it replaces, in seconds: what the demo shows on a GPU."""

from collections.abc import Callable, Sequence

import torch
from rich.table import Table

from ... import synthetic
from ...weights import unpack_fc1_rows
from .harness import current, device_timer, measure
from .peers import CHAIN, CHAIN_EAGER, OURS, Compile, Problem, on_cuda
from .record import Result
from .timing import Plan, Timer

PLAN = Plan(seconds=2.0, alone=0.0)


def measure_chains(
    layer: synthetic.Layer,
    packed: tuple[torch.Tensor, torch.Tensor],
    timer: Timer | None = None,
    compiled: Compile | None = None,
    plan: Plan = PLAN,
    announce: Callable[[str], None] = lambda _: None,
) -> tuple[Result, ...]:
    """The operator and the chains of torch calls, timed side by side and checked against FP64."""
    problem = Problem(layer, packed, tuple(unpack_fc1_rows(part) for part in packed))
    wanted = (OURS, CHAIN, CHAIN_EAGER)
    peers = [peer for peer in on_cuda(problem, compiled=compiled) if peer.name in wanted]
    device = layer.x.device
    with current(device):
        return tuple(measure(problem, peers, timer or device_timer(device), plan, lambda step, _: announce(step)))


def render(results: Sequence[Result]) -> Table:
    """One line a peer. A peer that could not run says why."""
    table = Table("Side by side, hot", show_edge=False, pad_edge=False)
    for column in ("ms", "TFLOPS", "over h3mlp", "RMS to FP64"):
        table.add_column(column, justify="right")
    ours = next((r.times.median_us for r in results if r.peer == OURS and r.times), None)
    for result in results:
        if not result.times:
            table.add_row(f"{result.peer}: {result.skipped}")
            continue
        us, error = result.times.median_us, result.error
        table.add_row(
            result.peer,
            f"{us / 1e3:,.3f}",
            f"{result.flops / us / 1e6:,.1f}",
            f"{us / ours:.2f}" if ours else "",
            f"{error.relative_rms:.2e}" if error and error.relative_rms is not None else "",
        )
    return table
