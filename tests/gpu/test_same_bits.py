"""What plain torch computes on a CUDA device for the contract has the bits that it has on the CPU."""

import pytest
import torch
from helpers import bits

import h3mlp
from h3mlp import contract, reference, synthetic

CUDA = torch.device("cuda")


def random_patterns(*shape: int, seed: int) -> torch.Tensor:
    """BF16 of uniformly random bits: every exponent, subnormals, Inf and NaN."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(-(2**15), 2**15, shape, generator=generator).short().view(torch.bfloat16)


def same(name: str, got: torch.Tensor, want: torch.Tensor) -> None:
    got = got.cpu()
    equal = bits(got) == bits(want)
    if want.dtype != contract.QUANTIZED:
        equal |= got.isnan() & want.isnan()
    assert equal.all(), f"{name}: {(~equal).sum()} of {equal.numel()} differ"


@pytest.mark.parametrize("data", ["normal", "patterns"])
def test_stage_1_of_the_reference(data):
    layer = synthetic.layer(2000, ffn=64)
    weight = h3mlp.prepare_fc1_weight_fp8(layer.weight)
    if data == "patterns":  # in half of the rows; tables and norm weight stay
        layer.x[::2] = random_patterns(1000, contract.HIDDEN, seed=1)
    layer.adaln_index[:3] = torch.tensor([-1, 9, 2**62])
    want = reference.fc1_swiglu_fp8(*layer.activations, *weight, return_intermediates=True)
    on_gpu = [t.to(CUDA) for t in (*layer.activations, *weight)]
    got = reference.fc1_swiglu_fp8(*on_gpu, return_intermediates=True)
    for name in ("sum_of_squares", "rstd", "n", "a", "s_row", "a_q", "acc", "h"):
        same(name, getattr(got, name), getattr(want, name))


@pytest.mark.parametrize("data", ["normal", "patterns"])
def test_quantization_of_y_and_the_gated_residual(data):
    """Steps 12, 13, 15 and 16, on random bits too: whatever y, o, gate and residual hold."""

    def made(rows: int, columns: int, seed: int) -> torch.Tensor:
        if data == "patterns":
            return random_patterns(rows, columns, seed=seed)
        return torch.randn(rows, columns, generator=torch.Generator().manual_seed(seed)).bfloat16()

    y, o, residual = made(500, contract.FFN, 1), made(500, contract.HIDDEN, 2), made(500, contract.HIDDEN, 3)
    gate, index = made(9, contract.HIDDEN, 4), torch.randint(-2, 12, (500,))
    s_y = reference.row_scale(y)
    on_gpu = reference.row_scale(y.to(CUDA))
    same("s_y", on_gpu, s_y)
    same("y_q", reference.quantize(y.to(CUDA), on_gpu), reference.quantize(y, s_y))
    acc, w_scale = o.float() * 1000, torch.rand(contract.HIDDEN)
    got = reference.dequantize(acc.to(CUDA), on_gpu, w_scale.to(CUDA))
    same("o", got, reference.dequantize(acc, s_y, w_scale))
    got = reference.gated_residual(*(t.to(CUDA) for t in (o, gate, residual, index)))
    same("out", got, reference.gated_residual(o, gate, residual, index))
    same("out, no gate", reference.gated_residual(o.to(CUDA), None, residual.to(CUDA), None), residual + o)


def test_saturate_and_divide_on_every_bf16_pair_of_mantissas():
    mantissas = (0x3F80 + torch.arange(128)).short().view(torch.bfloat16)
    a = mantissas.repeat(128, 1)
    s_row = reference.divide(mantissas.float(), contract.E4M3_MAX)
    same("codes", reference.quantize(a.to(CUDA), s_row.to(CUDA)), reference.quantize(a, s_row))
    same("scales", reference.divide(mantissas.float().to(CUDA), contract.E4M3_MAX), s_row)


@pytest.mark.parametrize("data", ["normal", "patterns"])
def test_prepare(data):
    weight = synthetic.layer(1, ffn=1024).weight if data == "normal" else random_patterns(2048, 5376, seed=2)
    want_q, want_s = h3mlp.prepare_fc1_weight_fp8(weight)
    got_q, got_s = h3mlp.prepare_fc1_weight_fp8(weight.to(CUDA), chunk_rows=520)
    same("codes", got_q, want_q)
    same("scales", got_s, want_s)


def test_prepare_memory_at_the_real_size():
    """The outputs, one FP32 chunk of 44 MB, and no more than 1 MB besides. Counted is what was asked of the allocator:
    what it hands out for that depends on the blocks that other tests have left, by up to 1 MB each."""
    weight = torch.randn(contract.FC1_ROWS, contract.HIDDEN, device=CUDA).bfloat16()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_stats()["requested_bytes.all.current"]
    outputs = h3mlp.prepare_minimax_h3_fc1_weight_fp8(weight)
    peak = torch.cuda.memory_stats()["requested_bytes.all.peak"] - before
    chunk = 2048 * contract.HIDDEN * 4
    assert sum(t.nbytes for t in outputs) <= peak <= sum(t.nbytes for t in outputs) + chunk + 2**20
