"""The commands for checkpoints: convert, inspect, verify."""

import errno
import functools
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import click
from rich.progress import BarColumn, TimeRemainingColumn, TransferSpeedColumn

from .. import contract
from ..checkpoint.lora import Adapter
from .terminal import FINITE, json_option, plot_option, progress, show


class CheckpointPath(click.Path):
    """A path; an empty one, as of a variable that is not set, would be the current folder."""

    def convert(self, value: object, parameter: click.Parameter | None, context: click.Context | None) -> Path:
        if value == "":
            self.fail("it is empty", parameter, context)
        return super().convert(value, parameter, context)


CHECKPOINT = CheckpointPath(path_type=Path)


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


def _loras(files: tuple[Path, ...], **options: tuple) -> list[Adapter]:
    """The adapters, with what was given for each of them."""
    for name, given in options.items():
        if given and len(given) != len(files):
            flag = f"--lora-{name.replace('_', '-')}"
            raise click.UsageError(f"{flag} must be given for each --lora or for none; {len(given)} for {len(files)}.")
    given = {name: values for name, values in options.items() if values}
    return [Adapter(file, **{name: values[i] for name, values in given.items()}) for i, file in enumerate(files)]


def _lora_options(command):
    """Collects the options of adapters into one argument, ``loras``."""

    @functools.wraps(command)
    def with_loras(*, lora_files, lora_scales, lora_alphas, lora_gate_orders, **others):
        loras = _loras(lora_files, scale=lora_scales, alpha=lora_alphas, gate_order=lora_gate_orders)
        return command(loras=loras, **others)

    for flag, name, kind, metavar, what in (
        (
            "--lora-gate-order",
            "lora_gate_orders",
            click.Choice(contract.GATE_ORDER),
            None,
            "Which half comes first in the adapter, for each --lora.  [default: as the adapter says]",
        ),
        (
            "--lora-alpha",
            "lora_alphas",
            FINITE,
            "A",
            "Its alpha, in its own units, for each --lora.  [default: as the adapter says, else its rank]",
        ),
        ("--lora-scale", "lora_scales", FINITE, "S", "A factor, for each --lora.  [default: 1]"),
        ("--lora", "lora_files", CHECKPOINT, "FILE", "Merge the part of this adapter that is on FC1."),
    ):
        with_loras = click.option(flag, name, type=kind, multiple=True, metavar=metavar, help=what)(with_loras)
    return with_loras


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
    loras: list[Adapter],
    copy_others: bool,
    resume: bool,
    hashes: bool,
    as_json: bool,
) -> None:
    """Prepare the FC1 weights of a MiniMax-H3 checkpoint for the FP8 operator. Needs no GPU and 0.5 GB of memory.

    SRC is a safetensors file, an index.json or a folder of them, of MiniMax or diffusers, in BF16, FP16, FP32 or FP8;
    or the name of a snapshot in Hugging Face's cache.

    DST is a file that ends in .safetensors, or a folder, new or not, into which files of at most 5 GB are put. It
    appears when it is complete. What an earlier conversion wrote there is replaced; nothing else ever is.
    """
    from ..checkpoint import convert as job
    from .checkpoint_views import report_table

    bar = progress(BarColumn(), TransferSpeedColumn(), TimeRemainingColumn())
    with _refusals("; --resume goes on with what was finished"), bar as show_step:
        report = job.run(
            source,
            destination,
            gate_order=gate_order,
            loras=loras,
            copy_others=copy_others,
            resume=resume,
            hashes=hashes,
            progress=show_step,
        )
    show(report.as_json() if as_json else report_table(report))


@click.command(short_help="Show what a checkpoint is, layer by layer.")
@click.argument("path", metavar="FILE", type=CHECKPOINT)
@_gate_order_option
@json_option
def inspect(path: Path, gate_order: str | None, as_json: bool) -> None:
    """Show what a MiniMax-H3 checkpoint is, prepared or not, with a line for each FC1 layer. Reads no weights."""
    from ..checkpoint import inspect as job
    from .checkpoint_views import inspected_table

    with _refusals():
        found = job.run(path, gate_order)
    show(found.as_json() if as_json else inspected_table(found))


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
    loras: list[Adapter],
    as_json: bool,
    plot: Path | None,
) -> int:
    """Compare every weight of a prepared checkpoint with its source's, and the operator's output with the BF16 layer's.

    Exit code 1 when a layer is off.
    """
    from ..checkpoint import verify as job
    from .checkpoint_views import plot_verified, verified_table

    with _refusals(), progress(BarColumn(), TimeRemainingColumn()) as show_step:
        verified = job.run(path, against, rows, gate_order=gate_order, loras=loras, progress=show_step)
    if plot:
        plot_verified(verified, plot)
    show(verified.as_json() if as_json else verified_table(verified))
    if plot and not as_json:
        click.echo(f"SNR by layer: {plot}")
    return 0 if verified.ok else 1


ALL = (convert, inspect, verify)
