"""What the public functions accept. A refusal names the argument, what it must be and what it was."""

import math
import numbers
import textwrap
from collections.abc import Callable, Sequence
from operator import add
from typing import NamedTuple, NoReturn

import torch

from . import contract

try:
    from torch._C._dynamo.guards import TensorGuards  # what torch.compile asks whether a graph still fits
except ImportError:
    TensorGuards = None

_ADALN = ("adaln_scale", "adaln_shift", "adaln_index")

_EPS_MIN, _EPS_MAX = 2.0**-149, torch.finfo(torch.float32).max


class _Accepted(NamedTuple):
    """Arguments that were found acceptable.

    Attributes:
        like: whether other tensors have the types, dtypes, devices, sizes, strides and ``requires_grad`` of these.
        exact: whether the buffers have exactly M rows.
        spans: the bytes that each argument spans.
    """

    like: Callable[..., bool]
    exact: bool
    spans: tuple[int, ...]


_ACCEPTED: dict[tuple, list[_Accepted]] = {}
"""By numbers of buffers and tensors, M and grad mode: torch's guards compare ten tensors in 0.7 us, but know nothing of
the mode. The checks themselves take 10 us, reading the metadata in Python 4 us."""

_APART: set[tuple[int, ...]] = set()
"""Addresses and spans of arguments that were found not to overlap: 0.6 us to look up, 2.3 us to compare. An allocator
gives the layers of a model the same addresses again in every step."""

_REMEMBERED = 1024
"""Entries of either, before it is begun anew: less than 5 MB together."""

_ALIKE = 8
"""Arguments to remember for one M: of other strides, devices or dimensions."""


def refuse(name: str, want: str, got: object) -> NoReturn:
    raise ValueError(f"{name} must be {want}; it is {describe(got)}")


def describe(value: object) -> str:
    if not isinstance(value, torch.Tensor):
        return f"{textwrap.shorten(repr(value), 100, placeholder=' ...')} ({type(value).__name__})"
    if value.layout != torch.strided:
        return f"{_name(value.dtype)} {list(value.shape)} of layout {value.layout}"
    return f"{_name(value.dtype)} {list(value.shape)} with strides {tuple(value.stride())} on {value.device}"


def class_of(value: object) -> str:
    """With its module, which tells one library's Linear from another's."""
    return f"{type(value).__module__}.{type(value).__qualname__}"


def tensor(name: str, value: object) -> None:
    if not isinstance(value, torch.Tensor) or value.layout != torch.strided:
        refuse(name, "a dense torch.Tensor", value)


def positive_int(name: str, value: object) -> None:
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        refuse(name, "a positive int", value)


def dimensions(hidden: object, ffn: object) -> None:
    for name, size, multiple in (
        ("hidden", hidden, contract.HIDDEN_MULTIPLE),
        ("ffn", ffn, contract.FFN_MULTIPLE),
    ):
        positive_int(name, size)
        if size % multiple:
            refuse(name, f"a multiple of {multiple}", size)


def eps(value: object) -> None:
    """The contract adds eps in FP32, so it must be finite and positive there."""
    number = type(value) is float or (isinstance(value, numbers.Real) and not isinstance(value, bool))
    if not (number and math.isfinite(value) and _EPS_MIN <= value <= _EPS_MAX):
        refuse("eps", "a finite positive number in FP32", value)


def accumulate(value: object) -> None:
    if not (isinstance(value, str) and value in contract.ACCUMULATE):
        refuse("accumulate", " or ".join(map(repr, contract.ACCUMULATE)), value)


def modulation(value: object) -> None:
    if not (isinstance(value, str) and value in contract.MODULATION):
        refuse("modulation", " or ".join(map(repr, contract.MODULATION)), value)


def gate_order(value: object) -> None:
    if not (isinstance(value, str) and value in contract.GATE_ORDER):
        refuse("gate_order", " or ".join(map(repr, contract.GATE_ORDER)), value)


def options(eps_value: object, accumulate_value: object, modulation_value: object) -> None:
    """The operator's arguments that are no tensors."""
    eps(eps_value)
    accumulate(accumulate_value)
    modulation(modulation_value)


def fc1_rows(name: str, value: object, refused: str) -> None:
    tensor(name, value)
    if value.dim() < 1 or value.shape[0] == 0 or value.shape[0] % (2 * contract.FFN_MULTIPLE):
        refuse(name, f"[2F, ...] with F a multiple of {contract.FFN_MULTIPLE}", value)
    order = contract.row_order(value)
    if order == refused:
        raise ValueError(f"{name} must not be in row order {refused!r}; its tag says that it is")


def fc1_weight(value: object) -> None:
    tensor("fc1_weight", value)
    if value.dtype != contract.ACTIVATION or not _is_fc1_shape(value):
        refuse("fc1_weight", f"bfloat16 {_fc1_shape()}, one half after the other", value)
    if contract.row_order(value) == contract.PACKED:
        raise ValueError("fc1_weight must have its gate rows before its up rows; its tag says that it is packed")


def norm_weight(name: str, value: object, hidden: int, device: torch.device) -> None:
    tensor(name, value)
    _vector(name, value, (contract.ACTIVATION,), hidden, device)


def model_weight(name: str, value: torch.Tensor) -> None:
    """The dimensions of MiniMax-H3; every other argument is then checked against the weight."""
    if tuple(value.shape) != (contract.FC1_ROWS, contract.HIDDEN):
        refuse(name, f"[{contract.FC1_ROWS}, {contract.HIDDEN}], the FC1 weight of MiniMax-H3", value)


def packed_weight(
    weight_q: torch.Tensor,
    weight_scale: torch.Tensor,
    device: torch.device,
    names: tuple[str, str] = ("fc1_weight_q", "fc1_weight_scale"),
) -> None:
    name_q, name_scale = names
    if weight_q.dtype != contract.QUANTIZED or not _is_fc1_shape(weight_q):
        refuse(name_q, f"float8_e4m3fn {_fc1_shape()}", weight_q)
    _on_device(name_q, weight_q, device)
    _contiguous(name_q, weight_q)
    _vector(name_scale, weight_scale, (contract.SCALE,), weight_q.shape[0], device)
    _packed(name_q, weight_q)
    _packed(name_scale, weight_scale)


def arguments(read: contract.Inputs, written: contract.Buffers | tuple[()] = ()) -> contract.Buffers | tuple[()]:
    """The operator's inputs, and its buffers where they are the caller's; returns the first M rows of those. What
    metadata decide is checked once for equal metadata. The row order, a note on the tensor object, and the addresses
    are checked in every call."""
    tensor("x", read.x)
    given = present(written, read)
    rows = read.x.shape[0] if read.x.dim() else 0
    key = (len(written), len(given), rows, torch.is_grad_enabled())
    accepted = next((known for known in _ACCEPTED.get(key, ()) if known.like(*given)), None)
    if accepted is None:
        accepted = _accept(read, written)
        _remember(key, accepted)
    _packed("fc1_weight_q", read.fc1_weight_q)
    _packed("fc1_weight_scale", read.fc1_weight_scale)
    if not written:
        return written
    if rows and (where := (*map(torch.Tensor.data_ptr, given), *accepted.spans)) not in _APART:
        _no_overlap(where[: len(given)], accepted.spans, names(written, read))
        if len(_APART) >= _REMEMBERED:
            _APART.clear()
        _APART.add(where)
    return written if accepted.exact else contract.Buffers(*[value[:rows] for value in written])


def _accept(read: contract.Inputs, written: contract.Buffers | tuple[()]) -> _Accepted:
    """What ``_ACCEPTED`` holds of these arguments, or their refusal."""
    given = present(written, read)
    for name, value in zip(names(written, read), given, strict=True):
        tensor(name, value)
    inference_only(given)
    inputs(read)
    rows = read.x.shape[0]
    if written:
        buffers(written, read.x, read.fc1_weight_q.shape[0] // 2)
    exact = all(value.shape[0] == rows for value in written)
    spans = tuple(map(_span, present([value[:rows] for value in written], read)))
    return _Accepted(_guards(given), exact, spans)


def without_tables(read: contract.Inputs) -> bool:
    """Whether AdaLN is left out: scale, shift and index are None."""
    given = [name for name in _ADALN if getattr(read, name) is not None]
    if given and len(given) < len(_ADALN):
        missing = next(name for name in _ADALN if name not in given)
        refuse(missing, f"a tensor like {given[0]}, or all of {', '.join(_ADALN)} None", None)
    return not given


def present(written: Sequence[torch.Tensor], read: contract.Inputs) -> tuple[torch.Tensor, ...]:
    """All tensors among the arguments, in the order of ``names``."""
    if (read.adaln_index is None or read.adaln_scale is None or read.adaln_shift is None) and without_tables(read):
        return (*written, read.x, read.x_norm_weight, *read[5:])
    return (*written, *read)


def names(written: contract.Buffers | tuple[()], read: contract.Inputs) -> list[str]:
    """What the tensors of ``present`` are called."""
    left_out = _ADALN if read.adaln_index is None else ()
    return [name for given in filter(None, (written, read)) for name in given._fields if name not in left_out]


def _guards(tensors: tuple[torch.Tensor, ...]) -> Callable[..., bool]:
    if TensorGuards is None:
        return lambda *_: False
    sizes, strides = [list(t.shape) for t in tensors], [list(t.stride()) for t in tensors]
    return TensorGuards(*tensors, dynamic_dims_sizes=sizes, dynamic_dims_strides=strides).check


def _remember(key: tuple, accepted: _Accepted) -> None:
    if len(_ACCEPTED) >= _REMEMBERED:
        _ACCEPTED.clear()
    known = _ACCEPTED.setdefault(key, [])
    known.insert(0, accepted)
    del known[_ALIKE:]


def inputs(given: contract.Inputs) -> None:
    """The operator's tensors against each other; the weight sets H and F, x the device and M."""
    x, device = given.x, given.x.device
    packed_weight(given.fc1_weight_q, given.fc1_weight_scale, device)
    hidden = given.fc1_weight_q.shape[1]
    _matrix("x", x, "M", hidden, device)
    # A symbolic M (torch.export) is left to the call that brings the real one: a bound here would become a constraint.
    if isinstance(x.shape[0], int) and x.shape[0] > contract.MAX_ROWS:
        refuse("x", f"[M, {hidden}] with M <= {contract.MAX_ROWS}", x)
    norm_weight("x_norm_weight", given.x_norm_weight, hidden, device)
    if without_tables(given):
        return
    _matrix("adaln_scale", given.adaln_scale, "R", hidden, device)
    table_rows = given.adaln_scale.shape[0]
    if table_rows < 1:
        refuse("adaln_scale", f"bfloat16 [R, {hidden}] with R >= 1", given.adaln_scale)
    _matrix("adaln_shift", given.adaln_shift, "R", hidden, device)
    if given.adaln_shift.shape[0] != table_rows:
        refuse("adaln_shift", f"[{table_rows}, {hidden}] as adaln_scale", given.adaln_shift)
    _vector("adaln_index", given.adaln_index, contract.INDEX, x.shape[0], device)


def buffers(given: contract.Buffers, x: torch.Tensor, ffn: int) -> None:
    """The caller's buffers: contiguous, with at least M rows."""
    rows, hidden = x.shape
    wanted = (
        ("out", given.out, contract.ACTIVATION, (ffn,)),
        ("workspace_q", given.workspace_q, contract.QUANTIZED, (hidden,)),
        ("workspace_scale", given.workspace_scale, contract.SCALE, ()),
    )
    for name, value, dtype, row in wanted:
        if value.dtype != dtype or value.dim() == 0 or tuple(value.shape[1:]) != row or value.shape[0] < rows:
            shape = ", ".join(str(n) for n in ("M", *row))
            refuse(name, f"{_name(dtype)} [{shape}] with M >= {rows}", value)
        _on_device(name, value, x.device)
        _contiguous(name, value)


def _no_overlap(first: Sequence[int], spans: Sequence[int], names: Sequence[str]) -> None:
    """No byte of a buffer may be seen through another argument. Whole spans are compared, gaps of strides included."""
    end = list(map(add, first, spans))
    for i in range(len(contract.Buffers._fields)):
        mine, my_end = first[i], end[i]
        for j in range(i + 1, len(names)):
            if mine < end[j] and first[j] < my_end:
                raise ValueError(f"{names[i]} must not overlap {names[j]}; they share memory")


def inference_only(tensors: Sequence[torch.Tensor]) -> None:
    if torch.is_grad_enabled() and any(t.requires_grad for t in tensors):
        raise RuntimeError(
            "h3mlp.fc1_swiglu_fp8 is an inference operator and has no gradient: "
            "call it under torch.no_grad() or torch.inference_mode(), or detach its arguments"
        )


def _fc1_shape() -> str:
    return f"[2F, H] with F a multiple of {contract.FFN_MULTIPLE} and H of {contract.HIDDEN_MULTIPLE}"


def _is_fc1_shape(value: torch.Tensor) -> bool:
    if value.dim() != 2 or 0 in value.shape:
        return False
    return not (value.shape[0] % (2 * contract.FFN_MULTIPLE) or value.shape[1] % contract.HIDDEN_MULTIPLE)


def _on_device(name: str, value: torch.Tensor, device: torch.device) -> None:
    if value.device != device:
        refuse(name, f"on {device} like the other arguments", value)


def _contiguous(name: str, value: torch.Tensor) -> None:
    if not value.is_contiguous():
        refuse(name, "contiguous", value)


def _vector(name: str, value: torch.Tensor, dtypes: tuple, length: int, device: torch.device) -> None:
    if value.dtype not in dtypes or value.dim() != 1 or value.shape[0] != length:
        refuse(name, f"{' or '.join(map(_name, dtypes))} [{length}]", value)
    _on_device(name, value, device)
    _contiguous(name, value)


def _matrix(name: str, value: torch.Tensor, rows: str, columns: int, device: torch.device) -> None:
    if value.dtype != contract.ACTIVATION or value.dim() != 2 or value.shape[1] != columns:
        refuse(name, f"{_name(contract.ACTIVATION)} [{rows}, {columns}]", value)
    _on_device(name, value, device)
    if value.stride(1) != 1:
        refuse(name, f"[{rows}, {columns}] with unit inner stride", value)


def _span(value: torch.Tensor) -> int:
    """The bytes from the first element to the last, both included."""
    last = sum((size - 1) * stride for size, stride in zip(value.shape, value.stride(), strict=True))
    return (last + 1) * value.element_size()


def _packed(name: str, value: torch.Tensor) -> None:
    order = contract.row_order(value)
    if order is not None and order != contract.PACKED:
        raise ValueError(
            f"{name} must be in packed row order, from prepare_fc1_weight_fp8 or pack_fc1_rows; its tag says {order!r}"
        )


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
