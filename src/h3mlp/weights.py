"""Weights: BF16 to FP8 with a scale a row, and FC1's packed row order. Formulas and order: ``h3mlp.contract``."""

from collections.abc import Iterator
from dataclasses import dataclass, replace

import torch

from . import check, contract, reference


@torch.no_grad()
def prepare_fc1_weight_fp8(
    fc1_weight: torch.Tensor, chunk_rows: int = 2048, gate_order: str = contract.HALVES
) -> tuple[torch.Tensor, torch.Tensor]:
    """Quantize an FC1 weight of any size to FP8 with one scale a row, and pack its rows for the kernels.

    Args:
        fc1_weight: BF16 [2F, H], the F gate rows, then the F up rows; H a multiple of 128, F of 64. Any device.
        gate_order: "gate_up", or "up_gate" where the up rows come first, as diffusers stores them.
        chunk_rows: rows held in FP32 at a time, rounded down to a multiple of 8 (at least 8). Extra memory is the two
            outputs and one such chunk: 44 MB at 2048 rows of 5376.

    Returns:
        ``(fc1_weight_q, fc1_weight_scale)``: E4M3 [2F, H] and FP32 [2F], packed row order, on the weight's device.
        ``scale = RN(max(amax |row|, 1e-12) / 448)``, ``q = e4m3(RN(row / scale))`` (``h3mlp.contract``, "Weights"). A
        row with a NaN has scale NaN, and so a column of NaN in the operator's output, as in the BF16 layer.

    Raises:
        ValueError: an argument of wrong type, dtype or shape.
    """
    check.fc1_weight(fc1_weight)
    check.positive_int("chunk_rows", chunk_rows)
    check.gate_order(gate_order)
    rows, hidden = fc1_weight.shape
    ffn, group = rows // 2, contract.ROW_GROUP
    weight_q = torch.empty((rows, hidden), dtype=contract.QUANTIZED, device=fc1_weight.device)
    weight_scale = torch.empty(rows, dtype=contract.SCALE, device=fc1_weight.device)
    packed_q = weight_q.view(ffn // group, 2, group, hidden)
    packed_scale = weight_scale.view(ffn // group, 2, group)
    step = min(max(chunk_rows // group, 1), ffn // group)
    chunk = torch.empty((step * group, hidden), dtype=torch.float32, device=fc1_weight.device)
    halves = fc1_weight.split(ffn)
    for half, source in enumerate(halves if gate_order == contract.HALVES else reversed(halves)):
        for first in range(0, ffn // group, step):
            bf16 = source[first * group : (first + step) * group]
            fp32 = chunk[: bf16.shape[0]].copy_(bf16)
            scale = scale_rows_(fp32)
            packed_scale[first : first + step, half] = scale.view(-1, group)
            packed_q[first : first + step, half] = fp32.view(-1, group, hidden)
    return contract.tag_row_order(weight_q, contract.PACKED), contract.tag_row_order(weight_scale, contract.PACKED)


def scale_rows_(rows: torch.Tensor) -> torch.Tensor:
    """Divide FP32 [N, H] by the scale of each row, in place, so that only the conversion to E4M3 is left. Returns the
    scales, FP32 [N]. Formula: ``h3mlp.contract``, "Weights"."""
    # Not aminmax, which along a dimension takes five times as long as these two on a CPU.
    scale = reference.e4m3_scale(torch.maximum(rows.amax(dim=1), -rows.amin(dim=1)))
    reference.saturate_(rows.div_(scale[:, None]))
    return scale


def prepare_minimax_h3_fc1_weight_fp8(
    fc1_weight: torch.Tensor, chunk_rows: int = 2048
) -> tuple[torch.Tensor, torch.Tensor]:
    """``prepare_fc1_weight_fp8`` for MiniMax-H3: BF16 [28672, 5376] to E4M3 [28672, 5376] and FP32 [28672].

    Raises:
        ValueError: an argument of wrong type, dtype or shape.
    """
    check.tensor("fc1_weight", fc1_weight)
    check.model_weight("fc1_weight", fc1_weight)
    return prepare_fc1_weight_fp8(fc1_weight, chunk_rows)


@torch.no_grad()
def prepare_fc2_weight_fp8(fc2_weight: torch.Tensor, chunk_rows: int = 1024) -> tuple[torch.Tensor, torch.Tensor]:
    """Quantize an FC2 weight of any size to FP8 with one scale an output row. The order of its rows stays.

    Args:
        fc2_weight: BF16 [H, F]; H a multiple of 128, F of 64. Any device.
        chunk_rows: rows held in FP32 at a time. Extra memory is the two outputs and one such chunk: 59 MB at 1024 rows
            of 14336.

    Returns:
        ``(fc2_weight_q, fc2_weight_scale)``: E4M3 [H, F] and FP32 [H] on the weight's device. Formula and treatment of
        NaN as in ``prepare_fc1_weight_fp8``.

    Raises:
        ValueError: an argument of wrong type, dtype or shape.
    """
    check.fc2_weight(fc2_weight)
    check.positive_int("chunk_rows", chunk_rows)
    device = fc2_weight.device
    weight_q = torch.empty(fc2_weight.shape, dtype=contract.QUANTIZED, device=device)
    weight_scale = torch.empty(fc2_weight.shape[0], dtype=contract.SCALE, device=device)
    step = min(chunk_rows, fc2_weight.shape[0])
    chunk = torch.empty((step, fc2_weight.shape[1]), dtype=torch.float32, device=device)
    for first in range(0, fc2_weight.shape[0], step):
        rows = slice(first, first + step)
        bf16 = fc2_weight[rows]
        fp32 = chunk[: bf16.shape[0]].copy_(bf16)
        weight_scale[rows] = scale_rows_(fp32)
        weight_q[rows] = fp32
    return weight_q, weight_scale


def prepare_minimax_h3_fc2_weight_fp8(
    fc2_weight: torch.Tensor, chunk_rows: int = 1024
) -> tuple[torch.Tensor, torch.Tensor]:
    """``prepare_fc2_weight_fp8`` for MiniMax-H3: BF16 [5376, 14336] to E4M3 [5376, 14336] and FP32 [5376], the codes
    and scales of FlashInfer's function of this name.

    Raises:
        ValueError: an argument of wrong type, dtype or shape.
    """
    check.tensor("fc2_weight", fc2_weight)
    check.model_weight("fc2_weight", fc2_weight, (contract.HIDDEN, contract.FFN), "FC2")
    return prepare_fc2_weight_fp8(fc2_weight, chunk_rows)


def pack_fc1_rows(rows: torch.Tensor) -> torch.Tensor:
    """Reorder [2F, ...] from gate rows, then up rows, to the packed order. Weights and scales alike; makes a copy.

    Raises:
        ValueError: not a tensor, 2F not a multiple of 128, or already packed where that is known.
    """
    check.fc1_rows("rows", rows, refused=contract.PACKED)
    packed = rows.unflatten(0, (2, -1, contract.ROW_GROUP)).transpose(0, 1).flatten(0, 2)
    return contract.tag_row_order(packed, contract.PACKED)


def unpack_fc1_rows(rows: torch.Tensor) -> torch.Tensor:
    """The exact inverse of ``pack_fc1_rows``: [2F, ...] back to gate rows, then up rows.

    Raises:
        ValueError: not a tensor, 2F not a multiple of 128, or known not to be packed.
    """
    check.fc1_rows("rows", rows, refused=contract.HALVES)
    halves = rows.unflatten(0, (-1, 2, contract.ROW_GROUP)).transpose(0, 1).flatten(0, 2)
    return contract.tag_row_order(halves, contract.HALVES)


@dataclass(frozen=True)
class PackedFC1:
    """A prepared FC1 weight: codes, scales and row order in one object, so that they cannot part.

    Unpacks to the operator's last two arguments: ``fc1_swiglu_fp8(x, norm, scale, shift, index, *packed)``.

    Attributes:
        weight: E4M3 [2F, H], packed row order.
        scale: FP32 [2F], same order.
        layout: the row order of both; only ``contract.PACKED`` is accepted.

    Raises:
        ValueError: wrong type, dtype, shape, device or layout.
    """

    weight: torch.Tensor
    scale: torch.Tensor
    layout: str = contract.PACKED

    def __post_init__(self) -> None:
        if self.layout != contract.PACKED:
            raise ValueError(f"layout must be {contract.PACKED!r}; it is {self.layout!r}")
        check.tensor("weight", self.weight)
        check.tensor("scale", self.scale)
        check.packed_weight(self.weight, self.scale, self.weight.device, names=("weight", "scale"))

    @classmethod
    def from_bf16(
        cls, fc1_weight: torch.Tensor, chunk_rows: int = 2048, gate_order: str = contract.HALVES
    ) -> "PackedFC1":
        """Prepare BF16 [2F, H]. Arguments and errors of ``prepare_fc1_weight_fp8``."""
        return cls(*prepare_fc1_weight_fp8(fc1_weight, chunk_rows, gate_order))

    def __iter__(self) -> Iterator[torch.Tensor]:
        return iter((self.weight, self.scale))

    def to(self, device: torch.device | str) -> "PackedFC1":
        """The same weight on another device."""
        return replace(self, weight=self.weight.to(device), scale=self.scale.to(device))

    def dequantize(self) -> torch.Tensor:
        """BF16 [2F, H], gate rows then up rows: the weight that the codes and scales stand for, for inspection."""
        return unpack_fc1_rows((self.weight.float() * self.scale[:, None]).bfloat16())


@dataclass(frozen=True)
class PackedMLP:
    """Both prepared weights of an MLP in one object, so that they cannot part.

    Unpacks to the operator's last four arguments:
    ``mlp_fp8(x, norm, scale, shift, index, gate, residual, *packed)``.

    Attributes:
        fc1: the FC1 weight, E4M3 [2F, H] and FP32 [2F], packed row order.
        fc2_weight: E4M3 [H, F], rows and columns in the model's order.
        fc2_scale: FP32 [H].

    Raises:
        ValueError: wrong type, dtype, shape or device, or an FC2 of other sizes than FC1's.
    """

    fc1: PackedFC1
    fc2_weight: torch.Tensor
    fc2_scale: torch.Tensor

    def __post_init__(self) -> None:
        if not isinstance(self.fc1, PackedFC1):
            check.refuse("fc1", "an h3mlp.PackedFC1", self.fc1)
        check.tensor("fc2_weight", self.fc2_weight)
        check.tensor("fc2_scale", self.fc2_scale)
        rows, hidden = self.fc1.weight.shape
        device, names = self.fc1.weight.device, ("fc2_weight", "fc2_scale")
        check.fc2_weight_q(self.fc2_weight, self.fc2_scale, (hidden, rows // 2), device, names)

    @classmethod
    def from_bf16(
        cls, fc1_weight: torch.Tensor, fc2_weight: torch.Tensor, gate_order: str = contract.HALVES
    ) -> "PackedMLP":
        """Prepare BF16 [2F, H] and [H, F]. Arguments and errors of ``prepare_fc1_weight_fp8`` and
        ``prepare_fc2_weight_fp8``."""
        check.fc2_weight(fc2_weight)  # before the work on the other
        return cls(PackedFC1.from_bf16(fc1_weight, gate_order=gate_order), *prepare_fc2_weight_fp8(fc2_weight))

    def __iter__(self) -> Iterator[torch.Tensor]:
        return iter((*self.fc1, self.fc2_weight, self.fc2_scale))

    def to(self, device: torch.device | str) -> "PackedMLP":
        """The same weights on another device."""
        return PackedMLP(self.fc1.to(device), self.fc2_weight.to(device), self.fc2_scale.to(device))

    def dequantize(self) -> tuple[torch.Tensor, torch.Tensor]:
        """BF16 [2F, H], gate rows then up rows, and BF16 [H, F]: what the codes and scales stand for."""
        return self.fc1.dequantize(), (self.fc2_weight.float() * self.fc2_scale[:, None]).bfloat16()
