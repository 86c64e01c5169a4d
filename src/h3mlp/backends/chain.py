"""The operators on CUDA GPUs with FP8 tensor cores that have no kernel of ours: torch around its FP8 GEMM.

Both quantizations are the reference itself, whose bits are the same on CUDA; a GEMM has a scale a row and a scale a
column, and on its BF16 result comes SwiGLU or the gated residual. All go in blocks of rows, so that beyond inputs,
outputs and workspaces a call holds at most 1.5 * BLOCK_BYTES, whatever M is, and the MLP without workspaces those of
a block (223 MB at F = 14336). Nothing waits for the device, so a call can be captured in a CUDA graph.

torch multiplies FP8 with such scales on compute capability 8.9, 9.x, 10.x, 11.x and 12.x: cuBLASLt on 9.x from CUDA
12.9, CUTLASS elsewhere, which torch builds on Linux alone. Both apply the row's scale first, then the column's.
"""

import sys

import torch
import torch.nn.functional as F

from .. import contract
from . import (
    ROW_TILE,
    aligned,
    even_rows,
    gated_residual_,
    mlp_blocks,
    no_nvidia_gpu,
    reference_quantize_rows,
    reference_stage1,
)

NAME = "chain"

BLOCK_BYTES = 2**28
"""The most that the BF16 product of a block of rows takes (4608 of 28672), or the temporaries of stage 1 (1536 rows
of 5376)."""

STAGE1_BYTES = 30
"""What stage 1 holds an element at its peak, in step 5: three FP64 values and the three BF16 that they come from."""

QUANTIZE_BYTES = 9
"""What the quantization of y holds an element at its peak: y in FP32, the quotient, and its code."""


def serves(device: torch.device) -> tuple[bool, str]:
    if refusal := no_nvidia_gpu(device):
        return False, refusal
    major, minor = torch.cuda.get_device_capability(device)
    if (major, minor) < (8, 9):
        return False, f"needs FP8 tensor cores, compute capability 8.9 or newer; this is {major}.{minor}"
    if not hasattr(F, "scaled_mm"):
        return False, f"needs torch.nn.functional.scaled_mm, of torch 2.10 or newer; this is {torch.__version__}"
    if sys.platform == "win32" and major != 9:
        return False, f"torch on Windows has no FP8 GEMM with a scale a row for compute capability {major}.{minor}"
    return True, f"torch's scaled_mm in blocks of rows, compute capability {major}.{minor}"


def fc1_swiglu(
    inputs: contract.FC1Inputs, eps: float, buffers: contract.FC1Buffers, accumulate: str, modulation: str = "fused"
) -> None:
    """FC1. The arguments are checked, and the buffers have exactly M rows."""
    stage1(inputs, eps, buffers.workspace_q, buffers.workspace_scale, modulation)
    weight = inputs.fc1_weight_q, inputs.fc1_weight_scale
    gemm_swiglu(buffers.workspace_q, buffers.workspace_scale, *weight, buffers.out, accumulate == "fast")


def mlp(
    inputs: contract.MLPInputs,
    eps: float,
    buffers: contract.MLPBuffers,
    accumulate: str,
    modulation: str = "fused",
    fp8_mma_form: int = -1,  # noqa: ARG001
) -> None:
    """The MLP, likewise. Of the buffers only ``out`` must be there."""
    fast = accumulate == "fast"
    step = even_rows(inputs.x.shape[0], _block_rows(inputs.fc1_weight_q.shape[0], 2))
    for block, written in mlp_blocks(inputs, buffers, step):
        fc1_swiglu(block.fc1, eps, written.fc1, accumulate, modulation)
        quantize_rows(written.workspace_y, written.workspace_y_q, written.workspace_y_scale)
        gemm_gated_residual(written.workspace_y_q, written.workspace_y_scale, block, written.out, fast)


def stage1(
    inputs: contract.FC1Inputs, eps: float, a_q: torch.Tensor, s_row: torch.Tensor, modulation: str = "fused"
) -> None:
    """x [M, H] to codes a_q [M, H] and scales s_row [M]."""
    reference_stage1(inputs, eps, a_q, s_row, modulation, _block_rows(inputs.x.shape[1], STAGE1_BYTES))


def gemm_swiglu(
    a_q: torch.Tensor, s_row: torch.Tensor, w_q: torch.Tensor, w_scale: torch.Tensor, out: torch.Tensor, fast: bool
) -> None:
    """Stage 2: codes and scales to y [M, F]."""
    rows, ffn = out.shape
    # Both libraries load operands and scales in 16-byte vectors, and refuse or miscompute from other addresses.
    groups, w_q, w_scale = out.unflatten(1, (-1, contract.ROW_GROUP)), aligned(w_q), aligned(w_scale)
    for block in _blocks(rows, 2 * ffn, contract.ACTIVATION.itemsize):
        swiglu(scaled_mm(aligned(a_q[block]), w_q, aligned(s_row[block]), w_scale, fast), groups[block])


def quantize_rows(y: torch.Tensor, y_q: torch.Tensor, s_y: torch.Tensor) -> None:
    """Steps 12 and 13: y [M, F] to codes y_q [M, F] and scales s_y [M]."""
    reference_quantize_rows(y, y_q, s_y, _block_rows(y.shape[1], QUANTIZE_BYTES))


def gemm_gated_residual(
    y_q: torch.Tensor, s_y: torch.Tensor, inputs: contract.MLPInputs, out: torch.Tensor, fast: bool
) -> None:
    """Stage 3: codes and scales of y to out [M, H]."""
    rows, hidden = out.shape
    w_q, w_scale = aligned(inputs.fc2_weight_q), aligned(inputs.fc2_weight_scale)
    for block in _blocks(rows, hidden, 4 * contract.ACTIVATION.itemsize):
        o = scaled_mm(aligned(y_q[block]), w_q, aligned(s_y[block]), w_scale, fast)
        of_block = inputs.rows(block)
        gated_residual_(o, inputs.gate, of_block.residual, of_block.adaln_index, out[block])


def scaled_mm(
    a_q: torch.Tensor, w_q: torch.Tensor, s_row: torch.Tensor, w_scale: torch.Tensor, fast: bool
) -> torch.Tensor:
    """Steps 9 and 10, or 14 and 15: BF16 [M, N] of codes [M, K] and [N, K], columns in the order of the weight's rows.
    ``fast`` never promotes the tensor core's accumulator."""
    row = F.ScalingType.RowWise
    scales = s_row[:, None], row, w_scale[None], row
    return F.scaled_mm(a_q, w_q.t(), *scales, output_dtype=contract.ACTIVATION, use_fast_accum=fast)


def swiglu(h: torch.Tensor, out: torch.Tensor) -> None:
    """Step 11: h [M, 2F] in packed column order to y [M, F / 8, 8]. torch's BF16 silu computes in FP32 and rounds."""
    gate, up = h.unflatten(1, (-1, 2, contract.ROW_GROUP)).unbind(2)
    torch.mul(F.silu(gate), up, out=out)


def _block_rows(columns: int, element_bytes: int) -> int:
    """Rows of a block of which [rows, columns] takes at most BLOCK_BYTES (but at least one)."""
    rows = max(1, BLOCK_BYTES // (columns * element_bytes))
    return rows - rows % ROW_TILE if rows > ROW_TILE else rows


def _blocks(rows: int, columns: int, element_bytes: int) -> list[slice]:
    """Slices of the rows, block by block."""
    step = _block_rows(columns, element_bytes)
    return [slice(first, first + step) for first in range(0, rows, step)]
