"""The operator on the CPU: the reference's stage 1 and an FP32 GEMM, both in blocks, so that memory stays bounded.

Beyond inputs, outputs and workspaces a call holds one block of activations in FP32 (44 MB at H = 5376), one of weights
(22 MB) and their product (8 MB), whatever M and F are.

E4M3 codes and their products are exact in FP32, so the only error of stage 2 is the FP32 accumulation of the BLAS.
"""

import torch

from .. import contract
from . import reference_stage1

NAME = "cpu"

NORM_ROWS = 64
"""Rows of stage 1 at a time: 64 rows of 5376 in FP64 are 2.8 MB, about an L2."""

GEMM_ROWS = 2048
GEMM_COLUMNS = 512
"""Block of stage 2: 2048 activation rows, 512 output columns (1024 weight rows, decoded once per block of rows)."""


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
    """Both stages, always in FP32. The arguments are checked, and the buffers have exactly M rows."""
    stage1(inputs, eps, buffers.workspace_q, buffers.workspace_scale, modulation)
    gemm_swiglu(buffers.workspace_q, buffers.workspace_scale, inputs.fc1_weight_q, inputs.fc1_weight_scale, buffers.out)


def stage1(
    inputs: contract.FC1Inputs, eps: float, a_q: torch.Tensor, s_row: torch.Tensor, modulation: str = "fused"
) -> None:
    """x [M, H] to codes a_q [M, H] and scales s_row [M]."""
    reference_stage1(inputs, eps, a_q, s_row, modulation, NORM_ROWS)


def gemm_swiglu(
    a_q: torch.Tensor, s_row: torch.Tensor, w_q: torch.Tensor, w_scale: torch.Tensor, out: torch.Tensor
) -> None:
    """Stage 2: codes and scales to y [M, F]."""
    rows, hidden = a_q.shape
    ffn, group = out.shape[1], contract.ROW_GROUP
    columns = min(GEMM_COLUMNS, ffn)
    table = _e4m3_pairs()
    packed_q = w_q.view(ffn // group, 2, group, hidden)
    packed_scale = w_scale.view(ffn // group, 2, group)
    weights = a_q.new_empty((2 * columns, hidden), dtype=torch.float32)
    for first_row in range(0, rows, GEMM_ROWS):
        block = slice(first_row, first_row + GEMM_ROWS)
        a = a_q[block].float()
        acc = a.new_empty((a.shape[0], 2 * columns))
        for first in range(0, ffn, columns):
            width = min(columns, ffn - first)
            groups = slice(first // group, (first + width) // group)
            for half in (0, 1):  # gate rows, then up rows: contiguous halves for the SwiGLU below
                _decode(packed_q[groups, half], table, weights[half * width : (half + 1) * width])
            product = torch.mm(a, weights[: 2 * width].T, out=acc[:, : 2 * width])
            product *= s_row[block, None]
            product *= packed_scale[groups].transpose(0, 1).reshape(-1)
            gate, up = product.bfloat16().split(width, dim=1)
            torch.mul(torch.nn.functional.silu(gate), up, out=out[block, first : first + width])


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
