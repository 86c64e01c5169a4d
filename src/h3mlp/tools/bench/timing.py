"""Timing of calls side by side on one device.

A CUDA device that multiplies is power-bound: an H200 at 700 W runs the FC1 GEMM of 33472 rows in 6.4 ms when cold and
in 7.6 to 8.1 ms when hot. So peers are compared hot, interleaved in one run, and the cold time is given as burst. What
is interleaved shares one clock, though; a large problem's peers also run each alone, back to back, at the clock and the
energy that are their own.
"""

import math
import random
import time
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import torch

from . import energy

GRAPH_ROWS = 2048
"""Up to this many rows a call is timed inside a CUDA graph: reading the weight takes 36 us at 4.2 TB/s, and launching
the ten kernels of an eager chain takes longer than that."""

GRAPH_CALLS = 10
"""Calls in one graph: the few microseconds between the events and the graph's kernels count a tenth."""


class Run(NamedTuple):
    """Something to time: ``call`` makes ``calls`` calls of a peer."""

    call: Callable[[], object]
    calls: int = 1


class Timer(Protocol):
    """Times runs on one device. ``ahead`` rounds are queued beyond the one that is read. ``prepare`` is given a call
    that was made before, so that nothing is compiled in it."""

    ahead: int

    def prepare(self, call: Callable[[], object], rows: int) -> Run: ...
    def launch(self, run: Run) -> Callable[[], float]: ...
    def synchronize(self) -> None: ...
    def now(self) -> float: ...
    def joules(self) -> float | None: ...
    def sleep(self, seconds: float) -> None: ...


class HostTimer:
    """Wall clock, for calls that return when their work is done."""

    ahead = 0

    def prepare(self, call: Callable[[], object], rows: int) -> Run:  # noqa: ARG002
        return Run(call)

    def launch(self, run: Run) -> Callable[[], float]:
        """Make the run and return what tells its seconds a call."""
        start = self.now()
        run.call()
        seconds = (self.now() - start) / run.calls
        return lambda: seconds

    def synchronize(self) -> None:
        pass

    def now(self) -> float:
        return time.perf_counter()

    def joules(self) -> float | None:
        """What the device has used since some moment, if it tells."""
        return None

    def sleep(self, seconds: float) -> None:
        time.sleep(seconds)


class CudaTimer(HostTimer):
    """CUDA events on the current stream of the current device."""

    ahead = 1

    def prepare(self, call: Callable[[], object], rows: int) -> Run:
        """Capture in a graph where rows are few.

        Nothing is flushed between calls: the 154 MB of FP8 weight exceed the L2 (60 MB on an H200), and each call
        sweeps them from the start. Only stage 1 alone, which reads no weight, finds few rows in the L2.
        """
        if rows > GRAPH_ROWS:
            return super().prepare(call, rows)
        stream = torch.cuda.Stream()  # torch asks for warm-up calls on another stream before a capture
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            for _ in range(3):
                call()
        torch.cuda.current_stream().wait_stream(stream)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            for _ in range(GRAPH_CALLS):
                call()
        return Run(graph.replay, GRAPH_CALLS)

    def launch(self, run: Run) -> Callable[[], float]:
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        begin.record()
        run.call()
        end.record()

        def seconds() -> float:
            end.synchronize()
            return begin.elapsed_time(end) / 1e3 / run.calls

        return seconds

    def synchronize(self) -> None:
        torch.cuda.synchronize()

    def joules(self) -> float | None:
        return energy.joules(torch.device("cuda", torch.cuda.current_device()))


@dataclass(frozen=True)
class Plan:
    """How long to time one number of rows.

    Attributes:
        seconds: time for the hot rounds, warm-up included.
        rounds: measured rounds at least, however long they take.
        warm_rounds: rounds before the first that counts, at least.
        warm_share: share of ``seconds`` to warm up: the power limit bites after some hundred milliseconds.
        pause: idle seconds before a burst; 0 for no burst.
        burst_runs: runs of a burst, of which the best counts.
        alone: seconds that each peer runs by itself, half as long before it counts; 0 for not at all.
        alone_rows: from so many rows on. Fewer do not reach the power limit.
    """

    seconds: float = 10.0
    rounds: int = 20
    warm_rounds: int = 3
    warm_share: float = 0.2
    pause: float = 0.3
    burst_runs: int = 5
    alone: float = 2.0
    alone_rows: int = 4096


def burst(run: Run, timer: Timer, plan: Plan) -> float | None:
    """Seconds of the best of the first runs after a pause, on a device that has cooled and clocked up."""
    if not plan.pause:
        return None
    timer.synchronize()
    timer.sleep(plan.pause)
    return min(seconds() for seconds in [timer.launch(run) for _ in range(plan.burst_runs)])


def rounds(runs: dict[str, Run], timer: Timer, failed: dict[str, str]) -> Iterator[dict[str, float]]:
    """Endless rounds of every run once, as seconds by name. A run that raises is noted in ``failed`` and left out.

    The order is shuffled in each round: a power limit acts on average, so a run that always came after a light one
    would gain from it. A round is read after the next one is queued: the device never waits for the host.
    """
    order = random.Random(0)
    queue: deque[dict[str, Callable[[], float]]] = deque()
    while names := [name for name in runs if name not in failed]:
        order.shuffle(names)
        queued = {}
        for name in names:
            try:
                queued[name] = timer.launch(runs[name])
            except RuntimeError as error:
                failed[name] = describe(error)
        queue.append(queued)
        if len(queue) > timer.ahead:
            yield {name: seconds() for name, seconds in queue.popleft().items()}


def interleave(
    runs: dict[str, Run], timer: Timer, plan: Plan, progress: Callable[[float], None] = lambda _: None
) -> tuple[dict[str, list[float]], dict[str, str]]:
    """Hot seconds of each run in each measured round, and why a run failed. ``progress`` is told the share done."""
    samples: dict[str, list[float]] = {name: [] for name in runs}
    failed: dict[str, str] = {}
    start, measured = timer.now(), 0
    for count, seconds in enumerate(rounds(runs, timer, failed)):
        elapsed = timer.now() - start
        if count >= plan.warm_rounds and elapsed >= plan.warm_share * plan.seconds:
            measured += 1
            for name, value in seconds.items():
                samples[name].append(value)
        progress(min(elapsed / plan.seconds if plan.seconds else 1.0, measured / plan.rounds, 1.0))
        if measured >= plan.rounds and elapsed >= plan.seconds:
            break
    timer.synchronize()
    return {name: values for name, values in samples.items() if name not in failed}, failed


class Alone(NamedTuple):
    """A call among many of its kind, back to back: seconds, and joules where the device tells."""

    seconds: float
    joules: float | None


def alone(run: Run, seconds_each: float, timer: Timer, plan: Plan) -> Alone:
    """Time runs back to back, ``seconds_each`` of a call being known."""
    runs = max(1, math.ceil(plan.alone / (seconds_each * run.calls)))
    for count in (-(-runs // 2), runs):  # the first to warm up
        start, before = timer.now(), timer.joules()
        for _ in range(count):
            timer.launch(run)
        timer.synchronize()
        seconds, after = timer.now() - start, timer.joules()
    calls = runs * run.calls
    used = None if before is None or after is None else (after - before) / calls
    return Alone(seconds / calls, used)


def host_seconds(call: Callable[[], object], timer: Timer, calls: int = 200, batches: int = 5) -> float:
    """Seconds that the host takes to enqueue a call, best of several batches.

    200 calls of two kernels fit in the device's queue of 1024 launches, so that the host never waits for it.
    """
    best = float("inf")
    for _ in range(batches):
        timer.synchronize()
        start = timer.now()
        for _ in range(calls):
            call()
        best = min(best, (timer.now() - start) / calls)
    timer.synchronize()
    return best


def copy_bandwidth(device: torch.device, timer: Timer, size: int) -> float:
    """Bytes a second of a copy of ``size`` bytes on the device, read and written, best of 10."""
    source = torch.zeros(size, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    run = Run(lambda: target.copy_(source))
    run.call()
    return 2 * size / min(seconds() for seconds in [timer.launch(run) for _ in range(10)])


def describe(error: Exception) -> str:
    """The error in one line."""
    if isinstance(error, torch.OutOfMemoryError):
        return "out of device memory"
    first = next((line.strip() for line in str(error).splitlines() if line.strip()), "")
    return f"{type(error).__name__}: {first}"[:200]
