"""A run: for each number of rows make the peers, check them against the reference, and time them side by side."""

import contextlib
import datetime
import statistics
import subprocess
from collections.abc import Callable, Sequence
from dataclasses import asdict, replace

import torch

from ... import contract
from ...operators import dispatch
from .. import doctor
from ..warmup import warmup
from . import mlp_peers, peers
from .energy import uuid_of
from .peers import Peer
from .record import Alone, Record, Result, Times
from .timing import (
    CudaTimer,
    HostTimer,
    Plan,
    Timer,
    alone,
    burst,
    copy_bandwidth,
    describe,
    host_seconds,
    interleave,
)

SAMPLE_ROWS = 64

PEERS = {"fc1": peers, "mlp": mlp_peers}
"""By operator."""

CPU_PLAN = Plan(seconds=0.0, rounds=7, warm_rounds=1, pause=0.0, alone=0.0)
"""No power limit to reach on a CPU, and no burst before it; a round of 1024 rows takes 6 s on two cores."""

ROWS_ON_CPU = (1, 16, 256, 1024)
ROWS_ON_CUDA = (1, 16, 64, 256, 1024, 4184, 16736, 33472)
"""33472 is a 768p clip of 4 s on one GPU, 16736 and 4184 the same on 2 and on 8."""

Progress = Callable[[str, float], None]
"""Told the step that begins and the share of the run that is done."""


def quiet(_step: str, _share: float) -> None:
    pass


def run(
    rows: Sequence[int] | None = None,
    *,
    seconds: float | None = None,
    rounds: int | None = None,
    bf16: bool = False,
    operator: str = "fc1",
    runs: bool = True,
    seed: int = 0,
    hidden: int = contract.HIDDEN,
    ffn: int = contract.FFN,
    device: torch.device | None = None,
    timer: Timer | None = None,
    progress: Progress = quiet,
) -> Record:
    """Benchmark an operator on ``device`` (the best one unless given) at each of these numbers of rows. ``runs``:
    indices as a model's, constant over long runs of rows; otherwise random."""
    device = device or dispatch.best()[0]
    backend = dispatch.select(device)
    norm_quant, peer_set = peers.stage1_of(backend), PEERS[operator]
    on_cuda = device.type == "cuda"
    timer = timer or device_timer(device)
    plan = Plan() if on_cuda else CPU_PLAN
    given = {"seconds": seconds, "rounds": rounds}
    plan = replace(plan, **{name: value for name, value in given.items() if value is not None})
    rows = tuple(rows or (ROWS_ON_CUDA if on_cuda else ROWS_ON_CPU))

    with current(device):
        if on_cuda:
            progress("warm up", 0.0)
            warmup(device, rows, hidden=hidden, ffn=ffn, operators=[operator])
        progress("make layer", 0.0)
        whole = peer_set.Problem.make(max(rows), hidden, ffn, seed, device)
        copy_gb_s = copy_bandwidth(device, timer, 2**30 if on_cuda else 2**26) / 1e9
        results, described = [], {}
        for i, count in enumerate(rows):

            def part(step: str, share: float, i: int = i, count: int = count) -> None:
                progress(f"{count:,} rows: {step}", (i + share) / len(rows))

            problem = whole.first(count, runs)
            if on_cuda:
                torch.compiler.reset()  # torch compiles one function for at most eight shapes
                measured = peer_set.on_cuda(problem, norm_quant, bf16)
            else:
                measured = peer_set.on_cpu(problem, norm_quant, bf16)
            described |= {peer.name: peer.what for peer in measured}
            results += measure(problem, measured, timer, plan, part)
            del problem, measured
            if on_cuda:
                torch.cuda.empty_cache()
        # Last, when no process of torch.compile competes for the CPU: beside them a call took twice as long.
        host_us = _host_us(peer_set.ours(whole.first(1, runs)).call, timer) if on_cuda else None
    return Record(
        date=datetime.date.today().isoformat(),
        environment=doctor.environment(),
        device={"device": str(device), "backend": backend.NAME, "serves": backend.serves(device)[1]}
        | (gpu(device) if on_cuda else {}),
        settings={**asdict(plan), "rows": list(rows), "seed": seed, "index": "runs" if runs else "random"},
        hidden=hidden,
        ffn=ffn,
        copy_gb_s=copy_gb_s,
        host_us=host_us,
        peers=described,
        results=results,
        operator=operator,
    )


def current(device: torch.device) -> contextlib.AbstractContextManager:
    """Make this the current device, on whose stream a ``CudaTimer`` records."""
    return torch.cuda.device(device) if device.type == "cuda" else contextlib.nullcontext()


def device_timer(device: torch.device) -> Timer:
    """The timer for calls on this device."""
    return CudaTimer() if device.type == "cuda" else HostTimer()


def measure(
    problem: peers.Problem | mlp_peers.Problem,
    peers: Sequence[Peer],
    timer: Timer,
    plan: Plan,
    progress: Progress = quiet,
) -> list[Result]:
    """Check and time these peers on one problem. A peer that raises, or finds no memory, is a result that says so."""
    rows = problem.shape[0]
    sample = sample_rows(rows).to(problem.device)
    progress("reference", 0.0)
    judge = problem.judge(sample)
    runs, errors, bursts, skipped = {}, {}, {}, {}
    for i, peer in enumerate(peers):
        progress(f"first call of {peer.name}", 0.2 * i / len(peers))
        try:
            got = peer.call()
            errors[peer.name] = judge(peer.output, got[sample]) if peer.output else None
            del got
            runs[peer.name] = timer.prepare(peer.call, rows)
            bursts[peer.name] = burst(runs[peer.name], timer, plan)
        except (RuntimeError, ValueError) as error:
            runs.pop(peer.name, None)
            skipped[peer.name] = describe(error)
            if isinstance(error, torch.OutOfMemoryError):
                torch.cuda.empty_cache()
    then_alone = plan.alone > 0 and rows >= plan.alone_rows
    width = 0.5 if then_alone else 0.8
    samples, failed = interleave(runs, timer, plan, lambda share: progress("side by side", 0.2 + width * share))
    skipped |= failed
    times = {name: times_of(seconds, bursts[name]) for name, seconds in samples.items() if seconds}
    by_itself = {}
    if then_alone:
        for i, (name, found) in enumerate(times.items()):
            progress(f"{name} alone", 0.7 + 0.3 * i / len(times))
            seconds, joules = alone(runs[name], found.median_us / 1e6, timer, plan)
            by_itself[name] = Alone(1e6 * seconds, joules)
    return [
        Result.of(rows, peer, *(kept.get(peer.name) for kept in (times, errors, skipped, by_itself))) for peer in peers
    ]


def sample_rows(rows: int) -> torch.Tensor:
    """Up to 64 random row numbers, ascending."""
    generator = torch.Generator("cpu").manual_seed(0)
    return torch.randperm(rows, dtype=torch.long, device="cpu", generator=generator)[:SAMPLE_ROWS].sort().values


def times_of(seconds: Sequence[float], burst_seconds: float | None) -> Times:
    us = sorted(1e6 * value for value in seconds)
    lower, median, upper = statistics.quantiles(us, n=4, method="inclusive") if len(us) > 1 else us * 3
    return Times(len(us), median, lower, upper, None if burst_seconds is None else 1e6 * burst_seconds)


def _host_us(call: Callable[[], torch.Tensor], timer: Timer) -> float | None:
    """Host time of a call at one row, into buffers; None where the operator does not run."""
    try:
        call()
        return 1e6 * host_seconds(call, timer)
    except (RuntimeError, ValueError):
        return None


def gpu(device: torch.device) -> dict:
    """Name, driver, power limit and greatest clock, as nvidia-smi tells; what it does not tell is left out."""
    properties = torch.cuda.get_device_properties(device)
    found = {
        "name": properties.name,
        "capability": f"{properties.major}.{properties.minor}",
        "multiprocessors": properties.multi_processor_count,
    }
    fields = {"driver": "driver_version", "power_limit_w": "power.limit", "max_sm_clock_mhz": "clocks.max.sm"}
    try:
        command = ["nvidia-smi", f"--query-gpu={','.join(fields.values())}", f"--id=GPU-{uuid_of(device)}"]
        command.append("--format=csv,noheader,nounits")
        done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=30)
    except (OSError, subprocess.SubprocessError, AttributeError):  # not installed, not permitted, an older torch
        return found
    told = dict(zip(fields, (value.strip() for value in done.stdout.split(",")), strict=False))
    for name in ("power_limit_w", "max_sm_clock_mhz"):
        with contextlib.suppress(KeyError, ValueError):
            told[name] = float(told[name])
    return found | told
