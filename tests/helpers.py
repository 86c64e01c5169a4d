"""What several test files share."""

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from h3mlp import accuracy, contract, prepare_fc1_weight_fp8, prepare_fc2_weight_fp8, reference, synthetic

HIDDEN, FFN, TABLE_ROWS = 384, 128, 4
"""Small, and with every shape of remainder: 48 vectors pad to 64."""


def make_inputs(
    rows: int, hidden: int = HIDDEN, ffn: int = FFN, table_rows: int = TABLE_ROWS, seed: int = 0
) -> contract.FC1Inputs:
    """A synthetic batch and its prepared weight."""
    layer = synthetic.layer(rows, hidden, ffn, table_rows, seed)
    return contract.FC1Inputs(*layer.activations, *prepare_fc1_weight_fp8(layer.weight))


def make_mlp_inputs(
    rows: int, hidden: int = HIDDEN, ffn: int = FFN, table_rows: int = TABLE_ROWS, seed: int = 0
) -> contract.MLPInputs:
    """A synthetic batch and its prepared weights, with a residual that is not x."""
    mlp = synthetic.mlp(rows, hidden, ffn, table_rows, seed)
    weights = *prepare_fc1_weight_fp8(mlp.fc1.weight), *prepare_fc2_weight_fp8(mlp.fc2_weight)
    inputs = contract.MLPInputs(*mlp.activations, *weights)
    return inputs._replace(residual=mlp.residual.flip(-1))


def without_adaln(inputs):
    """The same without what the token refiner has not."""
    names = ("adaln_scale", "adaln_shift", "adaln_index", "gate")
    return inputs._replace(**{name: None for name in names if name in inputs._fields})


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


def mlp_edge_inputs() -> contract.MLPInputs:
    """The same rows for the MLP, with zeros and NaN in the residual where they must stay."""
    fc1, inputs = edge_inputs(), make_mlp_inputs(6)
    inputs.residual[4, ::2] = -0.0
    inputs.residual[4, 1] = torch.nan
    return inputs._replace(**fc1._asdict())


def nan_buffers(
    rows: int, hidden: int = HIDDEN, ffn: int = FFN, device: torch.device | str = "cpu"
) -> contract.FC1Buffers:
    """Buffers in which an element that is not written shows."""
    return contract.FC1Buffers(
        out=torch.full((rows, ffn), torch.nan, dtype=contract.ACTIVATION, device=device),
        workspace_q=torch.full((rows, hidden), torch.nan, device=device).to(contract.QUANTIZED),
        workspace_scale=torch.full((rows,), torch.nan, dtype=contract.SCALE, device=device),
    )


def nan_mlp_buffers(
    rows: int, hidden: int = HIDDEN, ffn: int = FFN, device: torch.device | str = "cpu"
) -> contract.MLPBuffers:
    fc1 = nan_buffers(rows, hidden, ffn, device)
    of_y = nan_buffers(rows, ffn, hidden, device)
    return contract.MLPBuffers(of_y.out, *fc1[1:], fc1.out, *of_y[1:])


def mlp_outside(out: torch.Tensor, o: torch.Tensor, inputs: contract.MLPInputs) -> torch.Tensor:
    """``accuracy.mlp_outside`` of these inputs."""
    return accuracy.mlp_outside(out, o, inputs.gate, inputs.residual, inputs.adaln_index)


def exact_o(got: contract.MLPBuffers, inputs: contract.MLPInputs) -> torch.Tensor:
    """o of the codes of y that were written, accumulated in FP64."""
    acc = reference.accumulate(got.workspace_y_q, inputs.fc2_weight_q)
    return reference.dequantize(acc, got.workspace_y_scale, inputs.fc2_weight_scale)


def assert_mlp_codes(got: contract.MLPBuffers, want: reference.Stage1) -> None:
    """Codes and scales of x to the bit, and those of y to the bit of what the y that was written becomes."""
    assert torch.equal(bits(got.workspace_a_q), bits(want.a_q))
    assert torch.equal(got.workspace_a_scale, want.s_row)
    s_y = reference.row_scale(got.workspace_y)
    assert torch.equal(got.workspace_y_scale, s_y)
    assert torch.equal(bits(got.workspace_y_q), bits(reference.quantize(got.workspace_y, s_y)))


def assert_mlp(got: contract.MLPBuffers, inputs: contract.MLPInputs, **options) -> None:
    """What the CPU wrote: codes and scales of x to the bit; y as FC1's tests allow it; codes and scales of y to the
    bit, of the y that was written; and out by the rule of the original's public test, with the exact o of those codes
    and with no exception. FP32 sums of so few products are off by 2^-18: at least 99% of out has its very bits."""
    want = reference.fc1_swiglu_fp8(*inputs.fc1, **options, return_intermediates=True)
    assert_mlp_codes(got, want)
    torch.testing.assert_close(got.workspace_y, want.y, rtol=2**-6, atol=1e-4, equal_nan=True)
    o = exact_o(got, inputs)
    assert not mlp_outside(got.out, o, inputs).any()
    exact = reference.gated_residual(o, inputs.gate, inputs.residual, inputs.adaln_index)
    assert ((got.out == exact) | (got.out.isnan() & exact.isnan())).float().mean() >= 0.99


def shifted(t: torch.Tensor) -> torch.Tensor:
    """The same values, contiguous, one element beyond where an allocation begins: aligned to nothing wider."""
    return t.new_empty(t.numel() + 1)[1:].view(t.shape).copy_(t)


def bits(t: torch.Tensor) -> torch.Tensor:
    """The tensor's bits: what "equal" means where NaN and -0 count."""
    return t.view({1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[t.element_size()])


def float8_allclose(a, b, **options):
    """torch.allclose has no float8; opcheck calls it on every argument to see that none was written."""
    if a.dtype == contract.QUANTIZED:
        return torch.equal(bits(a), bits(b))
    return ALLCLOSE(a, b, **options)


ALLCLOSE = torch.allclose


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
