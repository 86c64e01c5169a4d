"""The result of a run, and its JSON file."""

import json
from dataclasses import asdict, dataclass
from pathlib import Path

from ...files import whole
from . import work
from .error import Error
from .peers import OURS, Peer

SCHEMA = 1

VIOLATIONS_ALLOWED = 4
"""Elements out of tolerance among the sampled ones, a million at most. The specified operator's own test allows 0.2 in
a million, and exact FP32 accumulation has none. Hopper's tensor cores miss that: with h of RMS 1.5, as in that test,
2.0 to 2.3 in a million were out with promotion every 256 of K (H200), where h_up is large and the gate negative, so
that one BF16 step of the gate is up to 3% of y."""

COMPUTE_ROWS = 1024
"""From here on multiplying takes longer than reading the weight, on every device: at 1600 TFLOPS and 4.2 TB/s from 190
rows on."""


@dataclass(frozen=True)
class Times:
    """Microseconds of a call: hot and interleaved (median and quartiles of ``rounds``), and the best of a burst."""

    rounds: int
    median_us: float
    lower_us: float
    upper_us: float
    burst_us: float | None


@dataclass(frozen=True)
class Alone:
    """Microseconds and joules of a call when the peer runs by itself, back to back."""

    us: float
    joules: float | None

    @property
    def watts(self) -> float | None:
        return None if self.joules is None else 1e6 * self.joules / self.us


@dataclass(frozen=True)
class Result:
    """One peer at one number of rows. ``skipped`` says why there are no times."""

    rows: int
    peer: str
    flops: int
    bytes: int
    times: Times | None
    error: Error | None
    skipped: str | None = None
    alone: Alone | None = None

    @classmethod
    def of(cls, rows: int, peer: Peer, *found) -> "Result":
        """``found``: the fields from ``times`` on."""
        return cls(rows, peer.name, peer.work.flops, peer.work.bytes, *found)


@dataclass(frozen=True)
class Record:
    """A whole run: where, how, and what came out. Bandwidth and rates in units of 10^9 a second."""

    date: str
    environment: dict
    device: dict
    settings: dict
    hidden: int
    ffn: int
    copy_gb_s: float
    host_us: float | None
    peers: dict[str, str]
    results: list[Result]
    operator: str = "fc1"
    """Of ``contract.OPERATORS``."""

    def as_json(self) -> dict:
        return {"schema": SCHEMA, **asdict(self)}

    @property
    def ok(self) -> bool:
        """Whether the operator was measured at every number of rows, and is within tolerance."""
        ours = [result for result in self.results if result.peer == OURS]
        return bool(ours) and all(r.times and r.error and r.error.violations <= VIOLATIONS_ALLOWED for r in ours)

    @property
    def row_counts(self) -> list[int]:
        return sorted({result.rows for result in self.results})

    def at(self, rows: int) -> dict[str, Result]:
        """The results at this number of rows, by peer."""
        return {result.peer: result for result in self.results if result.rows == rows}

    @property
    def peak_gflops(self) -> float:
        """The highest rate that anything in the run reached, in a burst where there was one; 0 where no number of rows
        is large enough to tell."""
        timed = [(r.flops, r.times) for r in self.results if r.times and r.rows >= COMPUTE_ROWS]
        return max((flops / (times.burst_us or times.median_us) / 1e3 for flops, times in timed), default=0.0)

    def limit_us(self, rows: int) -> float:
        """Microseconds that a call takes at least: the longer of its minimal bytes at the copy bandwidth and its
        operations at the peak rate."""
        least = work.LIMITS[self.operator](rows, self.hidden, self.ffn)
        moving = least.bytes / self.copy_gb_s / 1e3
        return max(moving, least.flops / self.peak_gflops / 1e3) if self.peak_gflops else moving


def save(record: Record, path: Path) -> None:
    """Write the record as JSON. The file appears whole or not at all."""
    text = json.dumps(record.as_json(), indent=2, allow_nan=False)
    with whole(path) as partial:
        partial.write_text(text + "\n", encoding="utf-8")


def load(path: Path) -> Record:
    """Read what ``save`` wrote.

    Raises:
        ValueError: the file holds something else.
    """
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
        if content.pop("schema", None) != SCHEMA:
            raise ValueError(f"no record of schema {SCHEMA}")
        content["results"] = [_result(entry) for entry in content["results"]]
        return Record(**content)
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        raise ValueError(f"{str(path)!r} is not what h3mlp bench --json-out writes ({error})") from error


def _result(entry: dict) -> Result:
    parts = {"times": Times, "error": Error, "alone": Alone}
    return Result(**{name: parts[name](**v) if name in parts and v else v for name, v in entry.items()})
