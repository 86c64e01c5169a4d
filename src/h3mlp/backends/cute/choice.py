"""Which form and which large tile of the mma.sync GEMM a device gets.

Told by ``warmup(gemm=...)``, else by ``$H3MLP_GEMM``, else what ``warmup`` measured as the fastest on this device and
kept on disk; else the first candidate. All give the same bits. A GPU's name decides nothing: it only tells whether a
measurement was made on such a GPU.
"""

import json
import logging
import os
from pathlib import Path
from typing import NamedTuple

import torch

from ...files import whole
from . import forms, jit

ENVIRONMENT = "H3MLP_GEMM"

TILES = ("128x256", "256x128", "128x128")
"""Tokens by packed weight rows, the default first."""

FORM_OF = {0: forms.PLAIN, 2: forms.UNIT_SCALE}
"""What the MLP's ``fp8_mma_form`` means; -1 leaves the choice as it is."""

NOT_MEASURED = "not measured: call h3mlp.warmup"

_log = logging.getLogger("h3mlp")
_told: dict[int, "Choice"] = {}


class Choice(NamedTuple):
    form: str
    tile: str

    def __str__(self) -> str:
        return f"{self.form}:{self.tile}"


def candidates(arch: str) -> tuple[Choice, ...]:
    """All there is to choose from, the default first; empty where there is no choice."""
    return tuple(Choice(form, tile) for tile in TILES for form in forms.OF.get(arch, ()))


def with_form(chosen: Choice | None, fp8_mma_form: int, arch: str) -> Choice | None:
    """The same tile in the form that a call asks for by FlashInfer's number, if the architecture has it."""
    other = chosen and chosen._replace(form=FORM_OF.get(fp8_mma_form, chosen.form))
    return other if other in candidates(arch) else chosen


def parse(name: str, text: str, arch: str) -> Choice:
    """``name`` is what the text is called in the message.

    Raises:
        ValueError: no candidate for this architecture.
    """
    found = {str(choice): choice for choice in candidates(arch)}
    if text not in found:
        wanted = f"one of {', '.join(found)}" if found else "unset: there is no choice"
        raise ValueError(f"{name} must be {wanted} on {arch}; it is {text!r}")
    return found[text]


def current(device: int, arch: str) -> tuple[Choice, str] | None:
    """The choice for a CUDA device and where it comes from; None where there is none.

    Raises:
        ValueError: $H3MLP_GEMM is no candidate.
    """
    options = candidates(arch)
    if not options:
        return None
    if device in _told:
        return _told[device], "told by warmup"
    if text := os.environ.get(ENVIRONMENT):
        return parse(ENVIRONMENT, text, arch), f"${ENVIRONMENT}"
    if kept := _read(_file(device, arch), options):
        return kept, "measured"
    return options[0], NOT_MEASURED


def tell(device: int, choice: Choice | None) -> None:
    """Use this from now on, in this process; None: no longer."""
    _told.pop(device, None)
    if choice is not None:
        _told[device] = choice


def keep(device: int, arch: str, microseconds: dict[Choice, float]) -> None:
    """Keep the fastest of what was measured, on disk or, if that cannot be written, for this process."""
    fastest = min(microseconds, key=microseconds.get)
    file = _file(device, arch)
    found = {"gemm": fastest, "microseconds": {str(choice): us for choice, us in microseconds.items()}}
    try:
        file.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        with whole(file) as partial:
            partial.write_text(json.dumps(found))
    except OSError as error:
        _log.info("the measured GEMM %s is not kept on disk: %s", fastest, error)
        tell(device, fastest)


def _file(device: int, arch: str) -> Path:
    """Of this GPU model, these kernels and this driver's compiler."""
    gpu = torch.cuda.get_device_properties(device)
    parts = (jit.SOURCES, *map(str, jit.versions().values()), arch, gpu.name, str(gpu.multi_processor_count))
    return jit.cache_folder() / f"gemm-{arch}-{jit.key_of(parts)}.json"


def _read(file: Path, options: tuple[Choice, ...]) -> Choice | None:
    try:
        found = Choice(*json.loads(file.read_text())["gemm"])
    except FileNotFoundError:
        return None
    except (OSError, ValueError, KeyError, TypeError) as error:
        _log.warning("kernel cache: %s cannot be read, measure again by h3mlp.warmup: %s", file, error)
        return None
    return found if found in options else None
