"""The ``h3mlp`` command."""

import sys
from pathlib import Path

import click
from rich.progress import BarColumn

from .. import contract
from .._version import __version__
from . import checkpoint_commands
from .terminal import (
    Finite,
    complain,
    file_option,
    json_option,
    output_file,
    plot_option,
    progress,
    show,
    without_encoding_errors,
)


@click.group(context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100})
@click.version_option(__version__, prog_name="h3mlp")
def cli() -> None:
    """Fused FP8 operators for the MLP of the MiniMax-H3 video diffusion transformer."""


@cli.command(short_help="Run one real-size MLP half and check it.")
@click.option(
    "--rows", type=click.IntRange(1, contract.MAX_ROWS), help="Rows of x.  [default: 256 on the CPU, 4184 on a GPU]"
)
@click.option("--seed", type=click.IntRange(0, 2**63 - 1), default=0, show_default=True, help="Seed of all data.")
@json_option
@plot_option("the error histograms")
def demo(rows: int | None, seed: int, as_json: bool, plot: Path | None) -> int:
    """Run the MLP half of one real-size block, of synthetic weights, on the best device and show that it is right.

    Exit code 1 when it is not.
    """
    from . import demo as job

    with progress() as show_step:
        result = job.run(rows, seed, show_step)
        if plot:
            show_step(f"plot {plot}")
            job.plot(result, plot)
    show(result.as_json() if as_json else job.render(result))
    if plot and not as_json:
        click.echo(f"Error histograms: {plot}")
    return 0 if result.ok else 1


class RowCounts(click.ParamType):
    """Numbers of rows, separated by commas."""

    name = "rows"

    def convert(
        self, value: object, parameter: click.Parameter | None, context: click.Context | None
    ) -> tuple[int, ...]:
        if isinstance(value, tuple):
            return value
        one = click.IntRange(1, contract.MAX_ROWS)
        return tuple(sorted({one.convert(part, parameter, context) for part in str(value).split(",")}))


@cli.command(short_help="Time the operator beside its peers.")
@click.option("--rows", type=RowCounts(), metavar="N,N,...", help="Rows of x.  [default: from 1 to a 4 s clip's 33472]")
@click.option("--seconds", type=Finite(least=0), help="Time for each number of rows.  [default: 10 on a GPU]")
@click.option("--rounds", type=click.IntRange(1), help="Rounds at least.  [default: 20 on a GPU, 7 on the CPU]")
@click.option("--operator", type=click.Choice(contract.OPERATORS), help="FC1, or the whole half.  [default: fc1]")
@click.option(
    "--index", type=click.Choice(["runs", "random"]), help="AdaLN indices: as a model's or not.  [default: runs]"
)
@click.option("--bf16", is_flag=True, help="Time the same in BF16 too (of FC1 on a GPU the GEMM alone).")
@json_option
@file_option("--json-out", output_file, "Write the result into FILE.")
@click.option(
    "--from",
    "source",
    type=click.Path(exists=True, dir_okay=False, path_type=Path),
    metavar="FILE",
    help="Measure nothing: show and plot what --json-out wrote, on any machine.",
)
@plot_option("time over the limit")
def bench(
    rows: tuple[int, ...] | None,
    seconds: float | None,
    rounds: int | None,
    operator: str | None,
    index: str | None,
    bf16: bool,
    as_json: bool,
    json_out: Path | None,
    source: Path | None,
    plot: Path | None,
) -> int:
    """Time an operator beside the bare GEMMs and a chain of torch calls on the best device, side by side.

    Exit code 1 when the operator did not run, or when its result is wrong.
    """
    given = {"--rows": rows, "--seconds": seconds, "--rounds": rounds, "--operator": operator, "--index": index}
    given |= {"--bf16": bf16, "--json-out": json_out}
    if source and (useless := [name for name, value in given.items() if value not in (None, False)]):
        raise click.UsageError(f"{useless[0]} has no meaning with --from: nothing is measured then.")

    from . import bench as job

    if source:
        try:
            record = job.load(source)
        except ValueError as error:
            raise click.UsageError(f"--from: {error}") from None
    else:
        with progress(BarColumn()) as show_step:
            kind = {"operator": operator or "fc1", "runs": index != "random"}
            record = job.run(rows, seconds=seconds, rounds=rounds, bf16=bf16, progress=show_step, **kind)
    if json_out:
        job.save(record, json_out)
    if plot:
        job.plot(record, plot)
    show(record.as_json() if as_json else job.render(record))
    for name, path in (("Result", json_out), ("Plot", plot)):
        if path and not as_json:
            click.echo(f"{name}: {path}")
    return 0 if record.ok else 1


@cli.command(short_help="Show which backend serves this machine.")
@json_option
def doctor(as_json: bool) -> None:
    """Show the environment, each backend, and whether it serves this machine."""
    from . import doctor as job

    found = job.report()
    show(found if as_json else job.render(found))


def _architectures(_context: click.Context, _parameter: click.Parameter, value: str | None) -> tuple[str, ...]:
    """The one asked for, or all."""
    from ..backends.cute import ARCHITECTURES

    if value is None:
        return ARCHITECTURES
    if value not in ARCHITECTURES:
        raise click.BadParameter(f"no kernels for {value!r}; there are some for {', '.join(ARCHITECTURES)}")
    return (value,)


@cli.command(short_help="Compile the GPU kernels, without a GPU, and read their machine code.")
@click.option("--arch", callback=_architectures, metavar="ARCH", help="The architecture, e.g. sm_90a.  [default: all]")
@json_option
def kernels(arch: tuple[str, ...], as_json: bool) -> int:
    """Compile every GPU kernel and show its registers, memory and tensor core instructions. Needs no GPU.

    Exit code 1 when a kernel spills registers to local memory, or its wgmmas do not run asynchronously.
    """
    from . import kernels as job

    with progress() as show_step:
        reports = job.run(arch, show_step)
    show(job.as_json(reports) if as_json else job.render(reports))
    faults = job.faults(reports)
    for fault in faults:
        complain(fault)
    return 1 if faults else 0


for command in checkpoint_commands.ALL:
    cli.add_command(command)


def main(arguments: list[str] | None = None) -> None:
    """Entry point. Bad arguments: one line on stderr, exit code 2. A failed run: one line, exit code 1."""
    without_encoding_errors()
    try:
        code = cli.main(arguments, prog_name="h3mlp", standalone_mode=False)
    except click.exceptions.NoArgsIsHelpError as no_command:
        click.echo(no_command.ctx.get_help())
        code = 0
    except click.ClickException as error:
        complain(error.format_message())
        code = 2
    except (click.Abort, KeyboardInterrupt):
        complain("interrupted")
        code = 130
    except (ImportError, OSError, RuntimeError, MemoryError) as error:
        complain(str(error) or type(error).__name__)
        code = 1
    sys.exit(code)
