"""The operators on the CPU: the reference's quantization and an FP32 GEMM, all in blocks, so that memory stays bounded.

Beyond inputs, outputs and workspaces FC1 holds one block of activations in FP32 (44 MB at H = 5376), one of weights
(22 MB) and their product (8 MB), whatever M and F are. The MLP holds the same for FC2 (117, 29 and 4 MB at F = 14336)
and, where no workspaces are given, those of a block (99 MB).

E4M3 codes and their products are exact in FP32, so the only error of a GEMM is the FP32 accumulation of the BLAS.
"""

from collections.abc import Iterator

import torch

from .. import contract
from . import even_rows, gated_residual_, mlp_blocks, reference_quantize_rows, reference_stage1

NAME = "cpu"

NORM_ROWS = 64
"""Rows quantized at a time: 64 rows of 5376 in FP64 are 2.8 MB, about an L2."""

GEMM_ROWS = 2048
GEMM_COLUMNS = 512
"""Block of a GEMM: 2048 activation rows, 512 output columns (of FC1 1024 weight rows), decoded once a block of rows."""


def serves(device: torch.device) -> tuple[bool, str]:
    if device.type != "cpu":
        return False, "serves tensors in host memory only"
    capability = torch.backends.cpu.get_cpu_capability()
    return True, f"torch on the CPU, {torch.get_num_threads()} threads, {capability}"


def fc1_swiglu(
    inputs: contract.FC1Inputs,
    eps: float,
    buffers: contract.FC1Buffers,
    accumulate: str,  # noqa: ARG001
    modulation: str = "fused",
) -> None:
    """FC1, always in FP32. The arguments are checked, and the buffers have exactly M rows."""
    stage1(inputs, eps, buffers.workspace_q, buffers.workspace_scale, modulation)
    gemm_swiglu(buffers.workspace_q, buffers.workspace_scale, inputs.fc1_weight_q, inputs.fc1_weight_scale, buffers.out)


def mlp(
    inputs: contract.MLPInputs,
    eps: float,
    buffers: contract.MLPBuffers,
    accumulate: str,
    modulation: str = "fused",
    fp8_mma_form: int = -1,  # noqa: ARG001
) -> None:
    """The MLP, likewise. Of the buffers only ``out`` must be there."""
    for block, written in mlp_blocks(inputs, buffers, even_rows(inputs.x.shape[0], GEMM_ROWS)):
        fc1_swiglu(block.fc1, eps, written.fc1, accumulate, modulation)
        y_q, s_y = written.workspace_y_q, written.workspace_y_scale
        reference_quantize_rows(written.workspace_y, y_q, s_y, NORM_ROWS)
        gemm_gated_residual(y_q, s_y, block, written.out)


def stage1(
    inputs: contract.FC1Inputs, eps: float, a_q: torch.Tensor, s_row: torch.Tensor, modulation: str = "fused"
) -> None:
    """x [M, H] to codes a_q [M, H] and scales s_row [M]."""
    reference_stage1(inputs, eps, a_q, s_row, modulation, NORM_ROWS)


def gemm_swiglu(
    a_q: torch.Tensor, s_row: torch.Tensor, w_q: torch.Tensor, w_scale: torch.Tensor, out: torch.Tensor
) -> None:
    """Stage 2: codes and scales to y [M, F]."""
    for block, columns, h in _products(a_q, s_row, w_q, w_scale, halves=2):
        gate, up = h.chunk(2, dim=1)
        torch.mul(torch.nn.functional.silu(gate), up, out=out[block, columns])


def gemm_gated_residual(y_q: torch.Tensor, s_y: torch.Tensor, inputs: contract.MLPInputs, out: torch.Tensor) -> None:
    """Stage 3: codes and scales of y to out [M, H]."""
    gate, residual, index = inputs.gate, inputs.residual, inputs.adaln_index
    for block, columns, o in _products(y_q, s_y, inputs.fc2_weight_q, inputs.fc2_weight_scale, halves=1):
        of_columns = gate if gate is None else gate[:, columns]
        of_block = index if index is None else index[block]
        gated_residual_(o, of_columns, residual[block, columns], of_block, out[block, columns])


def _products(
    codes: torch.Tensor, scale: torch.Tensor, w_q: torch.Tensor, w_scale: torch.Tensor, halves: int
) -> Iterator[tuple[slice, slice, torch.Tensor]]:
    """Steps 9 and 10, or 14 and 15, block by block: which rows, which output columns, and their scaled products in
    BF16. Of a weight of two halves, packed, the gate columns come first, then the up columns."""
    (rows, inner), group = codes.shape, contract.ROW_GROUP
    outputs = w_q.shape[0] // halves
    most = min(GEMM_COLUMNS, outputs)
    table = _e4m3_pairs()
    packed_q = w_q.view(outputs // group, halves, group, inner)
    packed_scale = w_scale.view(outputs // group, halves, group)
    weights = codes.new_empty((halves * most, inner), dtype=torch.float32)
    for first_row in range(0, rows, GEMM_ROWS):
        block = slice(first_row, first_row + GEMM_ROWS)
        a = codes[block].float()
        acc = a.new_empty((a.shape[0], halves * most))
        for first in range(0, outputs, most):
            width = min(most, outputs - first)
            groups = slice(first // group, (first + width) // group)
            for half in range(halves):
                _decode(packed_q[groups, half], table, weights[half * width : (half + 1) * width])
            product = torch.mm(a, weights[: halves * width].T, out=acc[:, : halves * width])
            product *= scale[block, None]
            product *= packed_scale[groups].transpose(0, 1).reshape(-1)
            yield block, slice(first, first + width), product.bfloat16()


def _e4m3_pairs() -> torch.Tensor:
    """[65536] of the two FP32 values that two E4M3 codes stand for, as one 64-bit word."""
    codes = torch.arange(2**16, dtype=torch.int32, device="cpu").to(torch.uint16).view(torch.uint8)
    return codes.view(contract.QUANTIZED).float().view(torch.int64)


def _decode(codes: torch.Tensor, table: torch.Tensor, out: torch.Tensor) -> None:
    """E4M3 [..., H] to FP32 of the same number of elements, two codes a look-up: twice as fast as torch's conversion.
    That one serves a weight that begins at an odd byte of its storage."""
    if codes.storage_offset() % 2:
        out.view(codes.shape).copy_(codes)
        return
    pairs = codes.view(torch.uint16).int().view(-1)
    torch.index_select(table, 0, pairs, out=out.view(torch.int64).view(-1))
