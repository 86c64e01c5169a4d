"""``h3mlp kernels``: compile every GPU kernel, without a GPU, and show what the machine code needs and uses."""

import multiprocessing
import os
from collections.abc import Callable, Iterable
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict
from itertools import groupby
from operator import attrgetter

from rich.console import Group
from rich.table import Table

from ..backends import cute
from ..backends.cute import jit, sass

PROCESSES = min(os.cpu_count() or 1, 8)
"""That compile at once, of 0.5 GB each. Compiling holds the interpreter, so that threads would gain nothing."""


def run(architectures: Iterable[str], on_step: Callable[[str], object]) -> list[sass.Report]:
    """Compile every variant for each of the architectures; ``on_step`` is told which one is waited for.

    Raises:
        ImportError: the CuTe DSL is not installed.
        RuntimeError: a kernel does not compile, or there is no nvdisasm.
    """
    wanted = [(kernel, arch) for arch in architectures for kernel in cute.kernels(arch)]
    reports = []
    pool = ProcessPoolExecutor(PROCESSES, multiprocessing.get_context("spawn"))
    try:
        pending = [pool.submit(jit.inspect, kernel, arch) for kernel, arch in wanted]
        for (kernel, arch), report in zip(wanted, pending, strict=True):
            on_step(f"{kernel.name} for {arch}")
            reports.append(report.result())
    finally:
        pool.shutdown(cancel_futures=True)
    return reports


def as_json(reports: list[sass.Report]) -> dict:
    """The reports as plain values, and whether all is well."""
    return {"kernels": [asdict(report) for report in reports], "ok": not faults(reports)}


def render(reports: list[sass.Report]) -> Group:
    """The reports as tables for a terminal, one for each architecture; memory in bytes."""
    return Group(*(_table(arch, list(found)) for arch, found in groupby(reports, key=attrgetter("arch"))))


def _table(arch: str, reports: list[sass.Report]) -> Table:
    used = [name for name in sass.TENSOR_CORE if any(report.instructions[name] for report in reports)]
    table = Table(show_edge=False, pad_edge=False)
    table.add_column(f"Kernels for {arch}", overflow="fold")
    for column in ("Regs", "Local", "Shared", *used):
        table.add_column(column, justify="right", no_wrap=True)
    for report in reports:
        counts = (f"{report.instructions[name]:,}" if report.instructions[name] else "" for name in used)
        needs = (report.registers, report.local_bytes, report.shared_bytes)
        table.add_row(report.kernel, *(f"{n:,}" for n in needs), *counts)
    return table


def faults(reports: list[sass.Report]) -> list[str]:
    """Which kernels keep registers in local memory, need more shared memory than there is, multiply with other
    instructions than they are written for, or wait behind every wgmma; empty when none does."""
    spills = [f"{r.kernel} for {r.arch} spills {r.local_bytes} bytes a thread" for r in reports if r.spills]
    serialized = [f"{r.kernel} for {r.arch} waits behind every wgmma" for r in reports if r.serialized]
    large = [f"{r.kernel} for {r.arch} needs {r.shared_bytes} bytes of shared memory" for r in reports if not r.fits]
    others = [
        f"{r.kernel} for {r.arch} does not multiply with {r.multiplies_with} alone"
        for r in reports
        if r.multiplies_otherwise
    ]
    return [*spills, *large, *others, *serialized]
