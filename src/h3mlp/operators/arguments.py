"""What an operator accepts: each argument, and all of them together."""

from collections.abc import Iterable

import torch

from .. import check, contract

_ADALN = contract.FC1Inputs._fields[2:5]
REQUIRED = frozenset(contract.FC1Inputs._fields) - frozenset(_ADALN)
"""What a caller must give; buffers may be left to be allocated."""
_NAMES = (*contract.FC1Inputs._fields, *contract.FC1Buffers._fields)

_NOTHING = (0, 0)  # the span of an argument that is None


def types(read: tuple, written: tuple, required: frozenset[str] = REQUIRED) -> None:
    """Whatever is no tensor, where torch's dispatcher would not say which argument it is or lets None through."""
    for i, value in enumerate((*read, *written)):
        if not isinstance(value, torch.Tensor) and (value is not None or _NAMES[i] in required):
            check.refuse(_NAMES[i], "a dense torch.Tensor", value)


def without_tables(read: contract.FC1Inputs) -> bool:
    """Whether AdaLN is left out: scale, shift and index are None."""
    given = [name for name, value in zip(_ADALN, read[2:5], strict=True) if value is not None]
    if given and len(given) < len(_ADALN):
        missing = next(name for name in _ADALN if name not in given)
        check.refuse(missing, f"a tensor like {given[0]}, or all of {', '.join(_ADALN)} None", None)
    return not given


def inputs(given: contract.FC1Inputs) -> None:
    """The operator's tensors against each other; the weight sets H and F, x the device and M."""
    x, norm, scale, shift, index, weight_q, weight_scale = given
    device = x.device
    check.packed_weight(weight_q, weight_scale, device)
    hidden = weight_q.shape[1]
    rows = check.matrix("x", x, "M", hidden, device)
    # A symbolic M (torch.export) is left to the call that brings the real one: a bound here would become a constraint.
    if isinstance(rows, int) and rows > contract.MAX_ROWS:
        check.refuse("x", f"[M, {hidden}] with M <= {contract.MAX_ROWS}", x)
    check.vector("x_norm_weight", norm, (contract.ACTIVATION,), hidden, device)
    if without_tables(given):
        return
    table_rows = _table("adaln_scale", scale, hidden, device)
    if table_rows < 1:
        check.refuse("adaln_scale", f"bfloat16 [R, {hidden}] with R >= 1", scale)
    if _table("adaln_shift", shift, hidden, device) != table_rows:
        check.refuse("adaln_shift", f"[{table_rows}, {hidden}] as adaln_scale", shift)
    check.vector("adaln_index", index, contract.INDEX, rows, device)


def buffers(given: contract.FC1Buffers, x: torch.Tensor, ffn: int) -> None:
    """The caller's buffers: contiguous, with at least M rows."""
    rows, hidden = x.shape
    _buffer("out", given.out, contract.ACTIVATION, rows, (ffn,), x.device)
    _buffer("workspace_q", given.workspace_q, contract.QUANTIZED, rows, (hidden,), x.device)
    _buffer("workspace_scale", given.workspace_scale, contract.SCALE, rows, (), x.device)


def apart(written: contract.FC1Buffers, read: contract.FC1Inputs) -> None:
    """No byte of a buffer may be seen through another argument. Whole spans are compared, gaps of strides included."""
    spans = [_NOTHING if value is None else _span(value) for value in (*written, *read)]
    for i, (first, end) in enumerate(spans[: len(written)], 1):
        for other in spans[i:]:
            if first < other[1] and other[0] < end:
                names = written._fields + read._fields
                raise ValueError(f"{names[i - 1]} must not overlap {names[spans.index(other, i)]}; they share memory")


def inference_only(tensors: Iterable[torch.Tensor | None]) -> None:
    if not torch.is_grad_enabled():
        return
    for value in tensors:
        if value is not None and value.requires_grad:
            raise RuntimeError(
                "h3mlp.fc1_swiglu_fp8 is an inference operator and has no gradient: "
                "call it under torch.no_grad() or torch.inference_mode(), or detach its arguments"
            )


def _table(name: str, value: torch.Tensor, columns: int, device: torch.device) -> int:
    if value.dtype in (torch.float32, torch.float16):
        check.refuse(name, f"bfloat16 [R, {columns}], so cast to BF16 as by {name}.bfloat16()", value)
    return check.matrix(name, value, "R", columns, device)


def _buffer(
    name: str, value: torch.Tensor, dtype: torch.dtype, rows: int, row: tuple[int, ...], device: torch.device
) -> None:
    shape = value.shape
    if value.dtype is not dtype or not shape or shape[0] < rows or shape[1:] != row:
        wanted = ", ".join(str(n) for n in ("M", *row))
        check.refuse(name, f"{check.dtype_name(dtype)} [{wanted}] with M >= {rows}", value)
    check.contiguous(name, value, device)


def _span(value: torch.Tensor) -> tuple[int, int]:
    """The addresses of the first byte and behind the last, of a tensor that is contiguous or has unit inner stride."""
    first = value.data_ptr()
    if value.is_contiguous():
        return first, first + value.nbytes
    rows, columns = value.shape
    return first, first + ((rows - 1) * value.stride()[0] + columns) * value.element_size()
