"""The ``h3mlp`` command."""

import importlib.util
import json
import os
import sys
from pathlib import Path

import click
from rich.console import Console
from rich.progress import Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

from . import contract
from ._version import __version__

PLOT_FORMATS = ("pdf", "png", "svg")


@click.group(context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100})
@click.version_option(__version__, prog_name="h3mlp")
def cli() -> None:
    """Fused FP8 operators for the MLP of the MiniMax-H3 video diffusion transformer."""


def _plot_file(_context: click.Context, _parameter: click.Parameter, value: Path | None) -> Path | None:
    """Refuse, before any work, a file that could not be written after it."""
    if value is None:
        return None
    if value.suffix[1:].lower() not in PLOT_FORMATS:
        raise click.BadParameter(f"must end in .{', .'.join(PLOT_FORMATS)}; it is {str(value)!r}")
    if not os.access(value.parent, os.W_OK):
        raise click.BadParameter(f"folder {str(value.parent)!r} does not exist or is not writable")
    if importlib.util.find_spec("matplotlib") is None:
        raise click.BadParameter("needs matplotlib: pip install 'h3mlp[plot]'")
    return value


@cli.command(short_help="Run one real-size layer and check it.")
@click.option("--rows", type=click.IntRange(1, contract.MAX_ROWS), default=256, show_default=True, help="Rows of x.")
@click.option("--seed", type=click.IntRange(0, 2**63 - 1), default=0, show_default=True, help="Seed of all data.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object instead of tables.")
@click.option(
    "--plot",
    type=click.Path(dir_okay=False, path_type=Path),
    callback=_plot_file,
    metavar="FILE",
    help="Draw the error histograms into FILE (.png, .svg or .pdf; needs h3mlp[plot]).",
)
def demo(rows: int, seed: int, as_json: bool, plot: Path | None) -> int:
    """Run one real-size FC1 layer of synthetic weights on the best device and show that it is right.

    Exit code 1 when it is not.
    """
    from . import demo as job

    with Progress(
        SpinnerColumn(),
        TextColumn("{task.description}"),
        TimeElapsedColumn(),
        console=Console(stderr=True),
        disable=not sys.stderr.isatty(),
        transient=True,
    ) as progress:
        task = progress.add_task("start", total=None)
        result = job.run(rows, seed, lambda step: progress.update(task, description=step))
        if plot:
            progress.update(task, description=f"plot {plot}")
            job.plot(result, plot)
    _show(result.as_json() if as_json else job.render(result))
    if plot and not as_json:
        click.echo(f"Error histograms: {plot}")
    return 0 if result.ok else 1


@cli.command(short_help="Show which backend serves this machine.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object instead of tables.")
def doctor(as_json: bool) -> None:
    """Show the environment, each backend, and whether it serves this machine."""
    from . import doctor as job

    found = job.report()
    _show(found if as_json else job.render(found))


def _show(content: object) -> None:
    if isinstance(content, dict):
        click.echo(json.dumps(content, indent=2))
    else:
        Console(highlight=False, markup=False).print(content)


def main(arguments: list[str] | None = None) -> None:
    """Entry point. Bad arguments: one line on stderr, exit code 2. A failed run: one line, exit code 1."""
    try:
        code = cli.main(arguments, prog_name="h3mlp", standalone_mode=False)
    except click.exceptions.NoArgsIsHelpError as no_command:
        click.echo(no_command.ctx.get_help())
        code = 0
    except click.ClickException as error:
        _complain(error.format_message())
        code = 2
    except (click.Abort, KeyboardInterrupt):
        _complain("interrupted")
        code = 130
    except (OSError, RuntimeError, MemoryError) as error:
        _complain(str(error) or type(error).__name__)
        code = 1
    sys.exit(code)


def _complain(message: str) -> None:
    click.echo(f"h3mlp: error: {' '.join(message.split())}", err=True)
