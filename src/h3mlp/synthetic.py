"""A synthetic MLP in BF16 and what it computes there: the input of the demo, the benchmarks and the tests."""

from dataclasses import dataclass, fields, replace

import torch
import torch.nn.functional as F

from . import contract

BLOCK_ROWS = 2048
"""Rows of the BF16 layer at a time: its [rows, 2F] product is 117 MB then, where the demo allows any number of rows."""


@dataclass(frozen=True)
class Layer:
    """One FC1 layer and a batch for it. Shapes as in ``contract.FC1Inputs``; ``weight`` is BF16 [2F, H], gate first."""

    x: torch.Tensor
    x_norm_weight: torch.Tensor
    adaln_scale: torch.Tensor
    adaln_shift: torch.Tensor
    adaln_index: torch.Tensor
    weight: torch.Tensor

    @property
    def activations(self) -> tuple[torch.Tensor, ...]:
        """The operator's arguments before the weight."""
        return self.x, self.x_norm_weight, self.adaln_scale, self.adaln_shift, self.adaln_index

    def to(self, device: torch.device) -> "Layer":
        return Layer(*(getattr(self, field.name).to(device) for field in fields(self)))

    def rows(self, chosen: torch.Tensor) -> "Layer":
        """The same layer with these rows of the batch."""
        return replace(self, x=self.x[chosen], adaln_index=self.adaln_index[chosen])

    def with_runs(self) -> "Layer":
        """The same layer with the indices of a model: as many runs of rows as there are table rows."""
        rows = torch.arange(len(self.x), dtype=self.adaln_index.dtype, device=self.x.device)
        return replace(self, adaln_index=rows * len(self.adaln_scale) // len(self.x))

    def forward_bf16(self, eps: float = contract.EPS) -> torch.Tensor:
        """The layer in plain BF16 torch, the one that the operator replaces: BF16 [M, F]."""
        blocks = zip(self.x.split(BLOCK_ROWS), self.adaln_index.split(BLOCK_ROWS), strict=True)
        return torch.cat([self.block_bf16(x, index, eps) for x, index in blocks])

    def block_bf16(self, x: torch.Tensor, index: torch.Tensor, eps: float) -> torch.Tensor:
        """Likewise for other rows, all at once."""
        n = F.rms_norm(x, x.shape[-1:], self.x_norm_weight, eps)
        a = n * (1 + self.adaln_scale[index]) + self.adaln_shift[index]
        gate, up = F.linear(a, self.weight).chunk(2, dim=-1)
        return F.silu(gate) * up


@dataclass(frozen=True)
class MLP:
    """One MLP and a batch for it. Shapes as in ``contract.MLPInputs``; ``fc2_weight`` is BF16 [H, F]."""

    fc1: Layer
    gate: torch.Tensor
    residual: torch.Tensor
    fc2_weight: torch.Tensor

    @property
    def activations(self) -> tuple[torch.Tensor, ...]:
        """The operator's arguments before the weights."""
        return *self.fc1.activations, self.gate, self.residual

    def to(self, device: torch.device) -> "MLP":
        return MLP(self.fc1.to(device), *(t.to(device) for t in (self.gate, self.residual, self.fc2_weight)))

    def rows(self, chosen: torch.Tensor) -> "MLP":
        """The same MLP with these rows of the batch."""
        return replace(self, fc1=self.fc1.rows(chosen), residual=self.residual[chosen])

    def forward_bf16(self, eps: float = contract.EPS) -> torch.Tensor:
        """The half of a block in plain BF16 torch, the one that the operator replaces: BF16 [M, H]."""
        blocks = zip(*(t.split(BLOCK_ROWS) for t in (self.fc1.x, self.fc1.adaln_index, self.residual)), strict=True)
        return torch.cat([r + self.added_bf16(self.fc1.block_bf16(x, i, eps), i) for x, i, r in blocks])

    def added_bf16(self, y: torch.Tensor, index: torch.Tensor) -> torch.Tensor:
        """What FC2 and the gate make of some rows of y [M, F]: BF16 [M, H]."""
        return self.gate[index] * F.linear(y, self.fc2_weight)


def layer(
    rows: int,
    hidden: int = contract.HIDDEN,
    ffn: int = contract.FFN,
    table_rows: int = contract.ADALN_ROWS,
    seed: int = 0,
) -> Layer:
    """Normal data on the CPU, equal for equal seeds: x of standard deviation 1, weights of 1/sqrt(H) so that h has
    about 1, the norm weight 1 and the AdaLN tables 0 with 0.1 around them, indices uniform."""
    return _layer(torch.Generator("cpu").manual_seed(seed), rows, hidden, ffn, table_rows)


def mlp(
    rows: int,
    hidden: int = contract.HIDDEN,
    ffn: int = contract.FFN,
    table_rows: int = contract.ADALN_ROWS,
    seed: int = 0,
) -> MLP:
    """``layer`` of the same arguments with an FC2 behind it: weights of standard deviation 1/sqrt(F), gates of 1, and
    x as the residual."""
    generator = torch.Generator("cpu").manual_seed(seed)
    fc1 = _layer(generator, rows, hidden, ffn, table_rows)
    gate = _normal(generator, table_rows, hidden)
    return MLP(fc1, gate, fc1.x, _normal(generator, hidden, ffn, std=ffn**-0.5))


def _layer(generator: torch.Generator, rows: int, hidden: int, ffn: int, table_rows: int) -> Layer:
    return Layer(
        x=_normal(generator, rows, hidden),
        x_norm_weight=_normal(generator, hidden, std=0.1, mean=1.0),
        adaln_scale=_normal(generator, table_rows, hidden, std=0.1),
        adaln_shift=_normal(generator, table_rows, hidden, std=0.1),
        adaln_index=torch.randint(table_rows, (rows,), dtype=torch.int64, device="cpu", generator=generator),
        weight=_normal(generator, 2 * ffn, hidden, std=hidden**-0.5),
    )


def _normal(generator: torch.Generator, *shape: int, std: float = 1.0, mean: float = 0.0) -> torch.Tensor:
    # Filled in BF16: an FP32 draft of the weight would take 616 MB.
    return torch.empty(shape, dtype=contract.ACTIVATION, device="cpu").normal_(mean, std, generator=generator)


def as_specified(rows: int, device: torch.device, seed: int = 0) -> Layer:
    """The distributions of the specified operator's own public test, made on the device: x of N(0, 0.5), weights of
    N(0, 0.02) so that h has about 1.5, the norm weight within 10% of 1, the AdaLN tables within 0.05 of 0, and indices
    in as many runs as there are table rows."""
    generator = torch.Generator(device).manual_seed(seed)

    def empty(*shape: int) -> torch.Tensor:
        return torch.empty(shape, dtype=contract.ACTIVATION, device=device)

    tables = [empty(contract.ADALN_ROWS, contract.HIDDEN).uniform_(-0.05, 0.05, generator=generator) for _ in range(2)]
    return Layer(
        empty(rows, contract.HIDDEN).normal_(0, 0.5, generator=generator),
        empty(contract.HIDDEN).uniform_(0.9, 1.1, generator=generator),
        *tables,
        torch.arange(rows, dtype=torch.int32, device=device) * contract.ADALN_ROWS // rows,
        empty(contract.FC1_ROWS, contract.HIDDEN).normal_(0, 0.02, generator=generator),
    )


def mlp_as_specified(rows: int, device: torch.device, seed: int = 0) -> MLP:
    """``as_specified`` with what the public test of the specified MLP adds: gates within 1 of 0, FC2 weights of
    N(0, 0.02), a residual of N(0, 1)."""
    generator = torch.Generator(device).manual_seed(seed + 1)

    def empty(*shape: int) -> torch.Tensor:
        return torch.empty(shape, dtype=contract.ACTIVATION, device=device)

    return MLP(
        as_specified(rows, device, seed),
        empty(contract.ADALN_ROWS, contract.HIDDEN).uniform_(-1, 1, generator=generator),
        empty(rows, contract.HIDDEN).normal_(generator=generator),
        empty(contract.HIDDEN, contract.FFN).normal_(0, 0.02, generator=generator),
    )
