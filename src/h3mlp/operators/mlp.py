"""The whole MLP half of a block: its public functions and their torch.library forms.

``torch.ops.h3mlp.mlp_fp8`` is functional, ``torch.ops.h3mlp.mlp_fp8_out`` writes the caller's buffers, of which only
``out`` must be there. Both check all that they are given.
"""

import sys

import torch

from .. import check, contract
from . import arguments, dispatch

_INPUTS = (
    "Tensor x, Tensor x_norm_weight, Tensor? adaln_scale, Tensor? adaln_shift, Tensor? adaln_index, Tensor? gate, "
    "Tensor residual, Tensor fc1_weight_q, Tensor fc1_weight_scale, Tensor fc2_weight_q, Tensor fc2_weight_scale, "
    "float eps, str accumulate, str modulation, int fp8_mma_form"
)
_BUFFERS = (
    "Tensor(a!) out, Tensor(b!)? workspace_a_q, Tensor(c!)? workspace_a_scale, Tensor(d!)? workspace_y, "
    "Tensor(e!)? workspace_y_q, Tensor(f!)? workspace_y_scale"
)
_OPERANDS = len(contract.MLPInputs._fields)
_OPTIONS = 4

torch.library.define("h3mlp::mlp_fp8", f"({_INPUTS}) -> Tensor", tags=arguments.TAGS)
torch.library.define("h3mlp::mlp_fp8_out", f"({_INPUTS}, {_BUFFERS}) -> ()", tags=arguments.TAGS)
_FUNCTIONAL = torch.ops.h3mlp.mlp_fp8.default
_INTO_BUFFERS = torch.ops.h3mlp.mlp_fp8_out.default

_NAMES = (*contract.MLPInputs._fields, *contract.MLPBuffers._fields)
_ADALN = ("adaln_scale", "adaln_shift", "adaln_index", "gate")
REQUIRED = frozenset(contract.MLPInputs._fields).difference(_ADALN)
"""What a caller must give."""


@torch.library.impl("h3mlp::mlp_fp8", "default")
def _functional(*args) -> torch.Tensor:
    inputs, options = contract.MLPInputs(*args[:_OPERANDS]), args[_OPERANDS:]
    _check(inputs, options)
    out = _new_out(inputs)
    _run(inputs, contract.MLPBuffers(out), *options)
    return out


@torch.library.register_fake("h3mlp::mlp_fp8")
def _functional_fake(*args) -> torch.Tensor:
    inputs, options = contract.MLPInputs(*args[:_OPERANDS]), args[_OPERANDS:]
    _check(inputs, options)
    return _new_out(inputs)


@torch.library.impl("h3mlp::mlp_fp8_out", "default")
def _into_buffers(*args) -> None:
    inputs, options, buffers = _parts(args)
    _check(inputs, options, buffers)
    rows = inputs.x.shape[0]
    buffers = contract.MLPBuffers(*(buffer if buffer is None else buffer[:rows] for buffer in buffers))
    if rows:
        arguments.apart(buffers, inputs, same={"out": ("x", "residual")})
    _run(inputs, buffers, *options)


@torch.library.register_fake("h3mlp::mlp_fp8_out")
def _into_buffers_fake(*args) -> None:
    _check(*_parts(args))


def _parts(args: tuple) -> tuple[contract.MLPInputs, tuple, contract.MLPBuffers]:
    behind = _OPERANDS + _OPTIONS
    return contract.MLPInputs(*args[:_OPERANDS]), args[_OPERANDS:behind], contract.MLPBuffers(*args[behind:])


def _check(inputs: contract.MLPInputs, options: tuple, buffers: contract.MLPBuffers | None = None) -> None:
    """All that metadata show; fake tensors have them too."""
    written = () if buffers is None else buffers
    arguments.types((*inputs, *written), _NAMES, REQUIRED if buffers is None else REQUIRED.union(("out",)))
    _check_options(*options)
    _check_inputs(inputs)
    if buffers is not None:
        _check_buffers(buffers, inputs)
    arguments.inference_only((*inputs, *written), "h3mlp.mlp_fp8")


def _check_options(eps: object, accumulate: object, modulation: object, fp8_mma_form: object) -> None:
    check.options(eps, accumulate, modulation)
    if type(fp8_mma_form) is not int or fp8_mma_form not in contract.FP8_MMA_FORM:
        check.refuse("fp8_mma_form", "-1, 0 or 2", fp8_mma_form)


def _check_inputs(given: contract.MLPInputs) -> None:
    """The tensors against each other; FC1's weight sets H and F, x the device and M."""
    without_tables = arguments.all_none(_ADALN, given[2:6])
    arguments.inputs(given.fc1)
    x, device = given.x, given.x.device
    rows, hidden = x.shape
    if not without_tables:
        arguments.table_like("gate", given.gate, given.adaln_scale)
    if check.matrix("residual", given.residual, "M", hidden, device) != rows:
        check.refuse("residual", f"[{rows}, {hidden}] as x", given.residual)
    ffn = given.fc1_weight_q.shape[0] // 2
    check.fc2_weight_q(given.fc2_weight_q, given.fc2_weight_scale, (hidden, ffn), device)


def _check_buffers(given: contract.MLPBuffers, inputs: contract.MLPInputs) -> None:
    """The caller's buffers: contiguous, with at least M rows."""
    rows, device = inputs.x.shape[0], inputs.x.device
    kinds = contract.mlp_buffer_rows(*inputs.fc2_weight_q.shape)
    for buffer, (name, (dtype, row)) in zip(given, kinds.items(), strict=True):
        if buffer is not None:
            arguments.buffer(name, buffer, dtype, rows, row, device)


def _new_out(inputs: contract.MLPInputs) -> torch.Tensor:
    return inputs.x.new_empty(inputs.x.shape)


def _run(inputs: contract.MLPInputs, buffers: contract.MLPBuffers, eps: float, *options) -> None:
    backend = dispatch.select(inputs.x.device)
    if inputs.x.shape[0]:
        backend.mlp(inputs, eps, buffers, *options)


def mlp_fp8(
    x: torch.Tensor,
    x_norm_weight: torch.Tensor,
    adaln_scale: torch.Tensor | None,
    adaln_shift: torch.Tensor | None,
    adaln_index: torch.Tensor | None,
    gate: torch.Tensor | None,
    residual: torch.Tensor,
    fc1_weight_q: torch.Tensor,
    fc1_weight_scale: torch.Tensor,
    fc2_weight_q: torch.Tensor,
    fc2_weight_scale: torch.Tensor,
    *,
    out: torch.Tensor | None = None,
    workspace_a_q: torch.Tensor | None = None,
    workspace_a_scale: torch.Tensor | None = None,
    workspace_y: torch.Tensor | None = None,
    workspace_y_q: torch.Tensor | None = None,
    workspace_y_scale: torch.Tensor | None = None,
    workspace_flags: torch.Tensor | None = None,
    eps: float = contract.EPS,
    fp8_mma_form: int = -1,
    accumulate: str = "fp32",
    modulation: str = "fused",
) -> torch.Tensor:
    """Fused FP8 (W8A8) RMSNorm + indexed AdaLN + FC1 + SwiGLU + FC2 + gated residual: the whole MLP half of a block,
    for any hidden size and FFN width.

    ::

        y   = fc1_swiglu_fp8(x, ...)
        y_q = e4m3(y / s_y),  s_y = RN(amax_row(|y|) / 448)
        o   = bf16(y_q @ fc2_weight_q^T * s_y * fc2_weight_scale)
        out = bf16(residual + bf16(gate[i] * o))                    i = adaln_index[row]; residual for i outside [0, R)

    Source: the FlashInfer operator ``minimax_h3_mlp_fp8_sm120``; the arithmetic step by step is in ``h3mlp.contract``,
    and ``h3mlp.reference.mlp_fp8`` is the same as plain torch. No gradient. Safe under torch.compile and torch.export.

    Rows go in blocks, so that beyond inputs and ``out`` a call needs at most 0.8 GB at the model's dimensions, whatever
    M is. The blocks change no bit.

    Args:
        x: BF16 [M, H] hidden states, unit inner stride, 0 <= M <= 2^24; H a multiple of 128.
        x_norm_weight: BF16 [H] RMSNorm weight.
        adaln_scale: BF16 [R, H] AdaLN table, unit inner stride (a column chunk of a wider projection will do), R >= 1.
        adaln_shift: BF16 [R, H], likewise.
        adaln_index: int32 or int64 [M], the table row of each activation row.
        gate: BF16 [R, H], likewise a table. With all three tables and the index None there is neither AdaLN nor gate,
            as in the model's token refiner: out = residual + o.
        residual: BF16 [M, H], unit inner stride: what the gated output is added to, in the model x itself.
        fc1_weight_q: E4M3 [2F, H], packed row order, from ``prepare_fc1_weight_fp8``; F a multiple of 64.
        fc1_weight_scale: FP32 [2F], likewise.
        fc2_weight_q: E4M3 [H, F], from ``prepare_fc2_weight_fp8``.
        fc2_weight_scale: FP32 [H], likewise.
        out: BF16 [>= M, H], contiguous: receives the result in its first M rows. It may be ``residual`` or ``x``, the
            very same memory. Allocated when omitted.
        workspace_a_q: E4M3 [>= M, H], contiguous: receives a_q. A workspace that is omitted is allocated for one block
            of rows; one that is given holds all of its intermediate afterwards.
        workspace_a_scale: FP32 [>= M]: receives s_row.
        workspace_y: BF16 [>= M, F]: receives y.
        workspace_y_q: E4M3 [>= M, F]: receives y_q.
        workspace_y_scale: FP32 [>= M]: receives s_y.
        workspace_flags: not used; taken so that calls of FlashInfer's operator work.
        eps: added to the mean square of a row; finite and positive in FP32.
        fp8_mma_form: 0 for plain FP8 products, 2 for block-scaled ones with unit scales, which give the same bits; -1
            for the one measured as faster. GPUs that have no such choice ignore it, as does the CPU.
        accumulate: "fp32" or "fast", of both GEMMs, as in ``fc1_swiglu_fp8``.
        modulation: "fused" or "eager", as in ``fc1_swiglu_fp8``.

    Returns:
        BF16 [M, H]: a new tensor, or ``out`` (its first M rows where it has more).

    Raises:
        ValueError: an argument of wrong type, dtype, shape, device, stride or value, an FC1 weight known not to be
            packed or an FC2 weight known to be, or buffers that share memory with another argument, but for ``out``
            with ``x`` and ``residual``. Nothing has been written.
        RuntimeError: a tensor requires grad while grad mode is on.
        NotImplementedError: no backend serves the device.
    """
    inputs = (x, x_norm_weight, adaln_scale, adaln_shift, adaln_index, gate, residual)
    inputs = (*inputs, fc1_weight_q, fc1_weight_scale, fc2_weight_q, fc2_weight_scale)
    workspaces = (workspace_a_q, workspace_a_scale, workspace_y, workspace_y_q, workspace_y_scale)
    # What torch's dispatcher would refuse without a name, or take for another number.
    arguments.types((*inputs, out, *workspaces), _NAMES, REQUIRED)
    if workspace_flags is not None:
        check.tensor("workspace_flags", workspace_flags)
    _check_options(eps, accumulate, modulation, fp8_mma_form)
    if torch.compiler.is_compiling():  # whatever differentiates the graph would take the operator for a constant
        arguments.inference_only((*inputs, out, *workspaces), "h3mlp.mlp_fp8")
    elif arguments.DTENSOR in sys.modules:
        from . import dtensor

        dtensor.refuse_buffers(inputs, contract.MLPBuffers(out, *workspaces))

    options = eps, accumulate, modulation, fp8_mma_form
    if out is None and all(workspace is None for workspace in workspaces):
        return _FUNCTIONAL(*inputs, *options)
    if out is None:
        read = contract.MLPInputs(*inputs)
        _check_inputs(read)  # out takes its shape from them
        out = _new_out(read)
    _INTO_BUFFERS(*inputs, *options, out, *workspaces)
    rows = x.shape[0]
    return out if out.shape[0] == rows else out[:rows]


def minimax_h3_mlp_fp8(
    x: torch.Tensor,
    x_norm_weight: torch.Tensor,
    adaln_scale: torch.Tensor | None,
    adaln_shift: torch.Tensor | None,
    adaln_index: torch.Tensor | None,
    gate: torch.Tensor | None,
    residual: torch.Tensor,
    fc1_weight_q: torch.Tensor,
    fc1_weight_scale: torch.Tensor,
    fc2_weight_q: torch.Tensor,
    fc2_weight_scale: torch.Tensor,
    *,
    out: torch.Tensor | None = None,
    workspace_a_q: torch.Tensor | None = None,
    workspace_a_scale: torch.Tensor | None = None,
    workspace_y: torch.Tensor | None = None,
    workspace_y_q: torch.Tensor | None = None,
    workspace_y_scale: torch.Tensor | None = None,
    workspace_flags: torch.Tensor | None = None,
    eps: float = contract.EPS,
    fp8_mma_form: int = -1,
    accumulate: str = "fp32",
    modulation: str = "fused",
) -> torch.Tensor:
    """``mlp_fp8`` with the dimensions of MiniMax-H3 checked: H = 5376, F = 14336.

    Takes the place of ``flashinfer.diffusion_ops.minimax_h3_mlp_fp8_sm120``. Beyond it: every device, M = 0 and up to
    2^24, int32 indices, a call without AdaLN, bounded memory, workspaces with more than M rows.

    Args:
        x: BF16 [M, 5376] hidden states.
        x_norm_weight: BF16 [5376] RMSNorm weight.
        adaln_scale: BF16 [R, 5376] AdaLN table; R = 9 in the model.
        adaln_shift: BF16 [R, 5376] AdaLN table.
        adaln_index: int32 or int64 [M] table row per activation row.
        gate: BF16 [R, 5376] table.
        residual: BF16 [M, 5376].
        fc1_weight_q: E4M3 [28672, 5376], from ``prepare_minimax_h3_fc1_weight_fp8``.
        fc1_weight_scale: FP32 [28672], likewise.
        fc2_weight_q: E4M3 [5376, 14336], from ``prepare_minimax_h3_fc2_weight_fp8``.
        fc2_weight_scale: FP32 [5376], likewise.
        out: BF16 [>= M, 5376], allocated when omitted; may be ``residual`` or ``x``.
        workspace_a_q: E4M3 [>= M, 5376] that receives a_q.
        workspace_a_scale: FP32 [>= M] that receives s_row.
        workspace_y: BF16 [>= M, 14336] that receives y.
        workspace_y_q: E4M3 [>= M, 14336] that receives y_q.
        workspace_y_scale: FP32 [>= M] that receives s_y.
        workspace_flags: not used.
        eps: RMSNorm epsilon, finite and positive in FP32.
        fp8_mma_form: -1, 0 or 2, as in ``mlp_fp8``.
        accumulate: "fp32", or "fast" for Hopper's unpromoted sums, as in ``fc1_swiglu_fp8``.
        modulation: "fused", or "eager" for plain torch's rounding, as in ``fc1_swiglu_fp8``.

    Returns:
        BF16 [M, 5376].

    Raises:
        ValueError, RuntimeError, NotImplementedError: as ``mlp_fp8``.
    """
    check.tensor("fc1_weight_q", fc1_weight_q)
    check.model_weight("fc1_weight_q", fc1_weight_q)
    check.tensor("fc2_weight_q", fc2_weight_q)
    check.model_weight("fc2_weight_q", fc2_weight_q, (contract.HIDDEN, contract.FFN), "FC2")
    return mlp_fp8(
        x,
        x_norm_weight,
        adaln_scale,
        adaln_shift,
        adaln_index,
        gate,
        residual,
        fc1_weight_q,
        fc1_weight_scale,
        fc2_weight_q,
        fc2_weight_scale,
        out=out,
        workspace_a_q=workspace_a_q,
        workspace_a_scale=workspace_a_scale,
        workspace_y=workspace_y,
        workspace_y_q=workspace_y_q,
        workspace_y_scale=workspace_y_scale,
        workspace_flags=workspace_flags,
        eps=eps,
        fp8_mma_form=fp8_mma_form,
        accumulate=accumulate,
        modulation=modulation,
    )
