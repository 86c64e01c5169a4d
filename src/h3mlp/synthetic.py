"""A synthetic FC1 layer in BF16 and what it computes there: the input of the demo, the benchmarks and the tests."""

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

    def forward_bf16(self, eps: float = contract.EPS) -> torch.Tensor:
        """The layer in plain BF16 torch, the one that the operator replaces: BF16 [M, F]."""
        blocks = zip(self.x.split(BLOCK_ROWS), self.adaln_index.split(BLOCK_ROWS), strict=True)
        return torch.cat([self._block_bf16(x, index, eps) for x, index in blocks])

    def _block_bf16(self, x: torch.Tensor, index: torch.Tensor, eps: float) -> torch.Tensor:
        n = F.rms_norm(x, x.shape[-1:], self.x_norm_weight, eps)
        a = n * (1 + self.adaln_scale[index]) + self.adaln_shift[index]
        gate, up = F.linear(a, self.weight).chunk(2, dim=-1)
        return F.silu(gate) * up


def layer(
    rows: int,
    hidden: int = contract.HIDDEN,
    ffn: int = contract.FFN,
    table_rows: int = contract.ADALN_ROWS,
    seed: int = 0,
) -> Layer:
    """Normal data on the CPU, equal for equal seeds: x of standard deviation 1, weights of 1/sqrt(H) so that h has
    about 1, the norm weight 1 and the AdaLN tables 0 with 0.1 around them, indices uniform."""
    generator = torch.Generator("cpu").manual_seed(seed)

    def normal(*shape: int, std: float = 1.0, mean: float = 0.0) -> torch.Tensor:
        # Filled in BF16: an FP32 draft of the weight would take 616 MB.
        return torch.empty(shape, dtype=contract.ACTIVATION, device="cpu").normal_(mean, std, generator=generator)

    return Layer(
        x=normal(rows, hidden),
        x_norm_weight=normal(hidden, std=0.1, mean=1.0),
        adaln_scale=normal(table_rows, hidden, std=0.1),
        adaln_shift=normal(table_rows, hidden, std=0.1),
        adaln_index=torch.randint(table_rows, (rows,), dtype=torch.int64, device="cpu", generator=generator),
        weight=normal(2 * ffn, hidden, std=hidden**-0.5),
    )


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
