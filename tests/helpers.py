"""What several test files share."""

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from h3mlp import contract, prepare_fc1_weight_fp8, synthetic

HIDDEN, FFN, TABLE_ROWS = 384, 128, 4
"""Small, and with every shape of remainder: 48 vectors pad to 64."""


def make_inputs(
    rows: int, hidden: int = HIDDEN, ffn: int = FFN, table_rows: int = TABLE_ROWS, seed: int = 0
) -> contract.FC1Inputs:
    """A synthetic batch and its prepared weight."""
    layer = synthetic.layer(rows, hidden, ffn, table_rows, seed)
    return contract.FC1Inputs(*layer.activations, *prepare_fc1_weight_fp8(layer.weight))


def without_adaln(inputs: contract.FC1Inputs) -> contract.FC1Inputs:
    return inputs._replace(adaln_scale=None, adaln_shift=None, adaln_index=None)


def edge_inputs() -> contract.FC1Inputs:
    """Six rows: one of zeros that the shift leaves zero, NaN, a sum of squares that overflows, an Inf, an index outside
    the tables, and a good one."""
    inputs = make_inputs(6)
    inputs.x[0] = 0
    inputs.x[1] = torch.nan
    inputs.x[2] = 3e38
    inputs.x[3, 9] = torch.inf
    inputs.adaln_index[0] = 0
    inputs.adaln_index[4] = -1
    inputs.adaln_shift[0] = -0.0
    return inputs


def nan_buffers(
    rows: int, hidden: int = HIDDEN, ffn: int = FFN, device: torch.device | str = "cpu"
) -> contract.FC1Buffers:
    """Buffers in which an element that is not written shows."""
    return contract.FC1Buffers(
        out=torch.full((rows, ffn), torch.nan, dtype=contract.ACTIVATION, device=device),
        workspace_q=torch.full((rows, hidden), torch.nan, device=device).to(contract.QUANTIZED),
        workspace_scale=torch.full((rows,), torch.nan, dtype=contract.SCALE, device=device),
    )


def shifted(t: torch.Tensor) -> torch.Tensor:
    """The same values, contiguous, one element beyond where an allocation begins: aligned to nothing wider."""
    return t.new_empty(t.numel() + 1)[1:].view(t.shape).copy_(t)


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
