"""What the commands share: options, progress, results and complaints on a terminal."""

import importlib.util
import io
import json
import math
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import click
from rich.console import Console
from rich.progress import Progress, ProgressColumn, SpinnerColumn, TextColumn, TimeElapsedColumn
from rich.text import Text

from ..files import finite

PLOT_FORMATS = ("pdf", "png", "svg")


def output_file(_context: click.Context, _parameter: click.Parameter, value: Path | None) -> Path | None:
    """Refuse, before any work, a file that could not be written after it."""
    if value is not None and not os.access(value.parent, os.W_OK):
        raise click.BadParameter(f"folder {str(value.parent)!r} does not exist or is not writable")
    return value


def _plot_file(context: click.Context, parameter: click.Parameter, value: Path | None) -> Path | None:
    """Likewise, for a plot."""
    if value is None:
        return None
    if value.suffix[1:].lower() not in PLOT_FORMATS:
        raise click.BadParameter(f"must end in .{', .'.join(PLOT_FORMATS)}; it is {str(value)!r}")
    output_file(context, parameter, value)
    if importlib.util.find_spec("matplotlib") is None:
        raise click.BadParameter("needs matplotlib: pip install 'h3mlp[plot]'")
    return value


def file_option(flag: str, callback: Callable, what: str) -> Callable:
    return click.option(
        flag, type=click.Path(dir_okay=False, path_type=Path), callback=callback, metavar="FILE", help=what
    )


def plot_option(what: str) -> Callable:
    return file_option("--plot", _plot_file, f"Draw {what} into FILE (.png, .svg or .pdf; needs h3mlp[plot]).")


class Finite(click.ParamType):
    """A number that is neither NaN nor infinite, and not less than a least one."""

    name = "number"

    def __init__(self, least: float | None = None):
        self.least = least

    def convert(self, value: object, parameter: click.Parameter | None, context: click.Context | None) -> float:
        number = click.FLOAT.convert(value, parameter, context)
        if not math.isfinite(number) or (self.least is not None and number < self.least):
            want = "" if self.least is None else f" of at least {self.least:g}"
            self.fail(f"{value} is not a finite number{want}.", parameter, context)
        return number


FINITE = Finite()

json_option = click.option("--json", "as_json", is_flag=True, help="Print one JSON object instead of tables.")


@contextmanager
def progress(*bar: ProgressColumn) -> Iterator[Callable[..., None]]:
    """A spinner with the current step and the time, on a terminal's stderr only. Yields what shows a step and, for a
    bar, how much is done, of 1 or of a total."""
    with Progress(
        SpinnerColumn(),
        TextColumn("{task.description}"),
        *bar,
        TimeElapsedColumn(),
        console=Console(stderr=True),
        disable=not sys.stderr.isatty(),
        transient=True,
    ) as shown:
        task = shown.add_task("start", total=1.0 if bar else None)
        yield lambda step, done=None, total=None: shown.update(task, description=step, completed=done, total=total)


def line(text: str) -> Text:
    """Text that is not broken at the width of the terminal, as a path must not be."""
    return Text(text, no_wrap=True, overflow="ignore")


def show(content: object) -> None:
    if isinstance(content, dict):
        click.echo(json.dumps(finite(content), indent=2, allow_nan=False))
    else:
        Console(highlight=False, markup=False).print(content, crop=False)


def printable(text: str) -> str:
    """With what is no character, such as a byte of a file's name that is no UTF-8, escaped."""
    return text.encode(errors="backslashreplace").decode()


def without_encoding_errors() -> None:
    """What a terminal's encoding does not have, such as the name of a file, is shown escaped."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")


def complain(message: str) -> None:
    click.echo(f"h3mlp: error: {' '.join(message.split())}", err=True)
