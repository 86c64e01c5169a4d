"""Timing of peers side by side, and results as JSON."""

import datetime
import json
import statistics
import time
from collections.abc import Callable, Iterable
from pathlib import Path

from h3mlp import doctor

RESULTS = Path(__file__).parent / "results"


def interleave(calls: dict[str, Callable[[], object]], rounds: int) -> dict[str, list[float]]:
    """Seconds of each call in each round, after one round to warm up. Every round runs every call, so that a machine
    that slows down slows all of them."""
    seconds: dict[str, list[float]] = {name: [] for name in calls}
    for measured in [False] + [True] * rounds:
        for name, call in calls.items():
            start = time.perf_counter()
            call()
            if measured:
                seconds[name].append(time.perf_counter() - start)
    return seconds


def summary(seconds: Iterable[float]) -> dict[str, float]:
    """Median, least and greatest, in milliseconds."""
    ms = sorted(1e3 * s for s in seconds)
    return {"median_ms": statistics.median(ms), "min_ms": ms[0], "max_ms": ms[-1]}


def save(name: str, settings: dict, results: list[dict]) -> Path:
    """Write ``results/DATE-NAME.json`` with the environment it was measured in."""
    today = datetime.date.today().isoformat()
    path = RESULTS / f"{today}-{name}.json"
    record = {"date": today, "environment": doctor.environment(), "settings": settings, "results": results}
    path.parent.mkdir(exist_ok=True)
    partial = path.with_suffix(".partial")
    partial.write_text(json.dumps(record, indent=2) + "\n", encoding="utf-8")
    partial.replace(path)
    return path
