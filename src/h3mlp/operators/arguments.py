"""What an operator accepts: each argument, and all of them together."""

from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

import torch

from .. import check, contract

TAGS = (torch.Tag.pt2_compliant_tag, torch.Tag.needs_exact_strides)
"""The strides are checked when a graph is traced, so a compiler must not lay the tensors out anew afterwards."""

DTENSOR = "torch.distributed.tensor"
"""Where this module is not loaded there is no DTensor."""

ADALN = contract.FC1Inputs._fields[2:5]
_NOTHING = (0, 0)  # the span of an argument that is None
_NEVER: Mapping[str, Sequence[str]] = {}


def types(values: Sequence, names: Sequence[str], required: frozenset[str]) -> None:
    """Whatever is no tensor, where torch's dispatcher would not say which argument it is or lets None through."""
    for i, value in enumerate(values):
        if not isinstance(value, torch.Tensor) and (value is not None or names[i] in required):
            check.refuse(names[i], "a dense torch.Tensor", value)


def all_none(names: Sequence[str], values: Sequence) -> bool:
    """Whether these arguments are left out. Only all of them can be."""
    given = [name for name, value in zip(names, values, strict=True) if value is not None]
    if given and len(given) < len(names):
        missing = next(name for name in names if name not in given)
        check.refuse(missing, f"a tensor like {given[0]}, or all of {', '.join(names)} None", None)
    return not given


def inputs(given: contract.FC1Inputs) -> None:
    """The tensors that FC1 reads against each other; the weight sets H and F, x the device and M."""
    x, norm, scale, shift, index, weight_q, weight_scale = given
    device = x.device
    check.packed_weight(weight_q, weight_scale, device)
    hidden = weight_q.shape[1]
    rows = check.matrix("x", x, "M", hidden, device)
    # A symbolic M (torch.export) is left to the call that brings the real one: a bound here would become a constraint.
    if isinstance(rows, int) and rows > contract.MAX_ROWS:
        check.refuse("x", f"[M, {hidden}] with M <= {contract.MAX_ROWS}", x)
    check.vector("x_norm_weight", norm, (contract.ACTIVATION,), hidden, device)
    if all_none(ADALN, given[2:5]):
        return
    table_rows = _table("adaln_scale", scale, hidden, device)
    if table_rows < 1:
        check.refuse("adaln_scale", f"bfloat16 [R, {hidden}] with R >= 1", scale)
    table_like("adaln_shift", shift, scale)
    check.vector("adaln_index", index, contract.INDEX, rows, device)


def table_like(name: str, value: torch.Tensor, scale: torch.Tensor) -> None:
    """Another table, with the rows and columns of ``adaln_scale`` and strides of its own."""
    rows, columns = scale.shape
    if _table(name, value, columns, scale.device) != rows:
        check.refuse(name, f"[{rows}, {columns}] as adaln_scale", value)


def apart(written: NamedTuple, read: NamedTuple, same: Mapping[str, Sequence[str]] = _NEVER) -> None:
    """No byte of a buffer may be seen through another argument. Whole spans are compared, gaps of strides included.
    ``same``: which buffer may be which arguments, of its shape and dtype, from the first byte to the last."""
    spans = [_NOTHING if value is None else _span(value) for value in (*written, *read)]
    for i, (first, end) in enumerate(spans[: len(written)], 1):
        for other in spans[i:]:
            if first < other[1] and other[0] < end:
                names = written._fields + read._fields
                buffer, argument = names[i - 1], names[spans.index(other, i)]
                if argument not in same.get(buffer, ()) or other != (first, end):
                    raise ValueError(f"{buffer} must not overlap {argument}; they share memory")


def inference_only(tensors: Iterable[torch.Tensor | None], operator: str) -> None:
    if not torch.is_grad_enabled():
        return
    for value in tensors:
        if value is not None and value.requires_grad:
            raise RuntimeError(
                f"{operator} is an inference operator and has no gradient: "
                "call it under torch.no_grad() or torch.inference_mode(), or detach its arguments"
            )


def _table(name: str, value: torch.Tensor, columns: int, device: torch.device) -> int:
    if value.dtype in (torch.float32, torch.float16):
        check.refuse(name, f"bfloat16 [R, {columns}], so cast to BF16 as by {name}.bfloat16()", value)
    return check.matrix(name, value, "R", columns, device)


def buffer(
    name: str, value: torch.Tensor, dtype: torch.dtype, rows: int, row: tuple[int, ...], device: torch.device
) -> None:
    """A caller's buffer: contiguous, with at least M rows of this shape."""
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
