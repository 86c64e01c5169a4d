"""What runs the operator on a device, and what its ways to do that share."""

import torch

from .. import contract, reference

ALIGNMENT = 16
"""Bytes: where a tensor must begin that TMA, cuBLASLt or CUTLASS reads or writes, or that a kernel reads in vectors."""


def is_aligned(tensor: torch.Tensor) -> bool:
    return tensor.data_ptr() % ALIGNMENT == 0


def aligned(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor, or a copy where it does not begin at a multiple of ``ALIGNMENT``."""
    return tensor if is_aligned(tensor) else tensor.clone()


def no_nvidia_gpu(device: torch.device) -> str | None:
    """Why a backend for NVIDIA GPUs does not serve this device; None where it may."""
    if device.type != "cuda":
        return "serves CUDA devices only"
    if torch.version.hip:
        return "needs an NVIDIA GPU; this torch is built for ROCm"
    if not torch.cuda.is_available():
        return "torch finds no CUDA device"
    return None


def reference_stage1(
    inputs: contract.FC1Inputs, eps: float, a_q: torch.Tensor, s_row: torch.Tensor, modulation: str, block_rows: int
) -> None:
    """x [M, H] to codes a_q [M, H] and scales s_row [M] by the reference, ``block_rows`` rows at a time."""
    for first in range(0, inputs.x.shape[0], block_rows):
        block = slice(first, first + block_rows)
        x, *others, index = inputs[:5]
        index = index if index is None else index[block]
        found = reference.norm_quant(x[block], *others, index, eps, modulation)
        s_row[block], a_q[block] = found.s_row, found.a_q
        del found  # or its n, a and a_q, 5 bytes an element, would still be there in the next block
