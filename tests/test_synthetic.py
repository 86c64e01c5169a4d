import torch
from helpers import FFN, HIDDEN

import h3mlp
from h3mlp import accuracy, synthetic


def test_equal_seeds_give_equal_data():
    first, again, other = (synthetic.layer(3, 128, 64, 2, seed) for seed in (5, 5, 6))
    for name in ("x", "x_norm_weight", "adaln_scale", "adaln_shift", "adaln_index", "weight"):
        assert torch.equal(getattr(first, name), getattr(again, name))
    assert not torch.equal(first.weight, other.weight)


def test_rows_are_a_part_of_the_same_layer(layer):
    chosen = torch.tensor([4, 2])
    part = layer.rows(chosen)
    assert torch.equal(part.x, layer.x[chosen])
    assert torch.equal(part.adaln_index, layer.adaln_index[chosen])
    assert part.weight is layer.weight


def test_bf16_layer_in_blocks(layer, monkeypatch):
    """Blocks change nothing but the order of BLAS sums, that is BF16 roundings here and there."""
    whole = layer.forward_bf16()
    monkeypatch.setattr(synthetic, "BLOCK_ROWS", 32)
    torch.testing.assert_close(layer.forward_bf16(), whole, rtol=2**-6, atol=2**-6)
    assert whole.shape == (70, FFN)


def test_the_operator_replaces_the_bf16_layer(layer):
    """E4M3 rounding is 2.6% RMS in a and in w, 3.7% in h, 5.3% in y: 25.5 dB. 24 dB must be kept; any mistake in row
    order, index or scale gives less than 3 dB."""
    got = h3mlp.fc1_swiglu_fp8(*layer.activations, *h3mlp.prepare_fc1_weight_fp8(layer.weight))
    assert accuracy.compare(got, layer.forward_bf16()).snr_db > 24
    swapped = h3mlp.prepare_fc1_weight_fp8(layer.weight.roll(FFN, dims=0))
    assert accuracy.compare(h3mlp.fc1_swiglu_fp8(*layer.activations, *swapped), layer.forward_bf16()).snr_db < 3
    assert layer.x.shape[1] == HIDDEN


def test_runs_of_indices():
    found = synthetic.layer(100, 128, 64, table_rows=4).with_runs().adaln_index
    assert found.tolist() == [n * 4 // 100 for n in range(100)]
    assert found.dtype == torch.int64
