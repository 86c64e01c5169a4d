import pytest
import torch
from helpers import Allocations, bits, edge_inputs, make_inputs, nan_buffers, shifted, without_adaln
from hypothesis import given
from hypothesis import strategies as st

from h3mlp import contract, reference
from h3mlp.backends import cpu


@pytest.mark.parametrize("rows", [1, 2, 63, 64, 65, 127, 128, 129, 300])
def test_stage_1_is_the_reference_bit_for_bit(rows):
    inputs, buffers = make_inputs(rows), nan_buffers(rows)
    cpu.stage1(inputs, 1e-5, buffers.workspace_q, buffers.workspace_scale)
    want = reference.fc1_swiglu_fp8(*inputs, return_intermediates=True)
    assert torch.equal(bits(buffers.workspace_q), bits(want.a_q))
    assert torch.equal(buffers.workspace_scale, want.s_row)


@pytest.mark.parametrize("modulation", [*contract.MODULATION, None])
def test_stage_1_in_every_mode(modulation):
    inputs, buffers = edge_inputs(), nan_buffers(6)
    if modulation is None:
        inputs = without_adaln(inputs)
    cpu.stage1(inputs, 1e-5, buffers.workspace_q, buffers.workspace_scale, modulation or "fused")
    want = reference.fc1_swiglu_fp8(*inputs, modulation=modulation or "fused", return_intermediates=True)
    assert torch.equal(bits(buffers.workspace_q), bits(want.a_q))
    assert torch.equal(buffers.workspace_scale, want.s_row)


@given(st.integers(0, 2**16 - 1), st.integers(0, 2**16 - 1))
def test_decode_is_torchs_conversion(first, second):
    """Any two pairs of codes; NaN too, whose bits are kept."""
    codes = torch.tensor([first & 255, first >> 8, second & 255, second >> 8], dtype=torch.uint8)
    out = torch.empty(4)
    cpu._decode(codes.view(contract.QUANTIZED), cpu._e4m3_pairs(), out)
    assert torch.equal(bits(out), bits(codes.view(contract.QUANTIZED).float()))


@pytest.mark.parametrize(
    ("rows", "ffn", "gemm_rows", "gemm_columns"),
    [(37, 192, 16, 128), (16, 192, 16, 64), (1, 64, 2048, 512), (40, 704, 2048, 512), (40, 576, 7, 512)],
)
def test_stage_2_in_blocks(monkeypatch, rows, ffn, gemm_rows, gemm_columns):
    """Blocks that divide the problem and blocks that leave rests. Tolerance as in ``test_stage_2_share``."""
    monkeypatch.setattr(cpu, "GEMM_ROWS", gemm_rows)
    monkeypatch.setattr(cpu, "GEMM_COLUMNS", gemm_columns)
    inputs = make_inputs(rows, ffn=ffn)
    want = reference.fc1_swiglu_fp8(*inputs, return_intermediates=True)
    out = torch.full((rows, ffn), torch.nan, dtype=torch.bfloat16)
    cpu.gemm_swiglu(want.a_q, want.s_row, inputs.fc1_weight_q, inputs.fc1_weight_scale, out)
    torch.testing.assert_close(out, want.y, rtol=2**-6, atol=1e-4)
    assert (out == want.y).float().mean() >= 0.995


def test_stage_2_share():
    """At the model's hidden size at least 99.9% of the outputs equal the FP64 reference. An FP32 sum of 5376 exact
    products in blocks is off by about 2^-22 of the sum's RMS; a BF16 rounding boundary lies within that of one h in
    2^12, and each y has two h and one g."""
    inputs = make_inputs(64, hidden=5376, ffn=1024)
    want = reference.fc1_swiglu_fp8(*inputs, return_intermediates=True)
    out = torch.full((64, 1024), torch.nan, dtype=torch.bfloat16)
    cpu.gemm_swiglu(want.a_q, want.s_row, inputs.fc1_weight_q, inputs.fc1_weight_scale, out)
    assert (out == want.y).float().mean() >= 0.999


def test_a_weight_at_an_odd_byte():
    inputs, buffers, want = make_inputs(5), nan_buffers(5), nan_buffers(5)
    cpu.fc1_swiglu(inputs, 1e-5, want, "fp32")
    cpu.fc1_swiglu(inputs._replace(fc1_weight_q=shifted(inputs.fc1_weight_q)), 1e-5, buffers, "fp32")
    assert torch.equal(buffers.out, want.out)


def test_edge_rows_through_both_stages():
    inputs, buffers = edge_inputs(), nan_buffers(6)
    cpu.fc1_swiglu(inputs, 1e-5, buffers, "fp32")
    want = reference.fc1_swiglu_fp8(*inputs, return_intermediates=True)
    assert torch.equal(bits(buffers.workspace_q), bits(want.a_q))
    assert torch.equal(buffers.workspace_scale, want.s_row)
    assert (bits(buffers.out[[0, 4]]) == 0).all(), "a row of zeros, whatever their sign, gives +0"
    assert buffers.out[[1, 3]].isnan().all()
    assert buffers.out[[2, 5]].isfinite().all()


def test_memory_is_bounded(monkeypatch):
    """With small blocks, nothing that a call makes is as large as the product [M, 2F] in BF16 (1,048,576 bytes) or a
    decoded weight [2F, H] in FP32 (1,572,864): the largest is the constant table of code pairs (524,288 bytes)."""
    monkeypatch.setattr(cpu, "GEMM_ROWS", 32)
    monkeypatch.setattr(cpu, "GEMM_COLUMNS", 64)
    inputs, buffers = make_inputs(512, ffn=512), nan_buffers(512, ffn=512)
    with Allocations(*inputs, *buffers) as made:
        cpu.fc1_swiglu(inputs, 1e-5, buffers, "fp32")
    assert max(made.sizes) == 2**16 * 8
    assert buffers.out.isfinite().all()
