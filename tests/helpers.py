"""What several test files share."""

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from h3mlp import contract, prepare_fc1_weight_fp8, synthetic

HIDDEN, FFN, TABLE_ROWS = 384, 128, 4
"""Small, and with every shape of remainder: 48 vectors pad to 64."""


def make_inputs(
    rows: int, hidden: int = HIDDEN, ffn: int = FFN, table_rows: int = TABLE_ROWS, seed: int = 0
) -> contract.Inputs:
    """A synthetic batch and its prepared weight."""
    layer = synthetic.layer(rows, hidden, ffn, table_rows, seed)
    return contract.Inputs(*layer.activations, *prepare_fc1_weight_fp8(layer.weight))


def nan_buffers(rows: int, hidden: int = HIDDEN, ffn: int = FFN) -> contract.Buffers:
    """Buffers in which an element that is not written shows."""
    return contract.Buffers(
        out=torch.full((rows, ffn), torch.nan, dtype=contract.ACTIVATION),
        workspace_q=torch.full((rows, hidden), torch.nan).to(contract.QUANTIZED),
        workspace_scale=torch.full((rows,), torch.nan, dtype=contract.SCALE),
    )


def bits(t: torch.Tensor) -> torch.Tensor:
    """The tensor's bits: what "equal" means where NaN and -0 count."""
    return t.view({1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[t.element_size()])


class Allocations(TorchDispatchMode):
    """Notes the bytes of every storage that an operation makes anew, views of ``known`` tensors excepted."""

    def __init__(self, *known: torch.Tensor):
        super().__init__()
        self.known = {t.untyped_storage().data_ptr() for t in known}
        self.sizes: list[int] = []

    def __torch_dispatch__(self, function, _types, args=(), kwargs=None):
        result = function(*args, **(kwargs or {}))
        read = {a.untyped_storage().data_ptr() for a in args if isinstance(a, torch.Tensor)} | self.known
        for t in result if isinstance(result, (tuple, list)) else [result]:
            if isinstance(t, torch.Tensor) and t.untyped_storage().data_ptr() not in read:
                self.sizes.append(t.untyped_storage().nbytes())
        return result
