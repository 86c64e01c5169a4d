import inspect
import shutil
from types import SimpleNamespace

import pytest
import torch
from helpers import FFN, HIDDEN, TABLE_ROWS, bits, float8_allclose, make_inputs, nan_buffers, without_adaln
from torch._subclasses import FakeTensor, FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

import h3mlp
from h3mlp import contract, reference, synthetic
from h3mlp.operators import dispatch

NEEDS_COMPILER = pytest.mark.skipif(shutil.which("g++") is None, reason="inductor needs a C++ compiler")
BACKENDS = ["aot_eager", pytest.param("inductor", marks=NEEDS_COMPILER)]


@pytest.fixture(autouse=True)
def fresh_compiler():
    torch.compiler.reset()


def test_signature_is_the_specifications():
    parameters = inspect.signature(h3mlp.minimax_h3_fc1_swiglu_fp8).parameters
    assert list(parameters) == [
        "x",
        "x_norm_weight",
        "adaln_scale",
        "adaln_shift",
        "adaln_index",
        "fc1_weight_q",
        "fc1_weight_scale",
        "out",
        "workspace_q",
        "workspace_scale",
        "eps",
        "accumulate",
        "modulation",
    ]
    keyword_only = {name: p.default for name, p in parameters.items() if p.kind is p.KEYWORD_ONLY}
    assert keyword_only == {
        "out": None,
        "workspace_q": None,
        "workspace_scale": None,
        "eps": 1e-5,
        "accumulate": "fp32",
        "modulation": "fused",
    }
    prepare = inspect.signature(h3mlp.prepare_minimax_h3_fc1_weight_fp8)
    assert str(prepare.parameters["chunk_rows"]) == "chunk_rows: int = 2048"


def test_result_is_the_references(inputs):
    """FP32 accumulation of 384 exact products is off by at most 384 * 2^-24 of their absolute sum, about 2^-18 of h at
    this size against 2^-9 of BF16: fewer than 1 rounding in 300 can flip. 99% equal, and no output off by more than
    the two roundings of g and y (2^-6)."""
    want = reference.fc1_swiglu_fp8(*inputs)
    got = h3mlp.fc1_swiglu_fp8(*inputs)
    assert got.dtype == torch.bfloat16
    assert (got == want).float().mean() >= 0.99
    torch.testing.assert_close(got, want, rtol=2**-6, atol=1e-4)


def test_eps_reaches_the_arithmetic(inputs):
    buffers = nan_buffers(70)
    got = h3mlp.fc1_swiglu_fp8(*inputs, **buffers._asdict(), eps=0.5)
    want = reference.fc1_swiglu_fp8(*inputs, eps=0.5, return_intermediates=True)
    assert torch.equal(buffers.workspace_scale, want.s_row)
    assert not torch.equal(got, h3mlp.fc1_swiglu_fp8(*inputs))


def test_modulation_reaches_the_arithmetic(inputs):
    for modulation in contract.MODULATION:
        buffers = nan_buffers(70)
        h3mlp.fc1_swiglu_fp8(*inputs, **buffers._asdict(), modulation=modulation)
        want = reference.fc1_swiglu_fp8(*inputs, modulation=modulation, return_intermediates=True)
        assert torch.equal(bits(buffers.workspace_q), bits(want.a_q))
        assert torch.equal(buffers.workspace_scale, want.s_row)
        assert torch.equal(buffers.out, h3mlp.fc1_swiglu_fp8(*inputs, modulation=modulation))
    other = reference.norm_quant(*inputs[:5])
    assert not torch.equal(bits(buffers.workspace_q), bits(other.a_q)), "the two cannot be told apart here"


class TestWithoutAdaLN:
    @pytest.fixture
    def plain(self, inputs):
        return without_adaln(inputs)

    def test_it_is_rms_norm(self, plain):
        buffers = nan_buffers(70)
        got = h3mlp.fc1_swiglu_fp8(*plain, **buffers._asdict())
        want = reference.fc1_swiglu_fp8(*plain, return_intermediates=True)
        assert torch.equal(bits(buffers.workspace_q), bits(want.a_q))
        assert torch.equal(buffers.workspace_scale, want.s_row)
        assert torch.equal(want.a, want.n)
        torch.testing.assert_close(got, want.y, rtol=2**-6, atol=1e-4)
        assert torch.equal(got, h3mlp.fc1_swiglu_fp8(*plain))

    def test_tables_of_zeros_do_the_same(self, plain, inputs):
        """The sum with a shift of -0 is n for every n, the signs of zeros included."""
        zeros = torch.zeros_like(inputs.adaln_scale)
        tables = inputs._replace(adaln_scale=zeros, adaln_shift=-zeros, adaln_index=inputs.adaln_index.clamp(0))
        assert torch.equal(h3mlp.fc1_swiglu_fp8(*plain), h3mlp.fc1_swiglu_fp8(*tables))

    @pytest.mark.parametrize("rows", [0, 1])
    def test_few_rows(self, plain, rows):
        got = h3mlp.fc1_swiglu_fp8(*plain._replace(x=plain.x[:rows]))
        assert got.shape == (rows, FFN)

    def test_buffers_that_overlap_are_named(self, plain):
        with pytest.raises(ValueError, match="out must not overlap x; they share memory"):
            h3mlp.fc1_swiglu_fp8(*plain, out=plain.x.view(-1)[: 70 * FFN].view(70, FFN))

    @pytest.mark.parametrize("backend", BACKENDS)
    def test_compiled(self, plain, backend):
        compiled = torch.compile(
            lambda *a: h3mlp.fc1_swiglu_fp8(*a, modulation="eager"), fullgraph=True, backend=backend
        )
        assert torch.equal(compiled(*plain), h3mlp.fc1_swiglu_fp8(*plain))

    def test_the_profiler_sees_it(self, plain):
        with torch.autograd.profiler.profile() as profile:
            got = h3mlp.fc1_swiglu_fp8(*plain)
        assert "h3mlp::fc1_swiglu_fp8" in {event.name for event in profile.function_events}
        assert torch.equal(got, h3mlp.fc1_swiglu_fp8(*plain))


def test_the_cpu_accumulates_in_fp32_either_way(inputs):
    assert torch.equal(h3mlp.fc1_swiglu_fp8(*inputs, accumulate="fast"), h3mlp.fc1_swiglu_fp8(*inputs))


class TestBuffers:
    def test_all_given(self, inputs):
        want = reference.fc1_swiglu_fp8(*inputs, return_intermediates=True)
        buffers = nan_buffers(70)
        got = h3mlp.fc1_swiglu_fp8(*inputs, **buffers._asdict())
        assert got is buffers.out
        assert torch.equal(got, h3mlp.fc1_swiglu_fp8(*inputs))
        assert torch.equal(bits(buffers.workspace_q), bits(want.a_q))
        assert torch.equal(buffers.workspace_scale, want.s_row)

    @pytest.mark.parametrize("name", ["out", "workspace_q", "workspace_scale"])
    def test_one_given(self, inputs, name):
        buffer = getattr(nan_buffers(70), name)
        got = h3mlp.fc1_swiglu_fp8(*inputs, **{name: buffer})
        assert torch.equal(got, h3mlp.fc1_swiglu_fp8(*inputs))
        assert not buffer.float().isnan().any()
        assert (got is buffer) == (name == "out")

    def test_longer_ones_are_used_from_the_start(self, inputs):
        buffers = nan_buffers(100)
        got = h3mlp.fc1_swiglu_fp8(*inputs, **buffers._asdict())
        assert got.shape == (70, FFN)
        assert got.data_ptr() == buffers.out.data_ptr()
        assert torch.equal(got, h3mlp.fc1_swiglu_fp8(*inputs))
        for buffer in buffers:
            assert buffer[70:].float().isnan().all(), "rows past M must stay as they were"
            assert not buffer[:70].float().isnan().any()


class TestAccepted:
    def test_no_rows(self, inputs):
        none = inputs._replace(x=inputs.x[:0], adaln_index=inputs.adaln_index[:0])
        assert h3mlp.fc1_swiglu_fp8(*none).shape == (0, FFN)
        buffers = nan_buffers(3)
        assert h3mlp.fc1_swiglu_fp8(*none, **buffers._asdict()).shape == (0, FFN)
        assert buffers.out.isnan().all()

    def test_int32_and_int64_indices(self, inputs):
        int32 = inputs._replace(adaln_index=inputs.adaln_index.int())
        assert torch.equal(h3mlp.fc1_swiglu_fp8(*int32), h3mlp.fc1_swiglu_fp8(*inputs))

    @pytest.mark.parametrize("bad", [-1, TABLE_ROWS, -(2**31), 2**31 - 1, 2**63 - 1, -(2**63), 2**32, 2**32 + 1])
    def test_indices_outside_the_table(self, inputs, bad):
        index = inputs.adaln_index.clone()
        index[5] = bad
        buffers = nan_buffers(70)
        got = h3mlp.fc1_swiglu_fp8(*inputs._replace(adaln_index=index), **buffers._asdict())
        assert (bits(got[5]) == 0).all()
        assert (bits(buffers.workspace_q[5]) == 0).all()
        keep = torch.arange(70) != 5
        assert torch.equal(got[keep], h3mlp.fc1_swiglu_fp8(*inputs)[keep])

    def test_tables_as_column_chunks_of_one_projection(self, inputs):
        projection = torch.full((TABLE_ROWS, 6 * HIDDEN), torch.nan, dtype=torch.bfloat16)
        shift, scale = projection.chunk(6, dim=1)[3:5]
        shift.copy_(inputs.adaln_shift)
        scale.copy_(inputs.adaln_scale)
        got = h3mlp.fc1_swiglu_fp8(*inputs._replace(adaln_scale=scale, adaln_shift=shift))
        assert torch.equal(got, h3mlp.fc1_swiglu_fp8(*inputs))

    @pytest.mark.parametrize("rows", [1, 6, 70, 1000])
    def test_any_number_of_table_rows(self, rows):
        inputs, buffers = make_inputs(70, table_rows=rows), nan_buffers(70)
        h3mlp.fc1_swiglu_fp8(*inputs, **buffers._asdict())
        want = reference.fc1_swiglu_fp8(*inputs, return_intermediates=True)
        assert torch.equal(bits(buffers.workspace_q), bits(want.a_q))

    def test_tables_of_one_row_for_all(self, inputs):
        """An expanded table has a row stride of 0."""
        expanded = inputs._replace(
            adaln_scale=inputs.adaln_scale[:1].expand(TABLE_ROWS, -1),
            adaln_shift=inputs.adaln_shift[:1].expand(TABLE_ROWS, -1),
        )
        single = inputs._replace(adaln_index=torch.zeros_like(inputs.adaln_index))
        assert torch.equal(h3mlp.fc1_swiglu_fp8(*expanded), h3mlp.fc1_swiglu_fp8(*single))

    def test_x_with_a_row_stride(self, inputs):
        rows = torch.full((70, HIDDEN + 16), torch.nan, dtype=torch.bfloat16)
        rows[:, 8:-8] = inputs.x
        assert torch.equal(h3mlp.fc1_swiglu_fp8(*inputs._replace(x=rows[:, 8:-8])), h3mlp.fc1_swiglu_fp8(*inputs))

    def test_a_row_past_2_to_the_31_elements(self, inputs):
        """Two rows of x 2^31 + 8 elements apart: 4.3 GB of address space, of which two rows are touched."""
        far = 2**31 + 8
        x = torch.empty(far + HIDDEN, dtype=torch.bfloat16).as_strided((2, HIDDEN), (far, 1))
        x.copy_(inputs.x[:2])
        near = inputs._replace(x=inputs.x[:2], adaln_index=inputs.adaln_index[:2])
        assert torch.equal(h3mlp.fc1_swiglu_fp8(*near._replace(x=x)), h3mlp.fc1_swiglu_fp8(*near))

    @pytest.mark.parametrize(("hidden", "ffn"), [(128, 64), (256, 192), (1152, 704)])
    def test_other_sizes(self, hidden, ffn):
        inputs = make_inputs(9, hidden, ffn)
        got = h3mlp.fc1_swiglu_fp8(*inputs)
        torch.testing.assert_close(got, reference.fc1_swiglu_fp8(*inputs), rtol=2**-6, atol=1e-4)


class TestSurroundings:
    """What a program around the operator may have switched on does not reach into it."""

    def run(self, inputs):
        buffers = nan_buffers(70)
        h3mlp.fc1_swiglu_fp8(*inputs, **buffers._asdict())
        return buffers

    def assert_as_usual(self, got, inputs):
        for have, want in zip(got, self.run(inputs), strict=True):
            assert torch.equal(bits(have), bits(want))

    def test_autocast(self, inputs, layer):
        want = reference.fc1_swiglu_fp8(*inputs)
        with torch.autocast("cpu", dtype=torch.bfloat16):
            got = self.run(inputs)
            prepared = h3mlp.prepare_fc1_weight_fp8(layer.weight)
            assert torch.equal(reference.fc1_swiglu_fp8(*inputs), want)
        self.assert_as_usual(got, inputs)
        assert torch.equal(bits(prepared[0]), bits(inputs.fc1_weight_q))
        assert torch.equal(prepared[1], inputs.fc1_weight_scale)

    def test_default_device(self, inputs, layer):
        want = reference.fc1_swiglu_fp8(*inputs)
        buffers = nan_buffers(70)
        with torch.device("meta"):
            h3mlp.fc1_swiglu_fp8(*inputs, **buffers._asdict())
            assert h3mlp.prepare_fc1_weight_fp8(layer.weight)[0].device.type == "cpu"
            assert torch.equal(reference.fc1_swiglu_fp8(*inputs), want)
        self.assert_as_usual(buffers, inputs)

    @pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
    def test_default_dtype(self, inputs, dtype):
        torch.set_default_dtype(dtype)
        try:
            got = self.run(inputs)
        finally:
            torch.set_default_dtype(torch.float32)
        self.assert_as_usual(got, inputs)


def test_the_model_at_its_real_size():
    """Two rows through the drop-in, so that its dimensions are run and not only checked. Tolerance: an E4M3 product of
    5376 terms accumulated in FP32 is off by about 2^-20 of h; 99% of the BF16 outputs equal."""
    layer = synthetic.layer(2)
    weight = h3mlp.prepare_minimax_h3_fc1_weight_fp8(layer.weight)
    got = h3mlp.minimax_h3_fc1_swiglu_fp8(*layer.activations, *weight)
    want = reference.fc1_swiglu_fp8(*layer.activations, *weight)
    assert got.shape == (2, 14336)
    assert (got == want).float().mean() >= 0.99


class Recorder(TorchDispatchMode):
    """Notes the names of the operators that pass the dispatcher."""

    def __init__(self):
        super().__init__()
        self.names = []

    def __torch_dispatch__(self, function, _types, args=(), kwargs=None):
        self.names.append(function.name())
        return function(*args, **(kwargs or {}))


class FunctionRecorder(TorchFunctionMode):
    """Notes the torch functions that are called."""

    def __init__(self):
        super().__init__()
        self.names = []

    def __torch_function__(self, function, _types, args=(), kwargs=None):
        self.names.append(str(function))
        return function(*args, **(kwargs or {}))


class TestWhoSeesAnOperator:
    """Every call is one torch operator, for whoever observes or transforms them."""

    @pytest.fixture
    def backend(self, monkeypatch):
        """A backend that notes its calls and writes nothing."""
        calls = []
        backend = SimpleNamespace(fc1_swiglu=lambda *args: calls.append(args))
        monkeypatch.setattr(dispatch, "select", lambda _: backend)
        return calls

    @pytest.mark.parametrize("accumulate", contract.ACCUMULATE)
    def test_the_backend_gets_what_the_caller_gave(self, inputs, backend, accumulate):
        buffers = nan_buffers(70)
        options = {"eps": 0.5, "accumulate": accumulate, "modulation": "eager"}
        h3mlp.fc1_swiglu_fp8(*inputs, **buffers._asdict(), **options)
        with Recorder():
            h3mlp.fc1_swiglu_fp8(*inputs, **buffers._asdict(), **options)
        h3mlp.fc1_swiglu_fp8(*inputs, out=buffers.out, **options)
        plain, recorded, partly = backend
        for got in (plain, recorded):
            assert all(a is b for a, b in zip((*got[0], *got[2]), (*inputs, *buffers), strict=True))
            assert got[1::2] == (0.5, accumulate)
            assert got[4] == "eager"
        assert partly[2].out is buffers.out
        assert [t.shape[0] for t in partly[2]] == [70] * 3

    def test_a_dispatch_mode(self, inputs):
        want = h3mlp.fc1_swiglu_fp8(*inputs)
        with Recorder() as recorder:
            got = h3mlp.fc1_swiglu_fp8(*inputs)
            h3mlp.fc1_swiglu_fp8(*inputs, out=nan_buffers(70).out)
        assert torch.equal(got, want)
        ours = [name for name in recorder.names if name.startswith("h3mlp")]
        assert ours == ["h3mlp::fc1_swiglu_fp8", "h3mlp::fc1_swiglu_fp8_out"]

    def test_a_function_mode(self, inputs):
        with FunctionRecorder() as recorder:
            h3mlp.fc1_swiglu_fp8(*inputs)
        assert "h3mlp.fc1_swiglu_fp8.default" in recorder.names

    def test_fake_tensors(self, inputs):
        with FakeTensorMode() as mode:
            fakes = contract.FC1Inputs(*(mode.from_tensor(t) for t in inputs))
            assert isinstance(h3mlp.fc1_swiglu_fp8(*fakes), FakeTensor)
        assert h3mlp.fc1_swiglu_fp8(*fakes).shape == (70, FFN), "outside the mode, too"

    def test_make_fx(self, inputs):
        graph = make_fx(lambda *tensors: h3mlp.fc1_swiglu_fp8(*tensors))(*inputs)
        assert "torch.ops.h3mlp.fc1_swiglu_fp8.default" in graph.code

    # torch.jit is deprecated, which torch 2.14 says by a FutureWarning.
    @pytest.mark.filterwarnings(
        "ignore::DeprecationWarning", "ignore::torch.jit.TracerWarning", "ignore:.*torch.jit:FutureWarning"
    )
    def test_jit_trace(self, inputs):
        traced = torch.jit.trace(lambda *tensors: h3mlp.fc1_swiglu_fp8(*tensors), tuple(inputs), check_trace=False)
        assert "h3mlp::fc1_swiglu_fp8" in str(traced.graph)

    def test_vmap(self, inputs):
        """torch's fallback calls the operator once an element."""
        got = torch.vmap(lambda x: h3mlp.fc1_swiglu_fp8(x, *inputs[1:]))(torch.stack([inputs.x, inputs.x * 2]))
        assert torch.equal(got[0], h3mlp.fc1_swiglu_fp8(*inputs))
        assert torch.equal(got[1], h3mlp.fc1_swiglu_fp8(*inputs._replace(x=inputs.x * 2)))

    def test_the_profiler(self, inputs):
        with torch.autograd.profiler.profile() as profile:
            h3mlp.fc1_swiglu_fp8(*inputs)
        assert "h3mlp::fc1_swiglu_fp8" in {event.name for event in profile.function_events}

    def test_a_subclass(self, inputs):
        class Sub(torch.Tensor):
            pass

        got = h3mlp.fc1_swiglu_fp8(*inputs._replace(x=inputs.x.as_subclass(Sub)))
        assert torch.equal(got, h3mlp.fc1_swiglu_fp8(*inputs))


class TestTorchOperators:
    def test_opcheck_functional(self, inputs, monkeypatch):
        monkeypatch.setattr(torch, "allclose", float8_allclose)
        torch.library.opcheck(torch.ops.h3mlp.fc1_swiglu_fp8.default, (*inputs, 1e-5, "fp32", "fused"))

    def test_opcheck_out(self, inputs, monkeypatch):
        monkeypatch.setattr(torch, "allclose", float8_allclose)
        torch.library.opcheck(
            torch.ops.h3mlp.fc1_swiglu_fp8_out.default, (*inputs, 1e-5, "fp32", "fused", *nan_buffers(70))
        )

    def test_meta(self, inputs):
        meta = contract.FC1Inputs(*(t.to("meta") for t in inputs))
        got = h3mlp.fc1_swiglu_fp8(*meta)
        assert got.is_meta
        assert (got.shape, got.dtype) == ((70, FFN), torch.bfloat16)

    @pytest.mark.parametrize("backend", BACKENDS)
    def test_compile_functional(self, inputs, backend):
        """With work around the operator, for two row counts, so that the second runs with a symbolic M."""

        def block(x, *rest):
            return h3mlp.fc1_swiglu_fp8(x * 2, *rest) + 1

        compiled = torch.compile(block, fullgraph=True, backend=backend)
        for rows in (70, 33):
            some = inputs._replace(x=inputs.x[:rows], adaln_index=inputs.adaln_index[:rows])
            assert torch.equal(compiled(*some), block(*some))

    @pytest.mark.parametrize("dynamic", [True, None])
    def test_rows_and_tables_that_change(self, inputs, dynamic):
        """Compiled as it is, eps and all. With dynamic=True the first compilation serves all; without, the second."""
        compiled = torch.compile(h3mlp.fc1_swiglu_fp8, fullgraph=True, dynamic=dynamic, backend="aot_eager")
        for i, (rows, table_rows) in enumerate([(70, 4), (33, 6), (50, 3), (64, 12), (7, 2)]):
            others = make_inputs(rows, table_rows=table_rows)
            some = others._replace(fc1_weight_q=inputs.fc1_weight_q, fc1_weight_scale=inputs.fc1_weight_scale)
            with torch._dynamo.config.patch(error_on_recompile=i > (0 if dynamic else 1)):
                assert torch.equal(compiled(*some), h3mlp.fc1_swiglu_fp8(*some))

    @pytest.mark.parametrize("backend", BACKENDS)
    def test_another_eps_under_dynamic(self, inputs, backend):
        """Where it is a symbol while the graph is traced."""
        compiled = torch.compile(
            lambda eps, *tensors: h3mlp.fc1_swiglu_fp8(*tensors, eps=eps), fullgraph=True, dynamic=True, backend=backend
        )
        for eps in (1e-5, 0.5, 1e-3):
            assert torch.equal(compiled(eps, *inputs), h3mlp.fc1_swiglu_fp8(*inputs, eps=eps))
        for eps in (0.0, -1.0, float("inf"), 1e39):
            with pytest.raises(Exception, match="eps must be a finite positive number"):
                compiled(eps, *inputs)
        with pytest.raises(Exception, match="NaN"):  # torch itself compares no symbol with it
            compiled(float("nan"), *inputs)

    @pytest.mark.parametrize("backend", BACKENDS)
    def test_compile_with_buffers(self, inputs, backend):
        def block(buffers, *tensors):
            return h3mlp.fc1_swiglu_fp8(*tensors, out=buffers[0], workspace_q=buffers[1], workspace_scale=buffers[2])

        compiled = torch.compile(block, fullgraph=True, backend=backend)
        want, got = nan_buffers(90), nan_buffers(90)
        result = compiled(got, *inputs)
        assert torch.equal(result, block(want, *inputs))
        for have, expected in zip(got, want, strict=True):
            assert torch.equal(bits(have), bits(expected))

    def test_compile_with_only_out(self, inputs):
        compiled = torch.compile(
            lambda out, *tensors: h3mlp.fc1_swiglu_fp8(*tensors, out=out), fullgraph=True, backend="aot_eager"
        )
        out = nan_buffers(70).out
        assert torch.equal(compiled(out, *inputs), h3mlp.fc1_swiglu_fp8(*inputs))
        assert torch.equal(out, h3mlp.fc1_swiglu_fp8(*inputs))

    def test_compile_refuses_what_eager_refuses(self, inputs):
        compiled = torch.compile(h3mlp.fc1_swiglu_fp8, fullgraph=True, backend="aot_eager")
        with pytest.raises(RuntimeError, match="x must be bfloat16"):
            compiled(inputs.x.float(), *inputs[1:])

    def test_export(self, inputs):
        class Block(torch.nn.Module):
            def forward(self, x, index, norm, scale, shift, weight_q, weight_scale):
                return h3mlp.fc1_swiglu_fp8(x, norm, scale, shift, index, weight_q, weight_scale)

        x, norm, scale, shift, index, *weight = inputs
        rows = torch.export.Dim("rows")
        program = torch.export.export(
            Block(),
            (x, index, norm, scale, shift, *weight),
            dynamic_shapes=({0: rows}, {0: rows}, None, None, None, None, None),
        )
        assert "h3mlp.fc1_swiglu_fp8.default" in program.graph_module.code
        for rows in (70, 1, 33):
            got = program.module()(x[:rows], index[:rows], norm, scale, shift, *weight)
            some = inputs._replace(x=x[:rows], adaln_index=index[:rows])
            assert torch.equal(got, h3mlp.fc1_swiglu_fp8(*some))
