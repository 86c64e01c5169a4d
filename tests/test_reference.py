"""Each formula line against NumPy, bit for bit in stage 1, on random, extreme and adversarial inputs."""

from dataclasses import fields
from fractions import Fraction

import numpy as np
import numpy_contract as oracle
import pytest
import torch
from helpers import make_mlp_inputs, mlp_edge_inputs, without_adaln
from hypothesis import example, given
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

from h3mlp import contract, prepare_fc1_weight_fp8, reference

BF16_SPECIALS = [
    0x0000, 0x8000,  # +0, -0
    0x0001, 0x8001, 0x007F, 0x0080,  # subnormals, smallest normal
    0x1F80, 0x2000, 0x203F, 0x1FFF,  # around 2^-64: squares around the smallest normal and subnormal FP32
    0x1A80, 0x1B35,  # squares of 2^-149, 2^-148 and a tie below them
    0x3F80, 0xBF80, 0x3F81, 0x40E0, 0x43E0,  # 1, -1, 1 + ulp, 7, 448
    0x5F00, 0x5F80, 0x7F00, 0x7F7F, 0xFF7F,  # squares that overflow, the largest
    0x7F80, 0xFF80, 0x7FC0, 0xFFC0, 0x7F81,  # Inf, -Inf, NaN, -NaN, signalling NaN
]  # fmt: skip

any_bf16 = st.one_of(st.sampled_from(BF16_SPECIALS), st.integers(0, 0xFFFF))
normal_bf16 = st.integers(0x3C00, 0x4200).flatmap(lambda bits: st.sampled_from([bits, bits | 0x8000]))


def bf16_matrix(rows: int, columns: int, elements=any_bf16) -> st.SearchStrategy[np.ndarray]:
    return arrays(np.uint16, (rows, columns), elements=elements).map(lambda a: a.view(oracle.BF16))


def both(function, *arguments: np.ndarray):
    return function(*(oracle.to_torch(a) if isinstance(a, np.ndarray) else a for a in arguments))


def exact_rn32(value: Fraction) -> np.float32:
    """The finite FP32 number nearest to a rational, ties to even, by search around the float that Python rounds to."""
    largest = np.finfo(np.float32).max
    with np.errstate(over="ignore"):
        guess = np.clip(np.float32(float(value)), -largest, largest)
        around = [np.nextafter(guess, np.float32(-np.inf)), guess, np.nextafter(guess, np.float32(np.inf))]
    around = [c for c in around if np.isfinite(c)]
    nearest = min(abs(Fraction(float(c)) - value) for c in around)
    tied = [c for c in around if abs(Fraction(float(c)) - value) == nearest]
    return min(tied, key=lambda c: int(c.view(np.uint32)) & 1)


finite_bf16 = any_bf16.filter(lambda bits: bits & 0x7F80 != 0x7F80)
finite_fp32 = st.floats(width=32, allow_nan=False, allow_infinity=False)


@given(finite_bf16, finite_bf16, finite_fp32)
@example(0x1A80, 0x1A80, 2.0**-149)
@example(0x7F00, 0x4000, -(2.0**127))  # the product alone overflows FP32
@example(0x3F81, 0x3F81, 2.0**-126)
def test_fma_rounds_once(a, b, c):
    """Against rational arithmetic, so the claim in the docstring of ``fma`` is tested and not assumed. Values that
    round to 2^128 or beyond are Inf."""
    a, b = (np.array([bits], np.uint16).view(oracle.BF16) for bits in (a, b))
    value = Fraction(float(a[0])) * Fraction(float(b[0])) + Fraction(float(np.float32(c)))
    got = both(reference.fma, a, b, np.array([c], np.float32)).numpy()[0]
    largest = Fraction(float(np.finfo(np.float32).max))
    if abs(value) >= largest + Fraction(2) ** 103:  # half a step past the largest number: the tie goes to 2^128
        assert np.isinf(got)
        assert (got > 0) == (value > 0)
    else:
        assert got == exact_rn32(value)


@given(bf16_matrix(2, 256), st.sampled_from([1, 2, 8, 17, 32]))
def test_sum_of_squares(x, vectors):
    x = np.ascontiguousarray(x[:, : 8 * vectors])
    with np.errstate(all="ignore"):
        want = oracle.sum_of_squares(x)
    oracle.assert_same_bits(both(reference.sum_of_squares, x), want)


def test_sum_of_squares_has_the_documented_order():
    """At 2^24 FP32 counts in twos: a lone 1 that meets it is a tie and is lost, a 2 formed before is kept. H = 5376 has
    672 vectors, padded to 1024, so vector v meets v + 512 first, then v + 256, and at last v + 1."""
    x = torch.zeros(1, 5376, dtype=torch.bfloat16)
    x[0, 0] = 4096.0  # 2^24 in vector 0
    x[0, 8 * 512] = 1.0  # meets vector 0 first, alone: lost
    x[0, 8 * 256] = 1.0  # meets it next, alone: lost
    assert reference.sum_of_squares(x).item() == 2**24
    x[0, 8 * 1] = x[0, 8 * 257] = 1.0  # meet each other before vector 0: kept
    assert reference.sum_of_squares(x).item() == 2**24 + 2
    x[0, 1] = x[0, 2] = 1.0  # in vector 0 itself, one after the other: lost
    assert reference.sum_of_squares(x).item() == 2**24 + 2


@given(
    arrays(np.float32, 16, elements=st.floats(0, width=32) | st.just(np.float32(np.inf))),
    st.sampled_from([128, 384, 5376]),
    st.sampled_from([1e-5, 1e-6, 1e-30, 2.0**-149, 1.0]),
)
def test_reciprocal_rms(ss, hidden, eps):
    with np.errstate(all="ignore"):
        want = oracle.reciprocal_rms(ss, hidden, eps)
    oracle.assert_same_bits(both(reference.reciprocal_rms, ss, hidden, eps), want)


@given(bf16_matrix(2, 32), arrays(np.float32, 2, elements=st.floats(0, width=32)), bf16_matrix(1, 32))
def test_rms_norm(x, rstd, weight):
    with np.errstate(all="ignore"):
        want = oracle.rms_norm(x, rstd, weight[0])
    oracle.assert_same_bits(both(reference.rms_norm, x, rstd, weight[0]), want)


def test_scale_plus_one_for_every_bf16():
    scale = np.arange(2**16, dtype=np.uint16).view(oracle.BF16)
    with np.errstate(all="ignore"):
        want = (np.float32(1) + scale.astype(np.float32)).astype(oracle.BF16)
    oracle.assert_same_bits(both(reference.scale_plus_one, scale), want)


@given(
    bf16_matrix(6, 32),
    bf16_matrix(3, 32),
    bf16_matrix(3, 32),
    st.lists(st.sampled_from([0, 1, 2, -1, 3, -(2**31), 2**31 - 1]), min_size=6, max_size=6),
    st.sampled_from([np.int32, np.int64]),
    st.sampled_from(contract.MODULATION),
)
def test_adaln(n, scale, shift, index, dtype, modulation):
    index = np.array(index, dtype)
    with np.errstate(all="ignore"):
        want = oracle.adaln(n, scale, shift, index, modulation)
    got = both(reference.adaln, n, scale, shift, index, modulation)
    oracle.assert_same_bits(got, want)
    outside = oracle.to_torch((index < 0) | (index > 2))
    assert (got[outside].view(torch.int16) == 0).all(), "rows with a bad index must be +0"


@given(bf16_matrix(3, 32))
def test_row_scale(a):
    oracle.assert_same_bits(both(reference.row_scale, a), oracle.row_scale(a))


@given(bf16_matrix(3, 32))
def test_quantize(a):
    s_row = oracle.row_scale(a)
    with np.errstate(all="ignore"):
        want = oracle.quantize(a, s_row)
    oracle.assert_same_bits(both(reference.quantize, a, s_row), want)


def test_quantize_divides_truly():
    """All pairs of a BF16 mantissa of |a| and one of amax, over the binades that keep a normal code: 128 * 128 * 20.

    Multiplying by the reciprocal of s_row gets some of them wrong, which shows that the data can tell the two apart.
    """
    mantissas = (0x3F80 + np.arange(128)).astype(np.uint16).view(oracle.BF16)
    amax, a, shift = (grid.ravel() for grid in np.meshgrid(mantissas, mantissas, np.arange(20), indexing="ij"))
    a = np.ldexp(a.astype(np.float32), -shift.astype(np.int32)).astype(oracle.BF16)
    keep = a.astype(np.float32) <= amax.astype(np.float32)
    amax, a = amax[keep], a[keep]
    s_row = amax.astype(np.float32) / np.float32(448)
    exact = oracle.e4m3(a.astype(np.float32) / s_row)
    oracle.assert_same_bits(both(reference.quantize, a[:, None], s_row), exact[:, None])
    by_reciprocal = oracle.e4m3(a.astype(np.float32) * (np.float32(1) / s_row))
    assert (by_reciprocal.view(np.uint8) != exact.view(np.uint8)).sum() > 0


def test_saturate_gives_every_nan_the_code_0x7f():
    v = torch.tensor([float("nan"), -float("nan"), float("inf"), -float("inf"), 464.0, -1e9, -0.0])
    v[1] = torch.tensor(-0x400000, dtype=torch.int32).view(torch.float32)  # 0xFFC00000, a negative NaN
    codes = reference.saturate_(v).to(contract.QUANTIZED).view(torch.uint8)
    assert codes.tolist() == [0x7F, 0x7F, 0x7E, 0xFE, 0x7E, 0xFE, 0x80]


@given(st.integers(0, 2**32 - 1), st.integers(1, 4))
def test_accumulate_is_exact(seed, rows):
    """Against integers: an E4M3 number is an integer times 2^-9, so a product is one times 2^-18. One rounding to FP32
    remains, and float32 of the exact rational is that."""
    codes = np.random.default_rng(seed).integers(0, 256, (rows + 16, 128), dtype=np.uint8)
    codes[codes % 128 == 127] = 0
    values = codes.view(oracle.E4M3)
    integers = np.ldexp(values.astype(np.float64), 9).astype(np.int64)
    exact = integers[:rows] @ integers[rows:].T
    want = np.array([[exact_rn32(Fraction(int(v), 2**18)) for v in row] for row in exact])
    oracle.assert_same_bits(both(reference.accumulate, values[:rows], values[rows:]), want)


@given(
    arrays(np.float32, (3, 16), elements=st.floats(width=32)),
    arrays(np.float32, 3, elements=st.floats(0, width=32)),
    arrays(np.float32, 16, elements=st.floats(0, width=32)),
)
def test_dequantize(acc, s_row, w_scale):
    with np.errstate(all="ignore"):
        want = ((acc * s_row[:, None]) * w_scale).astype(oracle.BF16)
    oracle.assert_same_bits(both(reference.dequantize, acc, s_row, w_scale), want)


def test_dequantize_multiplies_from_left_to_right():
    """Among 262,144 products, some would round otherwise with the two scales multiplied first."""
    generator = np.random.default_rng(0)
    acc = generator.normal(size=(512, 512)).astype(np.float32)
    s_row, w_scale = (generator.uniform(1, 2, 512).astype(np.float32) for _ in range(2))
    want = ((acc * s_row[:, None]) * w_scale).astype(oracle.BF16)
    oracle.assert_same_bits(both(reference.dequantize, acc, s_row, w_scale), want)
    other = (acc * (s_row[:, None] * w_scale)).astype(oracle.BF16)
    assert (other != want).any()


def test_silu_for_every_bf16():
    """Within one BF16 number of the exact value, and equal for nearly all of the 49,714 finite ones above -88.7: FP32
    is off by about 2^-22 and crosses a rounding boundary of BF16 (spacing 2^-8) once in 2^13 values or less, so 6 may
    differ with another math library's exp; 12 are allowed. Below -88.73 the FP32 formula overflows to v / Inf = -0,
    where the exact value is under 3e-37."""
    every = np.arange(2**16, dtype=np.uint16).view(oracle.BF16)
    v = every[np.isfinite(every.astype(np.float32))]
    exact = v.astype(np.longdouble)
    with np.errstate(all="ignore"):
        exact = (exact / (1 + np.exp(-exact))).astype(np.float64)
    got = oracle.from_torch(both(reference.silu, v)).astype(np.float64)
    inside = v.astype(np.float32) > -88.7
    assert (np.abs(got[~inside]) == 0).all()
    want = exact[inside].astype(np.float32).astype(oracle.BF16).astype(np.float64)
    wrong = got[inside] != want
    assert wrong.sum() <= 12
    np.testing.assert_allclose(got[inside][wrong], want[wrong], rtol=2**-7)
    special = reference.silu(torch.tensor([torch.inf, -torch.inf, torch.nan, 0.0, -0.0], dtype=torch.bfloat16))
    assert special[0] == torch.inf
    assert special[1:3].isnan().all()
    assert special[3:].view(torch.int16).tolist() == [0, -(2**15)]


@given(bf16_matrix(2, 16, normal_bf16), bf16_matrix(2, 16))
def test_swiglu(gate, up):
    """The product is bit for bit; silu has its own test."""
    g = oracle.from_torch(both(reference.silu, gate))
    with np.errstate(all="ignore"):
        want = (g.astype(np.float32) * up.astype(np.float32)).astype(oracle.BF16)
    oracle.assert_same_bits(both(reference.swiglu, gate, up), want)


def test_gate_and_up_are_the_documented_columns():
    h = torch.arange(256).view(1, 256)
    gate, up = reference.gate_and_up(h)
    columns = np.arange(128)
    assert gate[0].tolist() == oracle.packed_row(columns, 0).tolist()
    assert up[0].tolist() == oracle.packed_row(columns, 1).tolist()


@given(
    bf16_matrix(5, 128),
    bf16_matrix(1, 128, normal_bf16),
    bf16_matrix(2, 128),
    bf16_matrix(2, 128),
    st.lists(st.sampled_from([0, 1, -1, 2]), min_size=5, max_size=5),
    st.sampled_from([1e-5, 1e-12]),
    st.sampled_from([*contract.MODULATION, None]),
)
def test_stage_1_as_a_whole(x, weight, scale, shift, index, eps, modulation):
    tables = (scale, shift, np.array(index, np.int32)) if modulation else (None, None, None)
    options = (eps, modulation or "fused")
    want = oracle.stage1(x, weight[0], *tables, *options)
    got = both(reference.norm_quant, x, weight[0], *tables, *options)
    assert_stage_1(got, want)


def test_eager_modulation_is_plain_torchs(inputs):
    """What an engine writes in BF16 torch has its bits, and not those of one rounding."""
    n = reference.norm_quant(*inputs[:5]).n
    scale, shift = inputs.adaln_scale[inputs.adaln_index], inputs.adaln_shift[inputs.adaln_index]
    got = reference.norm_quant(*inputs[:5], modulation="eager").a
    assert torch.equal(got, n * (1 + scale) + shift)
    assert not torch.equal(got, reference.norm_quant(*inputs[:5]).a)


def assert_stage_1(got: reference.Stage1, want: tuple[np.ndarray, ...]) -> None:
    """All six values, in the contract's order."""
    for field, expected in zip(fields(reference.Stage1), want, strict=True):
        oracle.assert_same_bits(getattr(got, field.name), expected, field.name)


def test_whole_operator_against_numpy(inputs):
    """Stage 1 and acc bit for bit. h follows from acc by two products. y may differ where NumPy's exp and torch's do,
    by about 2^-23, which moves a BF16 rounding once in about 2^13 values: 99.9% must be equal."""
    got = reference.fc1_swiglu_fp8(*inputs, return_intermediates=True)
    arrays_ = [oracle.from_torch(t) for t in inputs]
    want = oracle.stage1(*arrays_[:5])
    assert_stage_1(got, want)
    acc, h, y = oracle.stage2(want[5], want[4], *arrays_[5:])
    oracle.assert_same_bits(got.acc, acc, "acc")
    gate, up = reference.gate_and_up(oracle.to_torch(h))
    oracle.assert_same_bits(got.h, oracle.from_torch(torch.cat([gate, up], 1)), "h")
    assert (oracle.from_torch(got.y).astype(np.float32) == y.astype(np.float32)).mean() >= 0.999
    assert torch.equal(reference.fc1_swiglu_fp8(*inputs), got.y)


@given(
    bf16_matrix(6, 32),
    bf16_matrix(3, 32),
    bf16_matrix(6, 32),
    st.lists(st.sampled_from([0, 1, 2, -1, 3, -(2**31), 2**31 - 1]), min_size=6, max_size=6),
    st.sampled_from([np.int32, np.int64, None]),
)
def test_gated_residual(o, gate, residual, index, dtype):
    """NaN of any payload equals any other where a sum made it; a residual that is only passed on keeps its bits."""
    index = None if dtype is None else np.array(index, dtype)
    with np.errstate(all="ignore"):
        want = oracle.gated_residual(o, gate, residual, index)
    got = both(reference.gated_residual, o, None if index is None else gate, residual, index)
    oracle.assert_same_bits(got, want)
    if index is not None:
        outside = (index < 0) | (index > 2)
        assert (oracle.from_torch(got).view(np.uint16) == residual.view(np.uint16))[outside].all()


@pytest.mark.parametrize("inputs", [make_mlp_inputs(33), without_adaln(make_mlp_inputs(33)), mlp_edge_inputs()])
def test_the_mlp_against_numpy(inputs):
    """From the reference's own y on, bit for bit: all that follows is products, sums and one exact accumulation."""
    got = reference.mlp_fp8(*inputs, return_intermediates=True)
    operands = [got.y, *inputs[-2:], inputs.gate, inputs.residual, inputs.adaln_index]
    want = oracle.stage3(*(None if t is None else oracle.from_torch(t) for t in operands))
    for name, expected in zip(("s_y", "y_q", "acc2", "o", "out"), want, strict=True):
        oracle.assert_same_bits(getattr(got, name), expected, name)
    assert torch.equal(got.y.isnan(), reference.fc1_swiglu_fp8(*inputs.fc1).isnan())


class TestEdgeRows:
    """The rows that the contract names, through the whole reference."""

    def run(self, inputs, x=None, index=None):
        changed = inputs._replace(
            x=inputs.x if x is None else x, adaln_index=inputs.adaln_index if index is None else index
        )
        return reference.fc1_swiglu_fp8(*changed, return_intermediates=True)

    def test_bad_index_is_zero_whatever_x_holds(self, inputs):
        x = inputs.x.clone()
        x[0], x[1] = torch.nan, torch.inf
        index = inputs.adaln_index.clone()
        index[0], index[1], index[2] = -1, 4, 2**31 - 1
        got = self.run(inputs, x, index)
        assert (got.a_q[:3].view(torch.uint8) == 0).all()
        assert (got.s_row[:3] == torch.tensor(1e-12) / torch.tensor(448.0)).all()
        assert (got.y[:3].view(torch.int16) == 0).all(), "y must be +0"

    def test_nan_in_x_makes_the_row_nan(self, inputs):
        x = inputs.x.clone()
        x[3, 7] = torch.nan
        got = self.run(inputs, x)
        assert got.y[3].isnan().all()
        assert got.s_row[3] == torch.tensor(1e-12) / torch.tensor(448.0)
        assert got.y[[2, 4]].isfinite().all()

    def test_overflowing_sum_of_squares_leaves_the_shift(self, inputs):
        x = inputs.x.clone()
        x[3] = 3e38
        got = self.run(inputs, x)
        assert got.rstd[3] == 0
        assert torch.equal(got.a[3], inputs.adaln_shift[inputs.adaln_index[3]])

    def test_inf_in_x_is_nan_where_it_stands(self, inputs):
        x = inputs.x.clone()
        x[3, 7] = -torch.inf
        got = self.run(inputs, x)
        assert got.n[3].isnan().sum() == 1
        assert got.a_q.view(torch.uint8)[3, 7] == 0x7F
        assert got.y[3].isnan().all()

    def test_overflowing_a_makes_the_row_nan(self, inputs):
        x = torch.zeros_like(inputs.x)
        x[:, 5] = 1.0  # n = sqrt(384) there
        scale = inputs.adaln_scale.clone()
        scale[:, 5] = 3e38
        got = self.run(inputs._replace(adaln_scale=scale), x)
        assert got.s_row.isinf().all()
        assert (got.a_q.view(torch.uint8)[:, 5] == 0x7F).all()
        assert got.y.isnan().all()

    @pytest.mark.parametrize("bad", [torch.nan, torch.inf])
    def test_bad_weight_row_is_one_output_column(self, layer, inputs, bad):
        weight = layer.weight.clone()
        weight[17, 3] = bad
        q, s = prepare_fc1_weight_fp8(weight)
        got = self.run(inputs._replace(fc1_weight_q=q, fc1_weight_scale=s))
        assert got.y[:, 17].isnan().all()
        assert got.y[:, torch.arange(128) != 17].isfinite().all()

    @pytest.mark.parametrize("rows", [0, 1])
    def test_few_rows(self, inputs, rows):
        got = self.run(inputs, inputs.x[:rows], inputs.adaln_index[:rows])
        assert got.y.shape == (rows, 128)
        assert torch.equal(got.y, reference.fc1_swiglu_fp8(*inputs)[:rows])
