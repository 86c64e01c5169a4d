"""Time `h3mlp convert` beside the least that it could take: cp of the same bytes, then the bare quantization.

Three things in turn, on a synthetic checkpoint of real-size layers whose pages are in memory: cp of the checkpoint,
``prepare_fc1_weight_fp8`` of weights in memory, and the conversion, with and without the SHA-256 of the source. The
conversion has its file on the disk at the end; cp does not, so that its time with sync is given too.
"""

import datetime
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import click
import torch
from rich.console import Console
from rich.table import Table
from safetensors.torch import save_file

from h3mlp import contract, prepare_fc1_weight_fp8
from h3mlp.files import whole
from h3mlp.tools import doctor

FORMS = ("BF16", "E4M3 per channel")


def synthetic(form: str, layers: int, path: Path) -> None:
    """A checkpoint of diffusers with random weights."""
    generator = torch.Generator().manual_seed(0)
    tensors = {}
    for i in range(layers):
        shape, name = (contract.FC1_ROWS, contract.HIDDEN), f"transformer_blocks.{i}.ff.net.0.proj"
        weight = torch.empty(shape, dtype=torch.bfloat16).normal_(0, contract.HIDDEN**-0.5, generator=generator)
        if form == "BF16":
            tensors[f"{name}.weight"] = weight
        else:
            tensors[f"{name}.weight"] = (weight * 4096).to(contract.QUANTIZED)
            tensors[f"{name}.weight_scale"] = torch.full((contract.FC1_ROWS, 1), 2.0**-12)
        tensors[f"transformer_blocks.{i}.norm2.weight"] = torch.ones(contract.HIDDEN).bfloat16()
    save_file(tensors, path)


def seconds(call: Callable[[], object]) -> float:
    start = time.perf_counter()
    call()
    return time.perf_counter() - start


def convert(source: Path, destination: Path, *options: str) -> tuple[float, int]:
    """Its own seconds, without the start of Python, and the most memory in use, in bytes."""
    code = (
        "import json, sys; from pathlib import Path; from h3mlp.checkpoint import convert\\n"
        "report = convert.run(Path(sys.argv[1]), Path(sys.argv[2]), hashes='--no-hash' not in sys.argv)\\n"
        "peak = next(line.split()[1] for line in open('/proc/self/status') if line.startswith('VmHWM'))\\n"
        "print(json.dumps([report.seconds, 1024 * int(peak)]))"
    ).replace("\\n", "\n")
    command = [sys.executable, "-c", code, str(source), str(destination), *options]
    return tuple(json.loads(subprocess.run(command, check=True, capture_output=True, text=True).stdout))


@click.command(help=__doc__)
@click.option("--layers", default=6, show_default=True, help="Layers of the checkpoint, 0.3 GB each.")
@click.option("--rounds", default=5, show_default=True, help="Rounds of all three.")
@click.option(
    "--folder", type=click.Path(path_type=Path), help="On the disk to be measured.  [default: a temporary one]"
)
@click.option("--json-out", type=click.Path(dir_okay=False, path_type=Path), help="Write the result into FILE.")
def main(layers: int, rounds: int, folder: Path | None, json_out: Path | None) -> None:
    results = []
    for form in FORMS:
        with tempfile.TemporaryDirectory(dir=folder) as name:
            results.append(measure(form, layers, rounds, Path(name)))
    table = Table(show_edge=False, pad_edge=False)
    for title in ("Checkpoint", "GB", "cp", "cp, sync", "FP8", "convert", "ratio", "with SHA", "ratio", "MB"):
        table.add_column(title, justify="left" if title == "Checkpoint" else "right")
    for result in results:
        least = result["cp_s"] + result["arithmetic_s"]
        times = ("cp_s", "cp_and_sync_s", "arithmetic_s", "convert_s", "convert_with_hashes_s")
        cp, synced, arithmetic, bare, hashed = (result[name] for name in times)
        numbers = (result["bytes"] / 1e9, cp, synced, arithmetic, bare, bare / least, hashed, hashed / least)
        table.add_row(result["form"], *(f"{number:.2f}" for number in numbers), f"{result['peak_bytes'] / 1e6:.0f}")
    Console().print(table)
    if json_out:
        content = {"date": datetime.date.today().isoformat(), "environment": doctor.environment(), "results": results}
        with whole(json_out) as partial:
            partial.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")


def measure(form: str, layers: int, rounds: int, folder: Path) -> dict:
    """Medians of the rounds, and all times."""
    source, destination = folder / "source.safetensors", folder / "prepared.safetensors"
    synthetic(form, layers, source)
    weight = torch.empty((contract.FC1_ROWS, contract.HIDDEN), dtype=torch.bfloat16).normal_(0, 0.01)
    times: dict[str, list[float]] = {
        "cp_s": [],
        "cp_and_sync_s": [],
        "arithmetic_s": [],
        "convert_s": [],
        "convert_with_hashes_s": [],
    }
    peak, copy = 0, folder / "copy.safetensors"
    for _ in range(rounds):
        times["cp_s"].append(seconds(lambda: subprocess.run(["cp", source, copy], check=True)))
        times["cp_and_sync_s"].append(times["cp_s"][-1] + seconds(os.sync))
        copy.unlink()
        os.sync()
        once = 0.0 if form != "BF16" else seconds(lambda: [prepare_fc1_weight_fp8(weight) for _ in range(layers)])
        times["arithmetic_s"].append(once)
        for name, options in (("convert_s", ("--no-hash",)), ("convert_with_hashes_s", ())):
            spent, memory = convert(source, destination, *options)
            times[name].append(spent)
            peak = max(peak, memory)
            destination.unlink()
            os.sync()
    medians = {name: statistics.median(values) for name, values in times.items()}
    return {
        "form": form,
        "layers": layers,
        "bytes": source.stat().st_size,
        "peak_bytes": peak,
        **medians,
        "rounds": times,
    }


if __name__ == "__main__":
    main()
