"""Which backend serves a device, and why. ``h3mlp doctor`` prints what is decided here."""

from functools import lru_cache
from types import ModuleType
from typing import NamedTuple

import torch

from ..backends import chain, cpu, cute

BACKENDS: tuple[ModuleType, ...] = (cute, chain, cpu)
"""Fastest first. A backend is a module with NAME, ``serves(device) -> (bool, reason)``,
``fc1_swiglu(inputs, eps, buffers, accumulate, modulation)`` and, with ``fp8_mma_form`` behind these, ``mlp``."""


class Verdict(NamedTuple):
    """One backend's answer for one device."""

    backend: str
    serves: bool
    reason: str


def survey(device: torch.device) -> list[Verdict]:
    """Every backend's answer for this device, in order of preference."""
    return [Verdict(backend.NAME, *backend.serves(device)) for backend in BACKENDS]


@lru_cache(maxsize=64)
def select(device: torch.device) -> ModuleType:
    """The backend that serves this device.

    Raises:
        NotImplementedError: none does; says what each backend needs.
    """
    verdicts = survey(device)
    for backend, verdict in zip(BACKENDS, verdicts, strict=True):
        if verdict.serves:
            return backend
    reasons = "; ".join(f"backend {verdict.backend}: {verdict.reason}" for verdict in verdicts)
    raise NotImplementedError(
        f"no h3mlp backend serves {describe(device)} ({reasons}). Move the arguments to the CPU: it is always served"
    )


def describe(device: torch.device) -> str:
    """The device with what decides about it: a CUDA device's name and compute capability."""
    if device.type != "cuda" or not torch.cuda.is_available():
        return str(device)
    major, minor = torch.cuda.get_device_capability(device)
    return f"{device} ({torch.cuda.get_device_name(device)}, compute capability {major}.{minor})"


def devices() -> list[torch.device]:
    """The devices of this machine, accelerators first."""
    return [torch.device("cuda", i) for i in range(torch.cuda.device_count())] + [torch.device("cpu")]


def best() -> tuple[torch.device, str]:
    """The first device of ``devices`` that is served, and why it is that one."""
    passed_over = []
    for device in devices():
        for verdict in survey(device):
            if verdict.serves:
                return device, "; ".join([verdict.reason, *passed_over])
        passed_over.append(f"no backend serves {describe(device)}")
    raise AssertionError("the CPU backend serves every machine")
