"""What the public functions accept. A refusal names the argument, what it must be and what it was."""

import numbers
import textwrap
from collections.abc import Iterable
from typing import NoReturn

import torch

from . import contract

_ADALN = contract.Inputs._fields[2:5]
REQUIRED = frozenset(contract.Inputs._fields) - frozenset(_ADALN)
"""What a caller must give; buffers may be left to be allocated."""
_NAMES = (*contract.Inputs._fields, *contract.Buffers._fields)

_NOTHING = (0, 0)  # the span of an argument that is None

_EPS_MIN, _EPS_MAX = 2.0**-149, torch.finfo(torch.float32).max


def refuse(name: str, want: str, got: object) -> NoReturn:
    raise ValueError(f"{name} must be {want}; it is {describe(got)}")


def describe(value: object) -> str:
    if torch.compiler.is_compiling() and isinstance(value, float):
        return "a float"  # a symbol, which has no text while a graph is traced
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
    """The contract adds eps in FP32, so it must be finite and positive there. NaN and infinity fail the comparison,
    which a compiler can guard where the number is symbolic; math.isfinite it cannot trace."""
    number = isinstance(value, (float, torch.SymFloat, numbers.Real)) and not isinstance(value, bool)
    if not (number and _EPS_MIN <= value <= _EPS_MAX):
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
    if weight_q.dtype is not contract.QUANTIZED or not _is_fc1_shape(weight_q):
        refuse(name_q, f"float8_e4m3fn {_fc1_shape()}", weight_q)
    _contiguous(name_q, weight_q, device)
    _vector(name_scale, weight_scale, (contract.SCALE,), weight_q.shape[0], device)
    _packed(name_q, weight_q)
    _packed(name_scale, weight_scale)


def types(read: tuple, written: tuple, required: frozenset[str] = REQUIRED) -> None:
    """Whatever is no tensor, where torch's dispatcher would not say which argument it is or lets None through."""
    for i, value in enumerate((*read, *written)):
        if not isinstance(value, torch.Tensor) and (value is not None or _NAMES[i] in required):
            refuse(_NAMES[i], "a dense torch.Tensor", value)


def without_tables(read: contract.Inputs) -> bool:
    """Whether AdaLN is left out: scale, shift and index are None."""
    given = [name for name, value in zip(_ADALN, read[2:5], strict=True) if value is not None]
    if given and len(given) < len(_ADALN):
        missing = next(name for name in _ADALN if name not in given)
        refuse(missing, f"a tensor like {given[0]}, or all of {', '.join(_ADALN)} None", None)
    return not given


def inputs(given: contract.Inputs) -> None:
    """The operator's tensors against each other; the weight sets H and F, x the device and M."""
    x, norm, scale, shift, index, weight_q, weight_scale = given
    device = x.device
    packed_weight(weight_q, weight_scale, device)
    hidden = weight_q.shape[1]
    rows = _matrix("x", x, "M", hidden, device)
    # A symbolic M (torch.export) is left to the call that brings the real one: a bound here would become a constraint.
    if isinstance(rows, int) and rows > contract.MAX_ROWS:
        refuse("x", f"[M, {hidden}] with M <= {contract.MAX_ROWS}", x)
    _vector("x_norm_weight", norm, (contract.ACTIVATION,), hidden, device)
    if without_tables(given):
        return
    table_rows = _table("adaln_scale", scale, hidden, device)
    if table_rows < 1:
        refuse("adaln_scale", f"bfloat16 [R, {hidden}] with R >= 1", scale)
    if _table("adaln_shift", shift, hidden, device) != table_rows:
        refuse("adaln_shift", f"[{table_rows}, {hidden}] as adaln_scale", shift)
    _vector("adaln_index", index, contract.INDEX, rows, device)


def buffers(given: contract.Buffers, x: torch.Tensor, ffn: int) -> None:
    """The caller's buffers: contiguous, with at least M rows."""
    rows, hidden = x.shape
    _buffer("out", given.out, contract.ACTIVATION, rows, (ffn,), x.device)
    _buffer("workspace_q", given.workspace_q, contract.QUANTIZED, rows, (hidden,), x.device)
    _buffer("workspace_scale", given.workspace_scale, contract.SCALE, rows, (), x.device)


def apart(written: contract.Buffers, read: contract.Inputs) -> None:
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


def _fc1_shape() -> str:
    return f"[2F, H] with F a multiple of {contract.FFN_MULTIPLE} and H of {contract.HIDDEN_MULTIPLE}"


def _is_fc1_shape(value: torch.Tensor) -> bool:
    shape = value.shape
    if len(shape) != 2:
        return False
    rows, hidden = shape
    fits = rows % (2 * contract.FFN_MULTIPLE) == 0 and hidden % contract.HIDDEN_MULTIPLE == 0
    return fits and rows > 0 and hidden > 0


def _placed(name: str, value: torch.Tensor, device: torch.device) -> None:
    """On the device, and with its elements where strides say."""
    if value.layout is not torch.strided:
        refuse(name, "a dense torch.Tensor", value)
    if value.device != device:
        refuse(name, f"on {device} like the other arguments", value)


def _contiguous(name: str, value: torch.Tensor, device: torch.device) -> None:
    _placed(name, value, device)
    if not value.is_contiguous():
        refuse(name, "contiguous", value)


def _vector(name: str, value: torch.Tensor, dtypes: tuple, length: int, device: torch.device) -> None:
    if value.dtype not in dtypes or value.shape != (length,):
        refuse(name, f"{' or '.join(map(_name, dtypes))} [{length}]", value)
    _contiguous(name, value, device)


def _matrix(name: str, value: torch.Tensor, rows: str, columns: int, device: torch.device) -> int:
    """The number of its rows."""
    shape = value.shape
    if value.dtype is not contract.ACTIVATION or len(shape) != 2 or shape[1] != columns:
        refuse(name, f"{_name(contract.ACTIVATION)} [{rows}, {columns}]", value)
    _placed(name, value, device)
    if value.stride()[1] != 1:
        refuse(name, f"[{rows}, {columns}] with unit inner stride", value)
    return shape[0]


def _table(name: str, value: torch.Tensor, columns: int, device: torch.device) -> int:
    if value.dtype in (torch.float32, torch.float16):
        refuse(name, f"bfloat16 [R, {columns}], so cast to BF16 as by {name}.bfloat16()", value)
    return _matrix(name, value, "R", columns, device)


def _buffer(
    name: str, value: torch.Tensor, dtype: torch.dtype, rows: int, row: tuple[int, ...], device: torch.device
) -> None:
    shape = value.shape
    if value.dtype is not dtype or not shape or shape[0] < rows or shape[1:] != row:
        wanted = ", ".join(str(n) for n in ("M", *row))
        refuse(name, f"{_name(dtype)} [{wanted}] with M >= {rows}", value)
    _contiguous(name, value, device)


def _span(value: torch.Tensor) -> tuple[int, int]:
    """The addresses of the first byte and behind the last, of a tensor that is contiguous or has unit inner stride."""
    first = value.data_ptr()
    if value.is_contiguous():
        return first, first + value.nbytes
    rows, columns = value.shape
    return first, first + ((rows - 1) * value.stride()[0] + columns) * value.element_size()


def _packed(name: str, value: torch.Tensor) -> None:
    order = contract.row_order(value)
    if order is not None and order != contract.PACKED:
        raise ValueError(
            f"{name} must be in packed row order, from prepare_fc1_weight_fp8 or pack_fc1_rows; its tag says {order!r}"
        )


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
