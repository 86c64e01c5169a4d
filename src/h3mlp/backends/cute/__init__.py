"""The operators on GPUs with kernels of our own, in CuTe DSL. The DSL is imported when a kernel is first asked for."""

import importlib.util
from typing import TYPE_CHECKING

import torch

from ... import contract
from .. import no_nvidia_gpu

if TYPE_CHECKING:
    from .jit import Kernel

NAME = "cute"

_ARCHITECTURE_OF = {(9, 0): "sm_90a", (12, 0): "sm_120a", (12, 1): "sm_121a", (8, 9): "sm_89"}

ARCHITECTURES = tuple(dict.fromkeys(_ARCHITECTURE_OF.values()))
"""What the kernels are compiled for, as the compiler names it."""


def serves(device: torch.device) -> tuple[bool, str]:
    if refusal := no_nvidia_gpu(device):
        return False, refusal
    major, minor = torch.cuda.get_device_capability(device)
    arch = _ARCHITECTURE_OF.get((major, minor))
    if arch is None:
        return False, f"has kernels for {', '.join(ARCHITECTURES)}; this is compute capability {major}.{minor}"
    missing = [name for name in ("cutlass", "tvm_ffi") if importlib.util.find_spec(name) is None]
    if missing:
        from .jit import install_hint

        return False, f"needs the CuTe DSL: {install_hint()}"
    from . import choice

    chosen = choice.current(device.index or 0, arch)
    gemm = f"; GEMM {chosen[0]} ({chosen[1]})" if chosen else ""
    return True, f"kernels for {arch}, compiled when first used{gemm}"


def fc1_swiglu(
    inputs: contract.FC1Inputs, eps: float, buffers: contract.FC1Buffers, accumulate: str, modulation: str = "fused"
) -> None:
    """FC1. The arguments are checked, and the buffers have exactly M rows."""
    from . import launch

    launch.fc1_swiglu(inputs, eps, buffers, accumulate, modulation)


def mlp(
    inputs: contract.MLPInputs,
    eps: float,
    buffers: contract.MLPBuffers,
    accumulate: str,
    modulation: str = "fused",
    fp8_mma_form: int = -1,
) -> None:
    """The MLP, likewise. Only ``out`` must be among the buffers."""
    from . import launch

    launch.mlp(inputs, eps, buffers, accumulate, modulation, fp8_mma_form)


def stage1(
    inputs: contract.FC1Inputs, eps: float, a_q: torch.Tensor, s_row: torch.Tensor, modulation: str = "fused"
) -> None:
    """RMSNorm, AdaLN and quantization alone."""
    from . import launch

    launch.stage1(inputs, eps, a_q, s_row, modulation)


def warmup(
    device: torch.device,
    rows: tuple[int, ...],
    hidden: int,
    ffn: int,
    accumulate: str,
    gemm: str | None,
    modulation: str = "fused",
    operators: tuple[str, ...] = contract.OPERATORS,
) -> None:
    """Compile and load what calls of these operators with so many rows launch. Where there is a choice of GEMMs, use
    ``gemm``, or find the fastest, once for a model of GPU.

    Raises:
        ValueError: this device has no such ``gemm``.
    """
    from . import launch

    launch.warmup(device, rows, hidden, ffn, accumulate, gemm, modulation, operators)


def kernels(arch: str) -> list["Kernel"]:
    """Every variant that the model's dimensions may need on this architecture.

    Raises:
        ImportError: the CuTe DSL is not installed.
    """
    from . import variants

    return variants.of(arch)
