"""``h3mlp bench``: the operator beside its peers on one device, as a table, a JSON record and a plot.

``peers`` says what is timed, ``timing`` how, ``harness`` puts a run together, ``record`` is its result, and ``render``
and ``plot`` show a record, also on a machine without the device that it comes from.
"""

from .harness import run
from .plot import plot
from .record import Record, load, save
from .render import render

__all__ = ["Record", "load", "plot", "render", "run", "save"]
