"""The whole MLP through its public functions, on the CPU."""

import inspect
import shutil

import pytest
import torch
from helpers import (
    FFN,
    HIDDEN,
    TABLE_ROWS,
    Allocations,
    assert_mlp,
    bits,
    float8_allclose,
    make_mlp_inputs,
    mlp_edge_inputs,
    nan_mlp_buffers,
    without_adaln,
)
from torch._subclasses import FakeTensorMode

import h3mlp
from h3mlp import backends, contract, reference, synthetic
from h3mlp.backends import cpu

NEEDS_COMPILER = pytest.mark.skipif(shutil.which("g++") is None, reason="inductor needs a C++ compiler")
BACKENDS = ["aot_eager", pytest.param("inductor", marks=NEEDS_COMPILER)]
ROWS = 70


@pytest.fixture(autouse=True)
def fresh_compiler():
    torch.compiler.reset()


@pytest.fixture(scope="session")
def made() -> contract.MLPInputs:
    return make_mlp_inputs(ROWS)


@pytest.fixture
def mlp(made) -> contract.MLPInputs:
    """Fresh tensors for each test."""
    return contract.MLPInputs(*(t.clone() for t in made))


def test_signature_is_flashinfers():
    parameters = inspect.signature(h3mlp.minimax_h3_mlp_fp8).parameters
    positional = [name for name, p in parameters.items() if p.kind is p.POSITIONAL_OR_KEYWORD]
    assert positional == [
        "x",
        "x_norm_weight",
        "adaln_scale",
        "adaln_shift",
        "adaln_index",
        "gate",
        "residual",
        "fc1_weight_q",
        "fc1_weight_scale",
        "fc2_weight_q",
        "fc2_weight_scale",
    ]
    keyword_only = {name: p.default for name, p in parameters.items() if p.kind is p.KEYWORD_ONLY}
    assert keyword_only == {
        "out": None,
        "workspace_a_q": None,
        "workspace_a_scale": None,
        "workspace_y": None,
        "workspace_y_q": None,
        "workspace_y_scale": None,
        "workspace_flags": None,
        "eps": 1e-5,
        "fp8_mma_form": -1,
        "accumulate": "fp32",
        "modulation": "fused",
    }
    assert parameters == inspect.signature(h3mlp.mlp_fp8).parameters
    prepare = inspect.signature(h3mlp.prepare_minimax_h3_fc2_weight_fp8)
    assert str(prepare.parameters["chunk_rows"]) == "chunk_rows: int = 1024"


class TestResult:
    @pytest.mark.parametrize("rows", [1, 2, 63, 64, 65, 127, 129, 300])
    def test_every_intermediate(self, rows):
        inputs, buffers = make_mlp_inputs(rows), nan_mlp_buffers(rows)
        got = h3mlp.mlp_fp8(*inputs, **buffers._asdict())
        assert got is buffers.out
        assert_mlp(buffers, inputs)

    @pytest.mark.parametrize("modulation", contract.MODULATION)
    def test_modulation(self, mlp, modulation):
        buffers = nan_mlp_buffers(ROWS)
        h3mlp.mlp_fp8(*mlp, **buffers._asdict(), modulation=modulation)
        assert_mlp(buffers, mlp, modulation=modulation)

    def test_eps(self, mlp):
        buffers = nan_mlp_buffers(ROWS)
        h3mlp.mlp_fp8(*mlp, **buffers._asdict(), eps=0.5)
        assert_mlp(buffers, mlp, eps=0.5)

    def test_without_adaln(self, mlp):
        plain, buffers = without_adaln(mlp), nan_mlp_buffers(ROWS)
        h3mlp.mlp_fp8(*plain, **buffers._asdict())
        assert_mlp(buffers, plain)

    def test_edge_rows(self):
        inputs, buffers = mlp_edge_inputs(), nan_mlp_buffers(6)
        h3mlp.mlp_fp8(*inputs, **buffers._asdict())
        assert_mlp(buffers, inputs)
        assert torch.equal(bits(buffers.out[4]), bits(inputs.residual[4])), "an index outside: the residual itself"
        assert buffers.out[[1, 3]].isnan().all(), "a NaN in a row of y"
        assert torch.equal(buffers.out[0], inputs.residual[0]), "a row of zeros adds nothing"

    def test_a_residual_behind_a_bad_index_keeps_every_bit(self, mlp):
        """-0, which a sum with +0 would lose, and NaN of other payloads than a sum makes; and a NaN in the gate."""
        mlp.adaln_index[:3] = torch.tensor([-1, TABLE_ROWS, 2**40])
        mlp.residual[:3] = torch.tensor([-0x8000, 0x7F81, -0x3F], dtype=torch.int16).view(torch.bfloat16)[:, None]
        mlp.gate[:] = torch.nan
        got = h3mlp.mlp_fp8(*mlp)
        assert torch.equal(bits(got[:3]), bits(mlp.residual[:3]))
        assert got[3:].isnan().all()

    def test_a_bad_index_hides_a_bad_weight(self, mlp):
        mlp.fc1_weight_scale[5] = torch.nan
        mlp.fc2_weight_scale[7] = torch.nan
        mlp.adaln_index[:] = -1
        assert torch.equal(bits(h3mlp.mlp_fp8(*mlp)), bits(mlp.residual))

    def test_a_nan_in_a_row_of_fc2_is_that_column(self, mlp):
        mlp.fc2_weight_scale[7] = torch.nan
        got = h3mlp.mlp_fp8(*mlp)
        assert got[:, 7].isnan().all()
        assert got.isnan().sum() == ROWS

    @pytest.mark.parametrize(("hidden", "ffn"), [(128, 64), (256, 704), (1152, 192)])
    def test_other_sizes(self, hidden, ffn):
        inputs, buffers = make_mlp_inputs(9, hidden, ffn), nan_mlp_buffers(9, hidden, ffn)
        h3mlp.mlp_fp8(*inputs, **buffers._asdict())
        assert_mlp(buffers, inputs)

    @pytest.mark.parametrize("option", [{"accumulate": "fast"}, {"fp8_mma_form": 0}, {"fp8_mma_form": 2}])
    def test_the_cpu_has_one_way_to_multiply(self, mlp, option):
        assert torch.equal(h3mlp.mlp_fp8(*mlp, **option), h3mlp.mlp_fp8(*mlp))


def test_the_model_at_its_real_size():
    """Rows of the original's public test through the drop-in and its two preparations. FP32 sums of 14336 products are
    off by 2^-19 of o, 2^-10 of a step: 99% of out still have its very bits."""
    mlp = synthetic.mlp_as_specified(18, torch.device("cpu"))
    weights = (
        *h3mlp.prepare_minimax_h3_fc1_weight_fp8(mlp.fc1.weight),
        *h3mlp.prepare_minimax_h3_fc2_weight_fp8(mlp.fc2_weight),
    )
    inputs, buffers = contract.MLPInputs(*mlp.activations, *weights), nan_mlp_buffers(18, 5376, 14336)
    assert h3mlp.minimax_h3_mlp_fp8(*inputs, **buffers._asdict()) is buffers.out
    assert_mlp(buffers, inputs)


@pytest.fixture
def two_threads():
    """More make BLAS add a row's products in another order for another number of rows: with 16 a y in 76,800 is the
    neighbouring BF16."""
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(before)


class TestBlocks:
    @pytest.mark.usefixtures("two_threads")
    def test_they_change_no_bit(self, monkeypatch):
        """One block of 600 rows, and three of 256 of which the last is cut."""
        inputs = make_mlp_inputs(600)
        whole, blocks = nan_mlp_buffers(600), nan_mlp_buffers(600)
        h3mlp.mlp_fp8(*inputs, **whole._asdict())
        monkeypatch.setattr(cpu, "GEMM_ROWS", 256)
        h3mlp.mlp_fp8(*inputs, **blocks._asdict())
        for one, several in zip(whole, blocks, strict=True):
            assert torch.equal(bits(one), bits(several))
        assert torch.equal(h3mlp.mlp_fp8(*inputs), whole.out), "nor does it matter whose the workspaces are"

    def test_memory_is_that_of_a_block(self, monkeypatch):
        """The largest thing made is the table of code pairs (524,288 bytes) or out, but none of the workspaces for
        all 4096 rows, the least of which, codes of x, would be 1,572,864 bytes."""
        monkeypatch.setattr(cpu, "GEMM_ROWS", 256)
        monkeypatch.setattr(cpu, "GEMM_COLUMNS", 64)
        inputs, out = make_mlp_inputs(4096), nan_mlp_buffers(4096).out
        with Allocations(*inputs, out) as made:
            cpu.mlp(inputs, 1e-5, contract.MLPBuffers(out), "fp32")
        assert max(made.sizes) == 2**16 * 8
        assert out.isfinite().all()

    def test_workspaces_that_are_given_are_not_made(self):
        inputs, buffers = make_mlp_inputs(300), nan_mlp_buffers(300)
        for given, count in ((buffers, 0), (buffers._replace(workspace_y=None, workspace_y_scale=None), 2)):
            with Allocations(*inputs, *buffers) as made:
                blocks = list(backends.mlp_blocks(inputs, given, backends.even_rows(inputs.x.shape[0], 256)))
            assert [len(block.x) for block, _ in blocks] == [256, 44]
            assert len(made.sizes) == count

    @pytest.mark.parametrize("name", contract.MLPBuffers._fields)
    def test_one_buffer_given(self, mlp, monkeypatch, name):
        monkeypatch.setattr(cpu, "GEMM_ROWS", 32)
        buffer = getattr(nan_mlp_buffers(ROWS), name)
        all_given = nan_mlp_buffers(ROWS)
        h3mlp.mlp_fp8(*mlp, **all_given._asdict())
        got = h3mlp.mlp_fp8(*mlp, **{name: buffer})
        assert torch.equal(got, all_given.out)
        assert torch.equal(bits(buffer), bits(getattr(all_given, name)))
        assert (got is buffer) == (name == "out")

    def test_longer_buffers_are_used_from_the_start(self, mlp):
        buffers = nan_mlp_buffers(100)
        got = h3mlp.mlp_fp8(*mlp, **buffers._asdict())
        assert got.shape == (ROWS, HIDDEN)
        assert got.data_ptr() == buffers.out.data_ptr()
        for buffer in buffers:
            assert buffer[ROWS:].float().isnan().all(), "rows past M must stay as they were"
            assert not buffer[:ROWS].float().isnan().any()

    def test_no_rows(self, mlp):
        none = mlp.rows(slice(0, 0))
        assert h3mlp.mlp_fp8(*none).shape == (0, HIDDEN)
        buffers = nan_mlp_buffers(3)
        assert h3mlp.mlp_fp8(*none, **buffers._asdict()).shape == (0, HIDDEN)
        assert buffers.out.isnan().all()


class TestAliasing:
    @pytest.mark.parametrize("adaln", [True, False])
    @pytest.mark.parametrize("out", ["residual", "x"])
    @pytest.mark.parametrize("residual_is_x", [True, False])
    def test_out_may_be_an_input(self, mlp, monkeypatch, adaln, out, residual_is_x):
        """In blocks of 32 rows: no block reads what an earlier one wrote."""
        monkeypatch.setattr(cpu, "GEMM_ROWS", 32)
        inputs = mlp if adaln else without_adaln(mlp)
        if residual_is_x:
            inputs = inputs._replace(residual=inputs.x)
        want = h3mlp.mlp_fp8(*inputs)
        target = getattr(inputs, out)
        assert h3mlp.mlp_fp8(*inputs, out=target) is target
        assert torch.equal(target, want)

    def test_the_first_rows_of_a_longer_out(self, mlp):
        out = torch.full((100, HIDDEN), torch.nan, dtype=torch.bfloat16)
        residual = out[:ROWS]
        residual.copy_(mlp.residual)
        want = h3mlp.mlp_fp8(*mlp)
        assert torch.equal(h3mlp.mlp_fp8(*mlp._replace(residual=residual), out=out), want)
        assert out[ROWS:].isnan().all()

    @pytest.mark.parametrize("name", ["x", "residual"])
    @pytest.mark.parametrize("shift", [1, HIDDEN])
    def test_a_part_of_it_may_not(self, mlp, name, shift):
        arena = torch.zeros(ROWS * HIDDEN + shift, dtype=torch.bfloat16)
        bad = mlp._replace(**{name: arena[shift:].view(ROWS, HIDDEN)})
        with pytest.raises(ValueError, match=f"out must not overlap {name}; they share memory"):
            h3mlp.mlp_fp8(*bad, out=arena[:-shift].view(ROWS, HIDDEN))
        assert (arena == 0).all()

    @pytest.mark.parametrize(
        ("buffer", "other"),
        [("out", "gate"), ("out", "fc2_weight_q"), ("workspace_y", "fc1_weight_q"), ("workspace_y_q", "x")],
    )
    def test_nothing_else_may(self, mlp, buffer, other):
        wanted = getattr(nan_mlp_buffers(ROWS), buffer)
        arena = torch.zeros(wanted.nbytes + getattr(mlp, other).nbytes, dtype=torch.uint8)
        source = getattr(mlp, other)
        inputs = mlp._replace(**{other: arena[: source.nbytes].view(source.dtype).view(source.shape).copy_(source)})
        target = arena[: wanted.nbytes].view(wanted.dtype).view(wanted.shape)
        with pytest.raises(ValueError, match=f"{buffer} must not overlap {other}; they share memory"):
            h3mlp.mlp_fp8(*inputs, **{buffer: target})

    def test_not_even_all_of_it(self, mlp):
        """64 rows of out are as long as FC2's weight."""
        few = mlp.rows(slice(0, 64))
        out = few.fc2_weight_q.view(-1).view(torch.bfloat16).view(64, HIDDEN)
        with pytest.raises(ValueError, match="out must not overlap fc2_weight_q"):
            h3mlp.mlp_fp8(*few, out=out)

    def test_workspaces_of_the_same_memory(self, mlp):
        y = nan_mlp_buffers(ROWS).workspace_y
        y_q = y.view(-1).view(contract.QUANTIZED)[: ROWS * FFN].view(ROWS, FFN)
        with pytest.raises(ValueError, match="workspace_y must not overlap workspace_y_q"):
            h3mlp.mlp_fp8(*mlp, workspace_y=y, workspace_y_q=y_q)

    def test_a_workspace_may_not_be_the_residual(self, mlp):
        codes = mlp.residual.view(contract.QUANTIZED)[:, :HIDDEN].contiguous()
        arena = codes.view(-1)
        residual = arena.view(torch.bfloat16).view(ROWS // 2, HIDDEN)
        half = mlp.rows(slice(0, ROWS // 2))._replace(residual=residual)
        with pytest.raises(ValueError, match="workspace_a_q must not overlap residual"):
            h3mlp.mlp_fp8(*half, workspace_a_q=codes)


class TestAccepted:
    def test_tables_as_column_chunks_of_one_projection(self, mlp):
        projection = torch.full((TABLE_ROWS, 6 * HIDDEN), torch.nan, dtype=torch.bfloat16)
        shift, scale, gate = projection.chunk(6, dim=1)[3:]
        chunks = {"adaln_shift": shift, "adaln_scale": scale, "gate": gate}
        for name, chunk in chunks.items():
            chunk.copy_(getattr(mlp, name))
        assert torch.equal(h3mlp.mlp_fp8(*mlp._replace(**chunks)), h3mlp.mlp_fp8(*mlp))

    def test_a_gate_with_strides_of_its_own(self, mlp):
        wide = torch.full((TABLE_ROWS, HIDDEN + 3), torch.nan, dtype=torch.bfloat16)
        wide[:, 3:] = mlp.gate
        assert torch.equal(h3mlp.mlp_fp8(*mlp._replace(gate=wide[:, 3:])), h3mlp.mlp_fp8(*mlp))

    @pytest.mark.parametrize("name", ["x", "residual"])
    def test_rows_with_a_stride(self, mlp, name):
        rows = torch.full((ROWS, HIDDEN + 16), torch.nan, dtype=torch.bfloat16)
        rows[:, 8:-8] = getattr(mlp, name)
        assert torch.equal(h3mlp.mlp_fp8(*mlp._replace(**{name: rows[:, 8:-8]})), h3mlp.mlp_fp8(*mlp))

    def test_int32_and_int64_indices(self, mlp):
        int32 = mlp._replace(adaln_index=mlp.adaln_index.int())
        assert torch.equal(h3mlp.mlp_fp8(*int32), h3mlp.mlp_fp8(*mlp))

    def test_flags_are_taken_and_not_used(self, mlp):
        flags = torch.full((1,), 7, dtype=torch.int32)
        assert torch.equal(h3mlp.mlp_fp8(*mlp, workspace_flags=flags), h3mlp.mlp_fp8(*mlp))
        assert flags.item() == 7

    @pytest.mark.parametrize("around", [torch.device("meta"), torch.autocast("cpu", dtype=torch.bfloat16)])
    def test_what_is_switched_on_around_it(self, mlp, around):
        want = h3mlp.mlp_fp8(*mlp)
        with around:
            assert torch.equal(h3mlp.mlp_fp8(*mlp), want)

    def test_a_default_dtype(self, mlp):
        want = h3mlp.mlp_fp8(*mlp)
        torch.set_default_dtype(torch.float64)
        try:
            assert torch.equal(h3mlp.mlp_fp8(*mlp), want)
        finally:
            torch.set_default_dtype(torch.float32)


def refused(match, inputs, error=ValueError, **options):
    """The call raises, and no byte of any argument changes."""
    tensors = [t for t in (*inputs, *options.values()) if isinstance(t, torch.Tensor) and not t.is_meta]
    before = [bits(t.detach()).clone() for t in tensors]
    with pytest.raises(error, match=match):
        h3mlp.mlp_fp8(*inputs, **options)
    assert all(torch.equal(bits(t.detach()), old) for t, old in zip(tensors, before, strict=True))


INPUT_CASES = [
    ("x", lambda t: t.float(), r"x must be bfloat16 \[M, 384\]; it is float32"),
    ("gate", lambda t: t.float(), r"gate must be bfloat16 \[R, 384\], so cast to BF16 as by gate.bfloat16\(\)"),
    ("gate", lambda t: t[:-1], r"gate must be \[4, 384\] as adaln_scale; it is bfloat16 \[3, 384\]"),
    ("gate", lambda t: t[:, :-128], r"gate must be bfloat16 \[R, 384\]; it is bfloat16 \[4, 256\]"),
    ("gate", lambda t: t.T.contiguous().T, r"gate must be \[R, 384\] with unit inner stride"),
    ("gate", lambda t: t.to("meta"), "gate must be on cpu like the other arguments"),
    ("gate", lambda _: None, "gate must be a tensor like adaln_scale, or all of .*, gate None; it is None"),
    ("gate", lambda _: 1.0, r"gate must be a dense torch.Tensor; it is 1.0 \(float\)"),
    ("residual", lambda t: t.float(), r"residual must be bfloat16 \[M, 384\]; it is float32"),
    ("residual", lambda t: t[:-1], r"residual must be \[70, 384\] as x; it is bfloat16 \[69, 384\]"),
    ("residual", lambda t: t[None], r"residual must be bfloat16 \[M, 384\]; it is bfloat16 \[1, 70, 384\]"),
    ("residual", lambda _: None, r"residual must be a dense torch.Tensor; it is None \(NoneType\)"),
    ("residual", lambda t: t.to("meta"), "residual must be on cpu"),
    ("fc1_weight_q", lambda t: t.float(), "fc1_weight_q must be float8_e4m3fn"),
    ("fc1_weight_q", h3mlp.unpack_fc1_rows, "fc1_weight_q must be in packed row order"),
    ("fc2_weight_q", lambda t: t.bfloat16(), r"fc2_weight_q must be float8_e4m3fn \[384, 128\], .*; it is bfloat16"),
    ("fc2_weight_q", lambda t: t.T.contiguous(), r"fc2_weight_q must be float8_e4m3fn \[384, 128\].*\[128, 384\]"),
    ("fc2_weight_q", lambda t: t.T.contiguous().T, "fc2_weight_q must be contiguous"),
    ("fc2_weight_q", lambda t: t.to("meta"), "fc2_weight_q must be on cpu"),
    (
        "fc2_weight_q",
        lambda t: contract.tag_row_order(t.clone(), contract.PACKED),
        "fc2_weight_q must have FC2's rows in their order; its tag says that they are packed as FC1's",
    ),
    ("fc2_weight_scale", lambda t: t.double(), r"fc2_weight_scale must be float32 \[384\]; it is float64"),
    ("fc2_weight_scale", lambda t: t[:-1], r"fc2_weight_scale must be float32 \[384\]; it is float32 \[383\]"),
    ("fc2_weight_scale", lambda _: None, r"fc2_weight_scale must be a dense torch.Tensor; it is None"),
]
BUFFER_CASES = [
    ("out", lambda t: t[:-1], r"out must be bfloat16 \[M, 384\] with M >= 70; it is bfloat16 \[69, 384\]"),
    ("out", lambda t: t.half(), r"out must be bfloat16 \[M, 384\].*; it is float16"),
    ("out", lambda t: t.T.contiguous().T, "out must be contiguous"),
    ("workspace_a_q", lambda t: t[:-1], r"workspace_a_q must be float8_e4m3fn \[M, 384\] with M >= 70"),
    ("workspace_a_scale", lambda t: t[:, None], r"workspace_a_scale must be float32 \[M\] with M >= 70"),
    ("workspace_y", lambda t: t.half(), r"workspace_y must be bfloat16 \[M, 128\] with M >= 70; it is float16"),
    ("workspace_y_q", lambda t: t.view(torch.uint8), r"workspace_y_q must be float8_e4m3fn \[M, 128\].*; it is uint8"),
    ("workspace_y_scale", lambda t: t.double(), r"workspace_y_scale must be float32 \[M\].*; it is float64"),
    ("workspace_y_scale", lambda t: t.to("meta"), "workspace_y_scale must be on cpu"),
    ("workspace_y", lambda _: 7, r"workspace_y must be a dense torch.Tensor; it is 7 \(int\)"),
]


class TestRefused:
    @pytest.mark.parametrize(
        ("name", "change", "match"), INPUT_CASES, ids=[f"{c[0]}-{i}" for i, c in enumerate(INPUT_CASES)]
    )
    def test_inputs(self, mlp, name, change, match):
        bad = mlp._replace(**{name: change(getattr(mlp, name))})
        refused(match, bad)
        refused(match, bad, **nan_mlp_buffers(ROWS)._asdict())
        refused(match, bad, workspace_y=nan_mlp_buffers(ROWS).workspace_y)
        with pytest.raises((ValueError, RuntimeError)):
            torch.ops.h3mlp.mlp_fp8(*bad, 1e-5, "fp32", "fused", -1)

    @pytest.mark.parametrize(
        ("name", "change", "match"), BUFFER_CASES, ids=[f"{c[0]}-{i}" for i, c in enumerate(BUFFER_CASES)]
    )
    def test_buffers(self, mlp, name, change, match):
        buffers = nan_mlp_buffers(ROWS)._asdict()
        buffers[name] = change(buffers[name])
        refused(match, mlp, **buffers)
        refused(match, mlp, **{name: buffers[name]})

    @pytest.mark.parametrize(
        ("option", "match"),
        [
            ({"eps": 0.0}, "eps must be a finite positive number in FP32"),
            ({"accumulate": "fp16"}, "accumulate must be 'fp32' or 'fast'"),
            ({"modulation": "none"}, "modulation must be 'fused' or 'eager'"),
            ({"fp8_mma_form": 1}, "fp8_mma_form must be -1, 0 or 2; it is 1"),
            ({"fp8_mma_form": None}, "fp8_mma_form must be -1, 0 or 2; it is None"),
            ({"fp8_mma_form": False}, "fp8_mma_form must be -1, 0 or 2; it is False"),
            ({"workspace_flags": 0}, "workspace_flags must be a dense torch.Tensor; it is 0"),
        ],
    )
    def test_options(self, mlp, option, match):
        refused(match, mlp, **option)
        refused(match, mlp, **option, **nan_mlp_buffers(ROWS)._asdict())

    def test_a_gate_without_tables(self, mlp):
        refused("adaln_scale must be a tensor like gate, or all of", without_adaln(mlp)._replace(gate=mlp.gate))

    @pytest.mark.parametrize("name", ["x", "gate", "residual", "fc2_weight_scale"])
    def test_grad(self, mlp, name):
        bad = mlp._replace(**{name: getattr(mlp, name).requires_grad_()})
        message = "h3mlp.mlp_fp8 is an inference operator and has no gradient"
        refused(message, bad, error=RuntimeError)
        with pytest.raises(RuntimeError, match=message):
            torch.ops.h3mlp.mlp_fp8(*bad, 1e-5, "fp32", "fused", -1)
        with torch.no_grad():
            assert h3mlp.mlp_fp8(*bad).isfinite().all()
        compiled = torch.compile(h3mlp.mlp_fp8, fullgraph=True, backend="aot_eager")
        with pytest.raises(RuntimeError, match="inference operator"):
            compiled(*bad)

    def test_the_models_function_checks_its_dimensions(self, mlp):
        with pytest.raises(ValueError, match=r"fc1_weight_q must be \[28672, 5376\]"):
            h3mlp.minimax_h3_mlp_fp8(*mlp)
        right = torch.empty(28672, 5376, dtype=contract.QUANTIZED, device="meta")
        with pytest.raises(ValueError, match=r"fc2_weight_q must be \[5376, 14336\], the FC2 weight of MiniMax-H3"):
            h3mlp.minimax_h3_mlp_fp8(*mlp._replace(fc1_weight_q=right))


class TestTorch:
    """What torch's own tools see of the operators."""

    @pytest.mark.parametrize("adaln", [True, False])
    def test_opcheck(self, mlp, monkeypatch, adaln):
        monkeypatch.setattr(torch, "allclose", float8_allclose)
        inputs = mlp if adaln else without_adaln(mlp)
        options = (1e-5, "fp32", "fused", -1)
        torch.library.opcheck(torch.ops.h3mlp.mlp_fp8.default, (*inputs, *options))
        buffers = nan_mlp_buffers(ROWS)._replace(workspace_y_q=None)
        torch.library.opcheck(torch.ops.h3mlp.mlp_fp8_out.default, (*inputs, *options, *buffers))

    @pytest.mark.parametrize("backend", BACKENDS)
    @pytest.mark.parametrize("adaln", [True, False])
    def test_compiled(self, mlp, backend, adaln):
        inputs = mlp if adaln else without_adaln(mlp)
        compiled = torch.compile(h3mlp.mlp_fp8, fullgraph=True, dynamic=True, backend=backend)
        want = h3mlp.mlp_fp8(*inputs)
        for rows in (ROWS, 33):
            assert torch.equal(compiled(*inputs.rows(slice(0, rows))), want[:rows])

    @pytest.mark.parametrize("backend", BACKENDS)
    @pytest.mark.parametrize("target", ["new", "residual", "x"])
    def test_compiled_into_buffers(self, mlp, backend, target):
        """Also where out is an argument that the graph reads before and after."""

        def half(inputs, buffers):
            inputs = inputs._replace(residual=inputs.residual * 2, x=inputs.x * 2)
            out = buffers.out if target == "new" else getattr(inputs, target)
            got = h3mlp.mlp_fp8(*inputs, **buffers._replace(out=out)._asdict())
            return got + 1, inputs.residual - 1, inputs.x - 1

        want_buffers, buffers = nan_mlp_buffers(ROWS), nan_mlp_buffers(ROWS)
        want = half(mlp, want_buffers)
        got = torch.compile(half, fullgraph=True, backend=backend)(mlp, buffers)
        for have, expected in zip((*got, *buffers[1:]), (*want, *want_buffers[1:]), strict=True):
            assert torch.equal(bits(have), bits(expected))
        if target == "new":
            assert torch.equal(buffers.out, want_buffers.out)

    def test_exported_with_dynamic_rows(self, mlp):
        class Half(torch.nn.Module):
            def forward(self, x, norm, scale, shift, index, gate, residual, fc1, fc1_scale, fc2, fc2_scale):
                weights = fc1, fc1_scale, fc2, fc2_scale
                return h3mlp.mlp_fp8(x, norm, scale, shift, index, gate, residual, *weights)

        rows = torch.export.Dim("rows")
        dynamic = tuple({0: rows} if name in ("x", "adaln_index", "residual") else None for name in mlp._fields)
        program = torch.export.export(Half(), tuple(mlp), dynamic_shapes=dynamic)
        assert "h3mlp.mlp_fp8.default" in program.graph_module.code
        want = h3mlp.mlp_fp8(*mlp)
        for count in (ROWS, 33):
            assert torch.equal(program.module()(*mlp.rows(slice(0, count))), want[:count])
        assert program.module()(*mlp.rows(slice(0, 1))).shape == (1, HIDDEN)

    def test_fake_tensors(self, mlp):
        with FakeTensorMode() as mode:
            fake = contract.MLPInputs(*map(mode.from_tensor, mlp))
            got = h3mlp.mlp_fp8(*fake)
            assert (got.shape, got.dtype, got.stride()) == ((ROWS, HIDDEN), torch.bfloat16, (HIDDEN, 1))
            with pytest.raises(ValueError, match="residual must be"):
                h3mlp.mlp_fp8(*fake._replace(residual=fake.residual[1:]))

    def test_meta(self, mlp):
        meta = contract.MLPInputs(*(t.to("meta") for t in mlp))
        assert h3mlp.mlp_fp8(*meta).shape == (ROWS, HIDDEN)

    def test_the_profiler_sees_it(self, mlp):
        with torch.autograd.profiler.profile() as profile:
            h3mlp.mlp_fp8(*mlp)
        assert "h3mlp::mlp_fp8" in {event.name for event in profile.function_events}


def test_the_reference_is_fc1s_and_more(mlp):
    want = reference.mlp_fp8(*mlp, return_intermediates=True)
    assert torch.equal(want.y, reference.fc1_swiglu_fp8(*mlp.fc1))
    assert torch.equal(want.out, reference.mlp_fp8(*mlp))
