"""The public operators and their torch.library forms: check, allocate, dispatch.

``torch.ops.h3mlp.fc1_swiglu_fp8`` is functional, which is what graphs want; ``torch.ops.h3mlp.fc1_swiglu_fp8_out``
writes the caller's buffers. Both check all that they are given, so a direct call is as safe as a public one.
"""

import sys

import torch

from .. import check, contract
from . import arguments, dispatch

_INPUTS = (
    "Tensor x, Tensor x_norm_weight, Tensor? adaln_scale, Tensor? adaln_shift, Tensor? adaln_index, "
    "Tensor fc1_weight_q, Tensor fc1_weight_scale, float eps, str accumulate, str modulation"
)
_BUFFERS = "Tensor(a!) out, Tensor(b!) workspace_q, Tensor(c!) workspace_scale"

torch.library.define("h3mlp::fc1_swiglu_fp8", f"({_INPUTS}) -> Tensor", tags=arguments.TAGS)
torch.library.define("h3mlp::fc1_swiglu_fp8_out", f"({_INPUTS}, {_BUFFERS}) -> ()", tags=arguments.TAGS)
_FUNCTIONAL = torch.ops.h3mlp.fc1_swiglu_fp8.default
_INTO_BUFFERS = torch.ops.h3mlp.fc1_swiglu_fp8_out.default

_NAMES = (*contract.FC1Inputs._fields, *contract.FC1Buffers._fields)
_REQUIRED = frozenset(contract.FC1Inputs._fields).difference(arguments.ADALN)
_WITH_BUFFERS = _REQUIRED.union(contract.FC1Buffers._fields)
_NONE_GIVEN = contract.FC1Buffers(None, None, None)


@torch.library.impl("h3mlp::fc1_swiglu_fp8", "default")
def _functional(*args) -> torch.Tensor:
    inputs, options = contract.FC1Inputs(*args[:7]), args[7:]
    _check(inputs, options)
    buffers = allocate(inputs)
    _run(inputs, buffers, *options)
    return buffers.out


@torch.library.register_fake("h3mlp::fc1_swiglu_fp8")
def _functional_fake(*args) -> torch.Tensor:
    inputs, options = contract.FC1Inputs(*args[:7]), args[7:]
    _check(inputs, options)
    return allocate(inputs).out


@torch.library.impl("h3mlp::fc1_swiglu_fp8_out", "default")
def _into_buffers(*args) -> None:
    inputs, options, buffers = contract.FC1Inputs(*args[:7]), args[7:10], contract.FC1Buffers(*args[10:])
    _check(inputs, options, buffers)
    rows = inputs.x.shape[0]
    if any(buffer.shape[0] != rows for buffer in buffers):
        buffers = contract.FC1Buffers(*(buffer[:rows] for buffer in buffers))
    if rows:
        arguments.apart(buffers, inputs)
    _run(inputs, buffers, *options)


@torch.library.register_fake("h3mlp::fc1_swiglu_fp8_out")
def _into_buffers_fake(*args) -> None:
    _check(contract.FC1Inputs(*args[:7]), args[7:10], contract.FC1Buffers(*args[10:]))


def _check(inputs: contract.FC1Inputs, options: tuple, buffers: contract.FC1Buffers | tuple[()] = ()) -> None:
    """All that metadata show; fake tensors have them too."""
    arguments.types((*inputs, *buffers), _NAMES, _WITH_BUFFERS)
    check.options(*options)
    arguments.inputs(inputs)
    if buffers:
        _check_buffers(buffers, inputs)
    arguments.inference_only((*inputs, *buffers), "h3mlp.fc1_swiglu_fp8")


def _check_buffers(given: contract.FC1Buffers, inputs: contract.FC1Inputs) -> None:
    (rows, hidden), device = inputs.x.shape, inputs.x.device
    arguments.buffer("out", given.out, contract.ACTIVATION, rows, (_ffn(inputs),), device)
    arguments.buffer("workspace_q", given.workspace_q, contract.QUANTIZED, rows, (hidden,), device)
    arguments.buffer("workspace_scale", given.workspace_scale, contract.SCALE, rows, (), device)


def _run(inputs: contract.FC1Inputs, buffers: contract.FC1Buffers, eps: float, *options: str) -> None:
    backend = dispatch.select(inputs.x.device)
    if inputs.x.shape[0]:
        backend.fc1_swiglu(inputs, eps, buffers, *options)


def _ffn(inputs: contract.FC1Inputs) -> int:
    return inputs.fc1_weight_q.shape[0] // 2


def allocate(inputs: contract.FC1Inputs, given: contract.FC1Buffers = _NONE_GIVEN) -> contract.FC1Buffers:
    """The given buffers, and new ones of exactly M rows on the inputs' device for those that are None."""
    x, (out, workspace_q, workspace_scale) = inputs.x, given
    rows, hidden = x.shape
    return contract.FC1Buffers(
        x.new_empty((rows, _ffn(inputs))) if out is None else out,
        x.new_empty((rows, hidden), dtype=contract.QUANTIZED) if workspace_q is None else workspace_q,
        x.new_empty(rows, dtype=contract.SCALE) if workspace_scale is None else workspace_scale,
    )


def fc1_swiglu_fp8(
    x: torch.Tensor,
    x_norm_weight: torch.Tensor,
    adaln_scale: torch.Tensor | None,
    adaln_shift: torch.Tensor | None,
    adaln_index: torch.Tensor | None,
    fc1_weight_q: torch.Tensor,
    fc1_weight_scale: torch.Tensor,
    *,
    out: torch.Tensor | None = None,
    workspace_q: torch.Tensor | None = None,
    workspace_scale: torch.Tensor | None = None,
    eps: float = contract.EPS,
    accumulate: str = "fp32",
    modulation: str = "fused",
) -> torch.Tensor:
    """Fused FP8 (W8A8) RMSNorm + indexed AdaLN + FC1 GEMM + SwiGLU, for any hidden size and FFN width.

    ::

        n   = bf16(rmsnorm(x, eps) * x_norm_weight)
        a   = bf16(adaln_shift[i] + n * bf16(1 + adaln_scale[i]))      i = adaln_index[row]; 0 for i outside [0, R)
        a_q = e4m3(a / s_row),  s_row = RN(amax_row(|a|) / 448)
        h   = bf16(a_q @ fc1_weight_q^T * s_row * fc1_weight_scale)
        y   = bf16(bf16(silu(h_gate)) * h_up)

    Source: the FlashInfer operator ``minimax_h3_fc1_swiglu_fp8``; the arithmetic step by step is in ``h3mlp.contract``,
    and ``h3mlp.reference`` is the same as plain torch. No gradient. Safe under torch.compile and torch.export.

    Args:
        x: BF16 [M, H] hidden states, unit inner stride, 0 <= M <= 2^24; H a multiple of 128.
        x_norm_weight: BF16 [H] RMSNorm weight.
        adaln_scale: BF16 [R, H] AdaLN table, unit inner stride (a column chunk of a wider projection will do), R >= 1.
        adaln_shift: BF16 [R, H], likewise.
        adaln_index: int32 or int64 [M], the table row of each activation row. With both tables and the index None there
            is no AdaLN, as in the model's token refiner: a = n.
        fc1_weight_q: E4M3 [2F, H], packed row order, from ``prepare_fc1_weight_fp8``; F a multiple of 64.
        fc1_weight_scale: FP32 [2F], likewise.
        out: BF16 [>= M, F], contiguous: receives the result in its first M rows. Allocated when omitted.
        workspace_q: E4M3 [>= M, H], contiguous: receives a_q. Allocated when omitted.
        workspace_scale: FP32 [>= M], contiguous: receives s_row. Allocated when omitted.
        eps: added to the mean square of a row; finite and positive in FP32.
        accumulate: "fp32" or "fast": how the FP8 products are added. On Hopper, whose wgmma adds with about 13 bits and
            truncates, "fp32" promotes the partial sums to FP32 often enough that the relative RMS error of h is at most
            3e-4. "fast" skips the promotion: 1.6e-3 on random data, and on all-positive data the result is low by 9%.
            With the inputs of the specified operator's own test, whose tolerance 12 of 58.7 million outputs may leave,
            120 do with "fp32" and 7,924 with "fast" (measured, H200). The CPU and every GPU whose tensor cores
            accumulate exactly ignore it.
        modulation: "fused" rounds n * (1 + scale) + shift to BF16 once. "eager" rounds the product too, as diffusers
            and other engines in plain torch do, for a comparison bit by bit.

    Returns:
        BF16 [M, F]: a new tensor, or ``out`` (its first M rows where it has more).

    Raises:
        ValueError: an argument of wrong type, dtype, shape, device, stride or value, a weight known not to be packed,
            or buffers that share memory with another argument. Nothing has been written.
        RuntimeError: a tensor requires grad while grad mode is on.
        NotImplementedError: no backend serves the device.
    """
    inputs = (x, x_norm_weight, adaln_scale, adaln_shift, adaln_index, fc1_weight_q, fc1_weight_scale)
    buffers = (out, workspace_q, workspace_scale)
    # What torch's dispatcher would refuse without a name, or take for another number.
    arguments.types((*inputs, *buffers), _NAMES, _REQUIRED)
    check.options(eps, accumulate, modulation)
    if torch.compiler.is_compiling():  # whatever differentiates the graph would take the operator for a constant
        arguments.inference_only((*inputs, *buffers), "h3mlp.fc1_swiglu_fp8")
    elif arguments.DTENSOR in sys.modules:
        from . import dtensor

        dtensor.refuse_buffers(inputs, contract.FC1Buffers(*buffers))

    if out is None and workspace_q is None and workspace_scale is None:
        return _FUNCTIONAL(*inputs, eps, accumulate, modulation)
    if out is None or workspace_q is None or workspace_scale is None:
        read = contract.FC1Inputs(*inputs)
        arguments.inputs(read)  # the missing buffers take their shapes from them
        buffers = out, _, _ = allocate(read, contract.FC1Buffers(*buffers))
    _INTO_BUFFERS(*inputs, eps, accumulate, modulation, *buffers)
    rows = x.shape[0]
    return out if out.shape[0] == rows else out[:rows]


def minimax_h3_fc1_swiglu_fp8(
    x: torch.Tensor,
    x_norm_weight: torch.Tensor,
    adaln_scale: torch.Tensor | None,
    adaln_shift: torch.Tensor | None,
    adaln_index: torch.Tensor | None,
    fc1_weight_q: torch.Tensor,
    fc1_weight_scale: torch.Tensor,
    *,
    out: torch.Tensor | None = None,
    workspace_q: torch.Tensor | None = None,
    workspace_scale: torch.Tensor | None = None,
    eps: float = contract.EPS,
    accumulate: str = "fp32",
    modulation: str = "fused",
) -> torch.Tensor:
    """``fc1_swiglu_fp8`` with the dimensions of MiniMax-H3 checked: H = 5376, F = 14336.

    Takes the place of ``flashinfer.diffusion_ops.minimax_h3_fc1_swiglu_fp8``. Beyond it: M = 0, any number of AdaLN
    rows, int64 indices, strided x and tables, buffers with more than M rows.

    Args:
        x: BF16 [M, 5376] hidden states.
        x_norm_weight: BF16 [5376] RMSNorm weight.
        adaln_scale: BF16 [R, 5376] AdaLN table; R = 9 in the model.
        adaln_shift: BF16 [R, 5376] AdaLN table.
        adaln_index: int32 or int64 [M] table row per activation row.
        fc1_weight_q: E4M3 [28672, 5376], from ``prepare_minimax_h3_fc1_weight_fp8``.
        fc1_weight_scale: FP32 [28672], likewise.
        out: BF16 [>= M, 14336], allocated when omitted.
        workspace_q: E4M3 [>= M, 5376] that receives a_q, allocated when omitted.
        workspace_scale: FP32 [>= M] that receives s_row, allocated when omitted.
        eps: RMSNorm epsilon, finite and positive in FP32.
        accumulate: "fp32", or "fast" for Hopper's unpromoted sums, as in ``fc1_swiglu_fp8``.
        modulation: "fused", or "eager" for plain torch's rounding, as in ``fc1_swiglu_fp8``.

    Returns:
        BF16 [M, 14336].

    Raises:
        ValueError, RuntimeError, NotImplementedError: as ``fc1_swiglu_fp8``.
    """
    check.tensor("fc1_weight_q", fc1_weight_q)
    check.model_weight("fc1_weight_q", fc1_weight_q)
    return fc1_swiglu_fp8(
        x,
        x_norm_weight,
        adaln_scale,
        adaln_shift,
        adaln_index,
        fc1_weight_q,
        fc1_weight_scale,
        out=out,
        workspace_q=workspace_q,
        workspace_scale=workspace_scale,
        eps=eps,
        accumulate=accumulate,
        modulation=modulation,
    )
