import numpy_contract as oracle
import pytest
import torch
from helpers import FFN, HIDDEN, Allocations, bits

import h3mlp
from h3mlp import contract, synthetic


def prepared_equals(weight, chunk_rows=2048):
    want_q, want_s = oracle.prepare(oracle.from_torch(weight))
    q, s = h3mlp.prepare_fc1_weight_fp8(weight, chunk_rows)
    oracle.assert_same_bits(s, want_s, "scale")
    oracle.assert_same_bits(q, want_q, "codes")
    return q, s


@pytest.mark.parametrize("chunk_rows", [1, 8, 15, 24, 128, 2048])
def test_prepare_is_bitwise_for_any_chunk(layer, chunk_rows):
    prepared_equals(layer.weight, chunk_rows)


def test_prepare_extreme_rows(layer):
    weight = layer.weight.clone()
    weight[0] = 0  # floored scale, codes +0
    weight[1] = -0.0  # codes -0
    weight[2] *= 2.0**-120  # under the floor: subnormal BF16 too
    weight[3, 5] = 3e38
    weight[130] = torch.tensor([1.0, -448.0]).repeat(HIDDEN // 2)  # scale exactly 1
    weight[131, 0] = torch.inf  # scale Inf: the others 0, Inf / Inf = NaN
    weight[132, 9] = torch.nan  # scale NaN: the whole row
    q, s = prepared_equals(weight)
    assert s[oracle.packed_row(4, 1)].isnan()  # row 132 is up row 4
    assert (bits(q)[oracle.packed_row(4, 1)] == 0x7F).all()
    assert s[oracle.packed_row(2, 1)] == 1


def test_prepare_of_random_bits():
    """Every BF16 pattern, in no order."""
    generator = torch.Generator().manual_seed(3)
    patterns = torch.randperm(2**16, generator=generator)[: 2 * FFN * 128].view(2 * FFN, 128)
    prepared_equals((patterns - 2**15).to(torch.int16).view(torch.bfloat16))


def test_prepare_takes_any_strides(layer):
    want = h3mlp.prepare_fc1_weight_fp8(layer.weight)
    wide = torch.zeros(2 * FFN, HIDDEN + 8, dtype=torch.bfloat16)
    wide[:, 8:] = layer.weight
    for view in (wide[:, 8:], layer.weight.T.contiguous().T):
        got = h3mlp.prepare_fc1_weight_fp8(view)
        assert torch.equal(bits(got[0]), bits(want[0]))
        assert torch.equal(got[1], want[1])


def test_prepare_of_a_parameter_keeps_no_graph(layer):
    q, s = h3mlp.prepare_fc1_weight_fp8(torch.nn.Parameter(layer.weight))
    assert not q.requires_grad
    assert not s.requires_grad


def test_prepare_memory_is_the_outputs_and_one_chunk(layer):
    """With chunks of 16 rows: the codes (98,304 bytes), 16 rows in FP32 (24,576 bytes), once, and nothing else above an
    eighth of that."""
    with Allocations() as made:
        h3mlp.prepare_fc1_weight_fp8(layer.weight, chunk_rows=16)
    chunk = 16 * HIDDEN * 4
    assert sorted(size for size in made.sizes if size > chunk // 8) == [chunk, 2 * FFN * HIDDEN]


def test_prepare_refuses():
    def refused(match, weight, **options):
        with pytest.raises(ValueError, match=match):
            h3mlp.prepare_fc1_weight_fp8(weight, **options)

    good = torch.zeros(128, 128, dtype=torch.bfloat16)
    refused(r"fc1_weight must be bfloat16 .*; it is float32 \[128, 128\]", good.float())
    refused(r"fc1_weight must be .*it is bfloat16 \[120, 128\]", good[:120])
    refused(r"fc1_weight must be .*it is bfloat16 \[128, 64\]", good[:, :64])
    refused(r"fc1_weight must be .*it is bfloat16 \[128\]", good[:, 0])
    refused(r"fc1_weight must be .*it is bfloat16 \[0, 128\]", good[:0])
    refused(r"fc1_weight must be a dense torch.Tensor; it is None", None)
    refused(r"chunk_rows must be a positive int; it is 0", good, chunk_rows=0)
    refused(r"chunk_rows must be a positive int; it is 2.5", good, chunk_rows=2.5)
    refused(r"fc1_weight must have its gate rows before", contract.tag_row_order(good.clone(), contract.PACKED))


def test_the_models_prepare_checks_its_dimensions(layer):
    with pytest.raises(ValueError, match=r"fc1_weight must be \[28672, 5376\].*it is bfloat16 \[256, 384\]"):
        h3mlp.prepare_minimax_h3_fc1_weight_fp8(layer.weight)
    with pytest.raises(ValueError, match=r"fc1_weight must be a dense torch\.Tensor"):
        h3mlp.prepare_minimax_h3_fc1_weight_fp8("weight.safetensors")


def test_rows_are_packed_in_the_documented_order():
    rows = torch.arange(256)
    packed = h3mlp.pack_fc1_rows(rows)
    for column in range(128):
        assert packed[oracle.packed_row(column, 0)] == column
        assert packed[oracle.packed_row(column, 1)] == 128 + column


@pytest.mark.parametrize("shape", [(128,), (256, 128), (384, 3, 5)])
def test_unpack_is_the_exact_inverse(shape):
    rows = torch.randint(0, 255, shape, dtype=torch.uint8)
    assert torch.equal(h3mlp.unpack_fc1_rows(h3mlp.pack_fc1_rows(rows)), rows)
    assert torch.equal(h3mlp.pack_fc1_rows(h3mlp.unpack_fc1_rows(rows)), rows)
    codes = rows.view(torch.float8_e4m3fn)  # the bits of NaN survive too
    assert torch.equal(bits(h3mlp.unpack_fc1_rows(h3mlp.pack_fc1_rows(codes))), rows)


def test_row_order_refuses_what_is_known_to_be_wrong(inputs):
    halves = h3mlp.unpack_fc1_rows(inputs.fc1_weight_q)
    with pytest.raises(ValueError, match="rows must not be in row order 'gate8_up8'"):
        h3mlp.pack_fc1_rows(inputs.fc1_weight_q)
    with pytest.raises(ValueError, match="rows must not be in row order 'gate_up'"):
        h3mlp.unpack_fc1_rows(halves)
    with pytest.raises(ValueError, match=r"rows must be \[2F, ...\] with F a multiple of 64"):
        h3mlp.pack_fc1_rows(torch.zeros(96, 4))


class TestPackedFC1:
    def test_carries_weight_and_scale_together(self, layer, inputs):
        packed = h3mlp.PackedFC1.from_bf16(layer.weight)
        weight, scale = packed
        assert torch.equal(bits(weight), bits(inputs.fc1_weight_q))
        assert torch.equal(scale, inputs.fc1_weight_scale)
        assert torch.equal(h3mlp.fc1_swiglu_fp8(*layer.activations, *packed), h3mlp.fc1_swiglu_fp8(*inputs))
        assert packed.to("cpu").layout == contract.PACKED

    def test_dequantize_is_within_half_a_step(self, layer):
        """E4M3 rounds to 3 mantissa bits: half a step is 2^-4 of a normal value; the smallest step is 2^-9 scales. BF16
        of the product adds 2^-9."""
        packed = h3mlp.PackedFC1.from_bf16(layer.weight)
        scale = h3mlp.unpack_fc1_rows(packed.scale)[:, None]
        error = (packed.dequantize().float() - layer.weight.float()).abs()
        allowed = layer.weight.float().abs() * (2**-4 + 2**-9) + scale * 2**-10
        assert (error <= allowed).all()
        assert error.max() > 0

    def test_refuses(self, inputs):
        weight, scale = inputs.fc1_weight_q, inputs.fc1_weight_scale
        for match, arguments in (
            ("layout must be 'gate8_up8'; it is 'gate_up'", (weight, scale, "gate_up")),
            ("weight must be float8_e4m3fn", (weight.float(), scale)),
            ("weight must be in packed row order", (h3mlp.unpack_fc1_rows(weight), scale)),
            ("scale must be in packed row order", (weight, h3mlp.unpack_fc1_rows(scale))),
            (r"scale must be float32 \[256\]", (weight, scale[:-1])),
            ("scale must be on cpu", (weight, scale.to("meta"))),
            ("scale must be a dense torch.Tensor", (weight, 1.0)),
        ):
            with pytest.raises(ValueError, match=match):
                h3mlp.PackedFC1(*arguments)


class TestFC2:
    @pytest.fixture
    def weight(self):
        return synthetic.mlp(1, HIDDEN, FFN).fc2_weight

    @pytest.mark.parametrize("chunk_rows", [1, 7, 128, 1024])
    def test_prepare_is_bitwise_for_any_chunk(self, weight, chunk_rows):
        weight = weight.clone()
        weight[0] = 0
        weight[1, 3] = 3e38
        weight[2, 5] = torch.nan
        weight[3] *= 2.0**-120
        weight[4, 0] = torch.inf
        q, s = h3mlp.prepare_fc2_weight_fp8(weight, chunk_rows)
        want_q, want_s = oracle.prepare_fc2(oracle.from_torch(weight))
        oracle.assert_same_bits(s, want_s, "scale")
        oracle.assert_same_bits(q, want_q, "codes")
        assert s[2].isnan()

    def test_rows_are_those_of_fc1s_formula(self, weight):
        """Codes and scales of a row do not depend on which weight it belongs to."""
        q, s = h3mlp.prepare_fc2_weight_fp8(weight)
        square = weight[:, :FFN].contiguous()
        of_fc1 = h3mlp.prepare_fc1_weight_fp8(square)
        assert torch.equal(bits(h3mlp.unpack_fc1_rows(of_fc1[0])), bits(q))
        assert torch.equal(h3mlp.unpack_fc1_rows(of_fc1[1]), s)

    def test_any_strides_and_no_graph(self, weight):
        want = h3mlp.prepare_fc2_weight_fp8(weight)
        for view in (weight.T.contiguous().T, torch.nn.Parameter(weight)):
            q, s = h3mlp.prepare_fc2_weight_fp8(view)
            assert torch.equal(bits(q), bits(want[0]))
            assert torch.equal(s, want[1])
            assert not q.requires_grad

    def test_memory_is_the_outputs_and_one_chunk(self, weight):
        """With chunks of 16 rows: scales, 16 rows in FP32, codes, and nothing else above an eighth of the chunk."""
        with Allocations() as made:
            h3mlp.prepare_fc2_weight_fp8(weight, chunk_rows=16)
        chunk = 16 * FFN * 4
        assert sorted(size for size in made.sizes if size > chunk // 8) == [4 * HIDDEN, chunk, HIDDEN * FFN]

    @pytest.mark.parametrize(
        ("change", "match"),
        [
            (lambda t: t.float(), r"fc2_weight must be bfloat16 \[H, F\] .*; it is float32 \[384, 128\]"),
            (lambda t: t[:100], r"fc2_weight must be .* H a multiple of 128 and F of 64; it is bfloat16 \[100, 128\]"),
            (lambda t: t[:, :96], r"it is bfloat16 \[384, 96\]"),
            (lambda t: t[:0], r"it is bfloat16 \[0, 128\]"),
            (lambda t: t[0], r"it is bfloat16 \[128\]"),
            (lambda _: None, "fc2_weight must be a dense torch.Tensor; it is None"),
        ],
    )
    def test_refuses(self, weight, change, match):
        for prepare in (h3mlp.prepare_fc2_weight_fp8, lambda w: h3mlp.PackedMLP.from_bf16(weight, w)):
            with pytest.raises(ValueError, match=match):
                prepare(change(weight))
        with pytest.raises(ValueError, match="chunk_rows must be a positive int; it is 0"):
            h3mlp.prepare_fc2_weight_fp8(weight, chunk_rows=0)

    def test_the_models_prepare_checks_its_dimensions(self, weight):
        with pytest.raises(ValueError, match=r"fc2_weight must be \[5376, 14336\], the FC2 weight of MiniMax-H3"):
            h3mlp.prepare_minimax_h3_fc2_weight_fp8(weight)


class TestPackedMLP:
    @pytest.fixture
    def packed(self, layer):
        return h3mlp.PackedMLP.from_bf16(layer.weight, synthetic.mlp(1, HIDDEN, FFN).fc2_weight)

    def test_carries_both_weights(self, layer, packed):
        gate = torch.ones_like(layer.adaln_scale)
        got = h3mlp.mlp_fp8(*layer.activations, gate, layer.x, *packed)
        weights = *packed.fc1, packed.fc2_weight, packed.fc2_scale
        assert torch.equal(got, h3mlp.mlp_fp8(*layer.activations, gate, layer.x, *weights))
        assert all(torch.equal(bits(a), bits(b)) for a, b in zip(packed.to("cpu"), packed, strict=True))

    def test_dequantize(self, packed):
        """Bound of ``TestPackedFC1.test_dequantize_is_within_half_a_step``, for FC2 a scale a row."""
        fc1, fc2 = packed.dequantize()
        assert torch.equal(fc1, packed.fc1.dequantize())
        weight = synthetic.mlp(1, HIDDEN, FFN).fc2_weight.float()
        error = (fc2.float() - weight).abs()
        assert (error <= weight.abs() * (2**-4 + 2**-9) + packed.fc2_scale[:, None] * 2**-10).all()
        assert error.max() > 0

    def test_halves_the_other_way_round(self, layer, packed):
        gate, up = layer.weight.chunk(2)
        other = h3mlp.PackedMLP.from_bf16(torch.cat([up, gate]), synthetic.mlp(1, HIDDEN, FFN).fc2_weight, "up_gate")
        assert all(torch.equal(bits(a), bits(b)) for a, b in zip(packed, other, strict=True))

    def test_refuses(self, packed):
        fc1, weight, scale = packed.fc1, packed.fc2_weight, packed.fc2_scale
        for match, arguments in (
            ("fc1 must be an h3mlp.PackedFC1", (tuple(fc1), weight, scale)),
            (r"fc2_weight must be float8_e4m3fn \[384, 128\], as FC1's weight says", (fc1, weight.T, scale)),
            (r"fc2_weight must be float8_e4m3fn", (fc1, weight.float(), scale)),
            ("fc2_weight must be contiguous", (fc1, weight.T.contiguous().T, scale)),
            (r"fc2_scale must be float32 \[384\]", (fc1, weight, scale[:-1])),
            ("fc2_scale must be on cpu", (fc1, weight, scale.to("meta"))),
            ("fc2_scale must be a dense torch.Tensor", (fc1, weight, 1.0)),
        ):
            with pytest.raises(ValueError, match=match):
                h3mlp.PackedMLP(*arguments)
