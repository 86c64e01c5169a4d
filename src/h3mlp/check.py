"""What an argument may be. A refusal names it, what it must be and what it was."""

import numbers
import textwrap
from typing import NoReturn

import torch

from . import contract

_EPS_MIN, _EPS_MAX = 2.0**-149, torch.finfo(torch.float32).max


def refuse(name: str, want: str, got: object) -> NoReturn:
    raise ValueError(f"{name} must be {want}; it is {describe(got)}")


def describe(value: object) -> str:
    if torch.compiler.is_compiling() and isinstance(value, float):
        return "a float"  # a symbol, which has no text while a graph is traced
    if not isinstance(value, torch.Tensor):
        return f"{textwrap.shorten(repr(value), 100, placeholder=' ...')} ({type(value).__name__})"
    if value.layout != torch.strided:
        return f"{dtype_name(value.dtype)} {list(value.shape)} of layout {value.layout}"
    return f"{dtype_name(value.dtype)} {list(value.shape)} with strides {tuple(value.stride())} on {value.device}"


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
    """The arguments of an operator that are no tensors."""
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


def fc2_weight(value: object) -> None:
    tensor("fc2_weight", value)
    if value.dtype != contract.ACTIVATION or not _is_fc2_shape(value):
        refuse("fc2_weight", f"bfloat16 {_fc2_shape()}", value)


def norm_weight(name: str, value: object, hidden: int, device: torch.device) -> None:
    tensor(name, value)
    vector(name, value, (contract.ACTIVATION,), hidden, device)


def model_weight(
    name: str, value: torch.Tensor, shape: tuple[int, int] = (contract.FC1_ROWS, contract.HIDDEN), layer: str = "FC1"
) -> None:
    """The dimensions of MiniMax-H3; every other argument is then checked against the weight."""
    if tuple(value.shape) != shape:
        refuse(name, f"{list(shape)}, the {layer} weight of MiniMax-H3", value)


def packed_weight(
    weight_q: torch.Tensor,
    weight_scale: torch.Tensor,
    device: torch.device,
    names: tuple[str, str] = ("fc1_weight_q", "fc1_weight_scale"),
) -> None:
    name_q, name_scale = names
    if weight_q.dtype is not contract.QUANTIZED or not _is_fc1_shape(weight_q):
        refuse(name_q, f"float8_e4m3fn {_fc1_shape()}", weight_q)
    contiguous(name_q, weight_q, device)
    vector(name_scale, weight_scale, (contract.SCALE,), weight_q.shape[0], device)
    _packed(name_q, weight_q)
    _packed(name_scale, weight_scale)


def fc2_weight_q(
    weight_q: torch.Tensor,
    weight_scale: torch.Tensor,
    shape: tuple[int, int],
    device: torch.device,
    names: tuple[str, str] = ("fc2_weight_q", "fc2_weight_scale"),
) -> None:
    """``shape``: [H, F], as FC1's weight says."""
    name_q, name_scale = names
    if weight_q.dtype is not contract.QUANTIZED or tuple(weight_q.shape) != shape:
        refuse(name_q, f"float8_e4m3fn {list(shape)}, as FC1's weight says", weight_q)
    contiguous(name_q, weight_q, device)
    vector(name_scale, weight_scale, (contract.SCALE,), shape[0], device)
    for name, value in zip(names, (weight_q, weight_scale), strict=True):
        if contract.row_order(value) == contract.PACKED:
            raise ValueError(f"{name} must have FC2's rows in their order; its tag says that they are packed as FC1's")


def _fc1_shape() -> str:
    return f"[2F, H] with F a multiple of {contract.FFN_MULTIPLE} and H of {contract.HIDDEN_MULTIPLE}"


def _is_fc1_shape(value: torch.Tensor) -> bool:
    return _has_multiples(value, 2 * contract.FFN_MULTIPLE, contract.HIDDEN_MULTIPLE)


def _fc2_shape() -> str:
    return f"[H, F] with H a multiple of {contract.HIDDEN_MULTIPLE} and F of {contract.FFN_MULTIPLE}"


def _is_fc2_shape(value: torch.Tensor) -> bool:
    return _has_multiples(value, contract.HIDDEN_MULTIPLE, contract.FFN_MULTIPLE)


def _has_multiples(value: torch.Tensor, of_rows: int, of_columns: int) -> bool:
    """Whether it is a matrix with so many rows and columns or a multiple, and not none."""
    shape = value.shape
    if len(shape) != 2:
        return False
    rows, columns = shape
    return rows % of_rows == 0 and columns % of_columns == 0 and rows > 0 and columns > 0


def placed(name: str, value: torch.Tensor, device: torch.device) -> None:
    """On the device, and with its elements where strides say."""
    if value.layout is not torch.strided:
        refuse(name, "a dense torch.Tensor", value)
    if value.device != device:
        refuse(name, f"on {device} like the other arguments", value)


def contiguous(name: str, value: torch.Tensor, device: torch.device) -> None:
    placed(name, value, device)
    if not value.is_contiguous():
        refuse(name, "contiguous", value)


def vector(name: str, value: torch.Tensor, dtypes: tuple, length: int, device: torch.device) -> None:
    if value.dtype not in dtypes or value.shape != (length,):
        refuse(name, f"{' or '.join(map(dtype_name, dtypes))} [{length}]", value)
    contiguous(name, value, device)


def matrix(name: str, value: torch.Tensor, rows: str, columns: int, device: torch.device) -> int:
    """The number of its rows."""
    shape = value.shape
    if value.dtype is not contract.ACTIVATION or len(shape) != 2 or shape[1] != columns:
        refuse(name, f"{dtype_name(contract.ACTIVATION)} [{rows}, {columns}]", value)
    placed(name, value, device)
    if value.stride()[1] != 1:
        refuse(name, f"[{rows}, {columns}] with unit inner stride", value)
    return shape[0]


def _packed(name: str, value: torch.Tensor) -> None:
    order = contract.row_order(value)
    if order is not None and order != contract.PACKED:
        raise ValueError(
            f"{name} must be in packed row order, from prepare_fc1_weight_fp8 or pack_fc1_rows; its tag says {order!r}"
        )


def dtype_name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
