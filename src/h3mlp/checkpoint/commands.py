"""The commands for checkpoints: convert, inspect, verify."""

import errno
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import click
from rich.progress import BarColumn, TimeRemainingColumn, TransferSpeedColumn

from .. import contract
from ..terminal import json_option, plot_option, progress, show

CHECKPOINT = click.Path(path_type=Path)


@contextmanager
def _refusals(if_disk_is_full: str = "") -> Iterator[None]:
    """What is wrong with the files given is an error of the arguments: one line, exit code 2."""
    try:
        yield
    except (ValueError, OSError) as error:
        full = isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT)
        raise click.ClickException(str(error) + (if_disk_is_full if full else "")) from None


_gate_order_option = click.option(
    "--gate-order",
    type=click.Choice(contract.GATE_ORDER),
    help="Which half of FC1 comes first in SRC.  [default: as the names say]",
)


def _loras(files: tuple[Path, ...], scales: tuple[float, ...]) -> list[tuple[Path, float]]:
    if scales and len(scales) != len(files):
        raise click.UsageError(
            f"--lora-scale must be given for each --lora or for none; {len(scales)} for {len(files)}."
        )
    return list(zip(files, scales or [1.0] * len(files), strict=True))


def _lora_options(command):
    scale = click.option(
        "--lora-scale",
        "lora_scales",
        type=float,
        multiple=True,
        metavar="S",
        help="A factor, for each --lora.  [default: 1]",
    )
    file = click.option(
        "--lora",
        "lora_files",
        type=CHECKPOINT,
        multiple=True,
        metavar="FILE",
        help="Merge the part of this adapter that is on FC1.",
    )
    return file(scale(command))


@click.command(short_help="Prepare the FC1 weights of a checkpoint.")
@click.argument("source", metavar="SRC", type=CHECKPOINT)
@click.argument("destination", metavar="DST", type=CHECKPOINT)
@_gate_order_option
@_lora_options
@click.option("--all", "copy_others", is_flag=True, help="Copy all other tensors too.")
@click.option("--resume", is_flag=True, help="Go on with what an interrupted run has left.")
@click.option("--hash/--no-hash", "hashes", default=True, help="Note the SHA-256 of SRC's files.  [default: yes]")
@json_option
def convert(
    source: Path,
    destination: Path,
    gate_order: str | None,
    lora_files: tuple[Path, ...],
    lora_scales: tuple[float, ...],
    copy_others: bool,
    resume: bool,
    hashes: bool,
    as_json: bool,
) -> None:
    """Prepare the FC1 weights of a MiniMax-H3 checkpoint for the FP8 operator. Needs no GPU and 0.5 GB of memory.

    SRC is a safetensors file, an index.json or a folder of them, of MiniMax or diffusers, in BF16, FP16, FP32 or FP8.
    DST is a file that ends in .safetensors, or a folder, in which files are split at 5 GB. It appears when it is
    complete.
    """
    from . import convert as job

    bar = progress(BarColumn(), TransferSpeedColumn(), TimeRemainingColumn())
    with _refusals("; --resume goes on with what was finished"), bar as show_step:
        report = job.run(
            source,
            destination,
            gate_order=gate_order,
            loras=_loras(lora_files, lora_scales),
            copy_others=copy_others,
            resume=resume,
            hashes=hashes,
            progress=show_step,
        )
    show(report.as_json() if as_json else job.render(report))


@click.command(short_help="Show what a checkpoint is, layer by layer.")
@click.argument("path", metavar="FILE", type=CHECKPOINT)
@_gate_order_option
@json_option
def inspect(path: Path, gate_order: str | None, as_json: bool) -> None:
    """Show what a MiniMax-H3 checkpoint is, prepared or not, with a line for each FC1 layer. Reads no weights."""
    from . import inspect as job

    with _refusals():
        found = job.run(path, gate_order)
    show(found.as_json() if as_json else job.render(found))


@click.command(short_help="Compare a prepared checkpoint with its source.")
@click.argument("path", metavar="DST", type=CHECKPOINT)
@click.option("--against", required=True, metavar="SRC", type=CHECKPOINT, help="What it was made of.")
@click.option("--rows", type=click.IntRange(1, 4096), default=64, show_default=True, help="Rows of x.")
@_gate_order_option
@_lora_options
@json_option
@plot_option("the SNR by layer")
def verify(
    path: Path,
    against: Path,
    rows: int,
    gate_order: str | None,
    lora_files: tuple[Path, ...],
    lora_scales: tuple[float, ...],
    as_json: bool,
    plot: Path | None,
) -> int:
    """Compare every weight of a prepared checkpoint with its source's, and the operator's output with the BF16 layer's.

    Exit code 1 when a layer is off.
    """
    from . import verify as job

    loras = _loras(lora_files, lora_scales)
    with _refusals(), progress(BarColumn(), TimeRemainingColumn()) as show_step:
        verified = job.run(path, against, rows, gate_order=gate_order, loras=loras, progress=show_step)
    if plot:
        job.plot(verified, plot)
    show(verified.as_json() if as_json else job.render(verified))
    if plot and not as_json:
        click.echo(f"SNR by layer: {plot}")
    return 0 if verified.ok else 1


ALL = (convert, inspect, verify)
