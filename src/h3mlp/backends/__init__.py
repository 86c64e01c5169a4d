"""What runs the operators on a device, and what its ways to do that share."""

from collections.abc import Iterator

import torch

from .. import contract, reference

ROW_TILE = 256
"""Blocks are a multiple of this many rows where they can be: no GEMM tile but the last is cut."""

ALIGNMENT = 16
"""Bytes: where a tensor must begin that TMA, cuBLASLt or CUTLASS reads or writes, or that a kernel reads in vectors."""


def is_aligned(tensor: torch.Tensor) -> bool:
    return tensor.data_ptr() % ALIGNMENT == 0


def aligned(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor, or a copy where it does not begin at a multiple of ``ALIGNMENT``."""
    return tensor if is_aligned(tensor) else tensor.clone()


def in_vectors(matrix: torch.Tensor) -> torch.Tensor:
    """The matrix, or a copy where not every row begins at a multiple of ``ALIGNMENT``."""
    starts = matrix.data_ptr() | matrix.stride(0) * matrix.itemsize
    return matrix if starts % ALIGNMENT == 0 else matrix.clone(memory_format=torch.contiguous_format)


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


def even_rows(rows: int, most_rows: int) -> int:
    """Rows of a block where there are as few blocks as there can be of at most ``most_rows``, and as even."""
    step = -(-rows // -(-rows // most_rows))
    return min(step + -step % ROW_TILE, most_rows, rows)


def mlp_blocks(
    inputs: contract.MLPInputs, buffers: contract.MLPBuffers, step: int
) -> Iterator[tuple[contract.MLPInputs, contract.MLPBuffers]]:
    """What each block of ``step`` rows reads and writes; the last one has what is left. Workspaces that are not given
    are allocated once, for a block."""
    rows = inputs.x.shape[0]
    kinds = contract.mlp_buffer_rows(*inputs.fc2_weight_q.shape).values()
    own = [
        inputs.x.new_empty((min(step, rows), *row), dtype=dtype) if given is None else None
        for given, (dtype, row) in zip(buffers, kinds, strict=True)
    ]
    for first in range(0, rows, step):
        block = slice(first, min(first + step, rows))
        within = slice(0, block.stop - first)
        pairs = zip(buffers, own, strict=True)
        yield inputs.rows(block), contract.MLPBuffers(*(b[within] if a is None else a[block] for a, b in pairs))


def reference_quantize_rows(y: torch.Tensor, y_q: torch.Tensor, s_y: torch.Tensor, block_rows: int) -> None:
    """Steps 12 and 13, y [M, F] to codes y_q [M, F] and scales s_y [M] by the reference, ``block_rows`` rows at a
    time."""
    for first in range(0, y.shape[0], block_rows):
        block = slice(first, first + block_rows)
        s_y[block] = reference.row_scale(y[block])
        y_q[block] = reference.quantize(y[block], s_y[block])


def gated_residual_(
    o: torch.Tensor, gate: torch.Tensor | None, residual: torch.Tensor, index: torch.Tensor | None, out: torch.Tensor
) -> None:
    """Step 16 as ``reference.gated_residual``, in the memory of ``o``. ``out`` may be ``residual``."""
    if index is None:
        torch.add(residual, o, out=out)
        return
    inside = (index >= 0) & (index < gate.shape[0])
    o *= gate[torch.where(inside, index, 0)]
    o += residual
    torch.where(inside[:, None], o, residual, out=out)
