"""Every refusal of the operator: it names the argument, what it must be and what it was, and writes nothing."""

import numpy as np
import pytest
import torch
from helpers import FFN, HIDDEN, bits, nan_buffers

import h3mlp
from h3mlp import contract


def refused(match, inputs, error=ValueError, **options):
    """The call raises, and no byte of any argument changes. The out-variant refuses the same as the public function."""
    tensors = [
        t for t in (*inputs, *options.values()) if isinstance(t, torch.Tensor) and not (t.is_meta or t.is_sparse)
    ]
    before = [bits(t.detach()).clone() for t in tensors]
    with pytest.raises(error, match=match):
        h3mlp.fc1_swiglu_fp8(*inputs, **options)
    assert all(torch.equal(bits(t.detach()), old) for t, old in zip(tensors, before, strict=True))


def wide(t: torch.Tensor) -> torch.Tensor:
    """The same values with a stride of 2 between neighbours."""
    return torch.stack([t, t], dim=-1)[..., 0]


INPUT_CASES = [
    ("x", lambda t: t.float(), r"x must be bfloat16 \[M, 384\]; it is float32 \[70, 384\] .*on cpu"),
    ("x", lambda t: t[0], r"x must be bfloat16 \[M, 384\]; it is bfloat16 \[384\]"),
    ("x", lambda t: t[None], r"x must be bfloat16 \[M, 384\]; it is bfloat16 \[1, 70, 384\]"),
    ("x", lambda t: t[:, :256], r"x must be bfloat16 \[M, 384\]; it is bfloat16 \[70, 256\]"),
    ("x", wide, r"x must be \[M, 384\] with unit inner stride; it is .*strides \(768, 2\)"),
    (
        "x",
        lambda t: t.numpy(force=True) if t.dtype != torch.bfloat16 else t.float().numpy(),
        "x must be a dense torch.Tensor",
    ),
    ("x", lambda _: None, r"x must be a dense torch.Tensor; it is None \(NoneType\)"),
    (
        "x",
        lambda t: t.to_sparse(),
        r"x must be a dense torch.Tensor; it is bfloat16 \[70, 384\] of layout torch.sparse_coo",
    ),
    ("x_norm_weight", lambda t: t.half(), r"x_norm_weight must be bfloat16 \[384\]; it is float16 \[384\]"),
    ("x_norm_weight", lambda t: t[:-1], r"x_norm_weight must be bfloat16 \[384\]; it is bfloat16 \[383\]"),
    ("x_norm_weight", wide, "x_norm_weight must be contiguous; it is .*strides"),
    (
        "x_norm_weight",
        lambda t: t.to("meta"),
        "x_norm_weight must be on cpu like the other arguments; it is .* on meta",
    ),
    (
        "adaln_scale",
        lambda t: t.float(),
        r"adaln_scale must be bfloat16 \[R, 384\], so cast to BF16 as by adaln_scale.bfloat16\(\); it is float32",
    ),
    ("adaln_shift", lambda t: t.half(), r"adaln_shift must be bfloat16 \[R, 384\], so cast to BF16 as by .*float16"),
    ("adaln_shift", lambda t: t.int(), r"adaln_shift must be bfloat16 \[R, 384\]; it is int32"),
    ("adaln_scale", lambda t: t[:0], r"adaln_scale must be bfloat16 \[R, 384\] with R >= 1; it is bfloat16 \[0, 384\]"),
    ("adaln_scale", lambda t: t.to("meta"), "adaln_scale must be on cpu"),
    ("adaln_shift", wide, r"adaln_shift must be \[R, 384\] with unit inner stride"),
    ("adaln_shift", lambda t: t[:-1], r"adaln_shift must be \[4, 384\] as adaln_scale; it is bfloat16 \[3, 384\]"),
    (
        "adaln_shift",
        lambda t: t.repeat(2, 1),
        r"adaln_shift must be \[4, 384\] as adaln_scale; it is bfloat16 \[8, 384\]",
    ),
    ("adaln_index", lambda t: t.short(), r"adaln_index must be int32 or int64 \[70\]; it is int16"),
    ("adaln_index", lambda t: t.float(), r"adaln_index must be int32 or int64 \[70\]; it is float32"),
    ("adaln_index", lambda t: t[:-1], r"adaln_index must be int32 or int64 \[70\]; it is int64 \[69\]"),
    ("adaln_index", wide, "adaln_index must be contiguous"),
    ("adaln_index", lambda t: t.to("meta"), "adaln_index must be on cpu"),
    ("fc1_weight_q", lambda t: t.float(), r"fc1_weight_q must be float8_e4m3fn \[2F, H\].*; it is float32"),
    ("fc1_weight_q", lambda t: t.view(torch.float8_e5m2), r"fc1_weight_q must be float8_e4m3fn .*float8_e5m2"),
    ("fc1_weight_q", lambda t: t[:192], r"fc1_weight_q must be .*F a multiple of 64.*; it is .*\[192, 384\]"),
    ("fc1_weight_q", lambda t: t[:, :192], r"fc1_weight_q must be .*H of 128; it is .*\[256, 192\]"),
    ("fc1_weight_q", lambda t: t[:128], r"fc1_weight_scale must be float32 \[128\]; it is float32 \[256\]"),
    ("fc1_weight_q", lambda t: t.T.contiguous().T, "fc1_weight_q must be contiguous; it is"),
    ("fc1_weight_q", lambda t: t.to("meta"), "fc1_weight_q must be on cpu"),
    ("fc1_weight_q", h3mlp.unpack_fc1_rows, "fc1_weight_q must be in packed row order, from .*its tag says 'gate_up'"),
    ("fc1_weight_scale", lambda t: t.double(), r"fc1_weight_scale must be float32 \[256\]; it is float64"),
    ("fc1_weight_scale", lambda t: t[:, None], r"fc1_weight_scale must be float32 \[256\]; it is float32 \[256, 1\]"),
    ("fc1_weight_scale", h3mlp.unpack_fc1_rows, "fc1_weight_scale must be in packed row order"),
]


@pytest.mark.parametrize(
    ("name", "change", "match"), INPUT_CASES, ids=[f"{c[0]}-{i}" for i, c in enumerate(INPUT_CASES)]
)
def test_inputs(inputs, name, change, match):
    bad = inputs._replace(**{name: change(getattr(inputs, name))})
    refused(match, bad)
    refused(match, bad, **nan_buffers(70)._asdict())
    refused(match, bad, out=nan_buffers(70).out)


BUFFER_CASES = [
    ("out", lambda t: t[:-1], r"out must be bfloat16 \[M, 128\] with M >= 70; it is bfloat16 \[69, 128\]"),
    ("out", lambda t: t.half(), r"out must be bfloat16 \[M, 128\].*; it is float16"),
    ("out", lambda t: t[:, :64], r"out must be bfloat16 \[M, 128\].*; it is bfloat16 \[70, 64\]"),
    ("out", lambda t: t.flatten(), r"out must be bfloat16 \[M, 128\]"),
    ("out", wide, "out must be contiguous"),
    ("out", lambda t: t.to("meta"), "out must be on cpu"),
    ("out", lambda _: 7, r"out must be a dense torch.Tensor; it is 7 \(int\)"),
    ("workspace_q", lambda t: t[:-1], r"workspace_q must be float8_e4m3fn \[M, 384\] with M >= 70"),
    ("workspace_q", lambda t: t.view(torch.uint8), r"workspace_q must be float8_e4m3fn .*; it is uint8"),
    ("workspace_q", lambda t: t.T.contiguous().T, "workspace_q must be contiguous"),
    ("workspace_q", lambda t: t.to("meta"), "workspace_q must be on cpu"),
    ("workspace_scale", lambda t: t[:-1], r"workspace_scale must be float32 \[M\] with M >= 70"),
    ("workspace_scale", lambda t: t[:, None], r"workspace_scale must be float32 \[M\].*; it is float32 \[70, 1\]"),
    ("workspace_scale", lambda t: t[0], r"workspace_scale must be float32 \[M\].*; it is float32 \[\]"),
    ("workspace_scale", wide, "workspace_scale must be contiguous"),
]


@pytest.mark.parametrize(
    ("name", "change", "match"), BUFFER_CASES, ids=[f"{c[0]}-{i}" for i, c in enumerate(BUFFER_CASES)]
)
def test_buffers(inputs, name, change, match):
    buffers = nan_buffers(70)._asdict()
    buffers[name] = change(buffers[name])
    refused(match, inputs, **buffers)
    refused(match, inputs, **{name: buffers[name]})


@pytest.mark.parametrize(
    ("missing", "match"),
    [
        (
            ["adaln_scale"],
            "adaln_scale must be a tensor like adaln_shift, or all of adaln_scale, adaln_shift, adaln_index",
        ),
        (["adaln_shift"], "adaln_shift must be a tensor like adaln_scale, or all of .* None; it is None"),
        (["adaln_index"], "adaln_index must be a tensor like adaln_scale"),
        (["adaln_scale", "adaln_shift"], "adaln_scale must be a tensor like adaln_index"),
        (["adaln_scale", "adaln_index"], "adaln_scale must be a tensor like adaln_shift"),
        (["adaln_shift", "adaln_index"], "adaln_shift must be a tensor like adaln_scale"),
        (["adaln_scale", "adaln_shift", "adaln_index", "x"], "x must be a dense torch.Tensor; it is None"),
        (["adaln_scale", "adaln_shift", "adaln_index", "fc1_weight_q"], "fc1_weight_q must be a dense torch.Tensor"),
    ],
)
def test_some_of_adaln(inputs, missing, match):
    bad = inputs._replace(**dict.fromkeys(missing))
    for _ in range(2):  # the second time behind calls that were accepted
        refused(match, bad)
        refused(match, bad, **nan_buffers(70)._asdict())
        with pytest.raises(ValueError, match=match):
            torch.ops.h3mlp.fc1_swiglu_fp8(*bad, 1e-5, "fp32", "fused")
        h3mlp.fc1_swiglu_fp8(*inputs)
        h3mlp.fc1_swiglu_fp8(*inputs, **nan_buffers(70)._asdict())


@pytest.mark.parametrize("modulation", ["", "Fused", None, 1])
def test_modulation(inputs, modulation):
    refused("modulation must be 'fused' or 'eager'; it is", inputs, modulation=modulation)


@pytest.mark.parametrize(
    "eps", [0.0, -1e-5, float("nan"), float("inf"), 1e-46, 1e39, "1e-5", None, True, 1j, torch.tensor(1e-5)]
)
def test_eps(inputs, eps):
    refused("eps must be a finite positive number in FP32; it is", inputs, eps=eps)


@pytest.mark.parametrize("eps", [1, np.float32(1e-5), 2.0**-149])
def test_eps_of_other_number_types(inputs, eps):
    assert h3mlp.fc1_swiglu_fp8(*inputs, eps=eps).isfinite().all()


@pytest.mark.parametrize("accumulate", ["FP32", "", "fp16", None, True, 32, b"fp32", ["fp32"], np.array(["fp32"])])
def test_accumulate(inputs, accumulate):
    refused("accumulate must be 'fp32' or 'fast'; it is", inputs, accumulate=accumulate)
    refused("accumulate must be 'fp32' or 'fast'; it is", inputs, accumulate=accumulate, **nan_buffers(70)._asdict())


class TestAfterAnAcceptedCall:
    """One call that was accepted excuses none that comes after it."""

    def test_row_order(self, inputs):
        h3mlp.fc1_swiglu_fp8(*inputs)
        for name in ("fc1_weight_q", "fc1_weight_scale"):
            tagged = contract.tag_row_order(getattr(inputs, name).clone(), contract.HALVES)
            refused(f"{name} must be in packed row order", inputs._replace(**{name: tagged}))

    def test_overlap(self, inputs):
        buffers = nan_buffers(70)
        h3mlp.fc1_swiglu_fp8(*inputs, **buffers._asdict())
        out = inputs.x.view(-1)[: 70 * FFN].view(70, FFN)
        refused("out must not overlap x", inputs, **buffers._replace(out=out)._asdict())

    def test_requires_grad(self, inputs):
        h3mlp.fc1_swiglu_fp8(*inputs)
        refused("inference operator", inputs._replace(x=inputs.x.requires_grad_()), error=RuntimeError)

    def test_a_sparse_tensor_of_the_same_shape_and_strides(self, inputs):
        """One index, expanded: its stride is 0, as are all strides that a sparse tensor reports."""
        index = torch.zeros((), dtype=torch.int64).expand(1)
        one = inputs._replace(x=inputs.x[:1], adaln_index=index)
        h3mlp.fc1_swiglu_fp8(*one)
        sparse = index.clone().to_sparse()
        assert (sparse.shape, sparse.stride(), sparse.dtype) == (index.shape, index.stride(), index.dtype)
        refused("adaln_index must be a dense torch.Tensor", one._replace(adaln_index=sparse))

    @pytest.mark.parametrize("name", contract.FC1Inputs._fields)
    def test_each_input_with_other_metadata(self, inputs, name):
        h3mlp.fc1_swiglu_fp8(*inputs, **nan_buffers(70)._asdict())
        good = getattr(inputs, name)
        for bad in (good[:-1], good.double(), good.to("meta"), wide(good)):
            refused(".* must be ", inputs._replace(**{name: bad}), **nan_buffers(70)._asdict())

    def test_a_refusal_stays_one(self, inputs):
        for _ in range(2):
            refused("x must be bfloat16", inputs._replace(x=inputs.x.float()))

    def test_overlap_that_more_rows_bring(self, inputs):
        """The same addresses, of which the buffer's 35 rows end where x begins and its 70 do not."""
        arena = torch.zeros(35 * FFN + 70 * HIDDEN, dtype=torch.bfloat16)
        x = arena[35 * FFN :].view(70, HIDDEN)
        x.copy_(inputs.x)
        buffers = nan_buffers(70)._replace(out=arena[: 70 * FFN].view(70, FFN))
        few = inputs._replace(x=x[:35], adaln_index=inputs.adaln_index[:35])
        want = h3mlp.fc1_swiglu_fp8(*few)
        for _ in range(2):
            assert torch.equal(h3mlp.fc1_swiglu_fp8(*few, **buffers._asdict()), want)
            refused("out must not overlap x", inputs._replace(x=x), **buffers._asdict())

    def test_what_is_accepted_without_grad_mode_is_not_with_it(self, inputs):
        weight = torch.nn.Parameter(inputs.x_norm_weight)
        trained = inputs._replace(x_norm_weight=weight)
        buffers = nan_buffers(len(inputs.x))._asdict()
        for _ in range(2):
            with torch.no_grad():
                h3mlp.fc1_swiglu_fp8(*trained, **buffers)
            with pytest.raises(RuntimeError, match="no gradient"):
                h3mlp.fc1_swiglu_fp8(*trained, **buffers)


class TestOverlap:
    """out and the workspaces against the inputs and each other. Arenas are allocated whole and cut."""

    def test_out_and_x(self, inputs):
        arena = torch.zeros(70 * (HIDDEN + FFN), dtype=torch.bfloat16)
        x = arena[: 70 * HIDDEN].view(70, HIDDEN)
        x.copy_(inputs.x)
        want = h3mlp.fc1_swiglu_fp8(*inputs)
        apart = arena[70 * HIDDEN :].view(70, FFN)
        overlapping = arena[70 * HIDDEN - 1 : -1].view(70, FFN)
        refused("out must not overlap x; they share memory", inputs._replace(x=x), out=overlapping)
        assert torch.equal(h3mlp.fc1_swiglu_fp8(*inputs._replace(x=x), out=apart), want), "neighbours are fine"

    def test_out_and_a_row_of_a_strided_x(self, inputs):
        rows = torch.zeros(70, HIDDEN + FFN, dtype=torch.bfloat16)
        refused(
            "out must not overlap x", inputs._replace(x=rows[:, :HIDDEN]), out=rows.view(-1)[: 70 * FFN].view(70, FFN)
        )

    def test_workspaces_and_each_other(self, inputs):
        arena = torch.zeros(70 * HIDDEN + 4 * 70, dtype=torch.uint8)
        q = arena[: 70 * HIDDEN].view(contract.QUANTIZED).view(70, HIDDEN)
        scale = arena[70 * HIDDEN - 4 : -4].view(torch.float32)
        refused("workspace_q must not overlap workspace_scale", inputs, workspace_q=q, workspace_scale=scale)
        scale = arena[70 * HIDDEN :].view(torch.float32)
        h3mlp.fc1_swiglu_fp8(*inputs, workspace_q=q, workspace_scale=scale)

    def test_out_and_the_weight(self, inputs):
        out = inputs.fc1_weight_q.view(-1).view(torch.bfloat16)[: 70 * FFN].view(70, FFN)
        refused("out must not overlap fc1_weight_q", inputs, out=out)

    def test_only_the_rows_in_use_count(self, inputs):
        """The tail of a longer buffer is not written, so an input may lie there."""
        arena = torch.zeros(70 * FFN + 70 * HIDDEN, dtype=torch.bfloat16)
        x = arena[70 * FFN :].view(70, HIDDEN)
        x.copy_(inputs.x)
        want = h3mlp.fc1_swiglu_fp8(*inputs)
        assert torch.equal(h3mlp.fc1_swiglu_fp8(*inputs._replace(x=x), out=arena.view(-1, FFN)), want)
        assert torch.equal(x, inputs.x)

    def test_without_rows_nothing_is_written(self, inputs):
        out = inputs.fc1_weight_q.view(-1)[128:].view(torch.bfloat16)[: 70 * FFN].view(70, FFN)
        none = inputs._replace(x=inputs.x[:0], adaln_index=inputs.adaln_index[:0])
        assert h3mlp.fc1_swiglu_fp8(*none, out=out).shape == (0, FFN)


class TestRequiresGrad:
    message = "inference operator"

    @pytest.mark.parametrize("name", ["x", "x_norm_weight", "adaln_scale", "adaln_shift", "fc1_weight_scale"])
    def test_input(self, inputs, name):
        bad = inputs._replace(**{name: getattr(inputs, name).clone().requires_grad_()})
        refused(self.message, bad, error=RuntimeError)
        with pytest.raises(RuntimeError, match=self.message):
            torch.ops.h3mlp.fc1_swiglu_fp8(*bad, 1e-5, "fp32", "fused")
        with pytest.raises(RuntimeError, match=self.message):
            torch.ops.h3mlp.fc1_swiglu_fp8_out(*bad, 1e-5, "fp32", "fused", *nan_buffers(70))

    def test_buffer(self, inputs):
        refused(self.message, inputs, error=RuntimeError, out=nan_buffers(70).out.requires_grad_())

    @pytest.mark.parametrize("backend", ["eager", "aot_eager"])
    def test_compiled(self, inputs, backend):
        """AOT autograd would differentiate the operator as if it were constant, so tracing must refuse already."""
        torch.compiler.reset()
        compiled = torch.compile(h3mlp.fc1_swiglu_fp8, fullgraph=True, backend=backend)
        with pytest.raises(RuntimeError, match=self.message):
            compiled(*inputs._replace(x_norm_weight=torch.nn.Parameter(inputs.x_norm_weight)))

    @pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
    def test_fine_without_grad_mode(self, inputs, mode):
        parameter = torch.nn.Parameter(inputs.x_norm_weight)
        want = h3mlp.fc1_swiglu_fp8(*inputs)
        with mode():
            assert torch.equal(h3mlp.fc1_swiglu_fp8(*inputs._replace(x_norm_weight=parameter)), want)


def test_more_than_2_to_the_24_rows(inputs):
    rows = 2**24 + 1
    many = inputs._replace(x=inputs.x[:1].expand(rows, HIDDEN), adaln_index=torch.zeros(rows, dtype=torch.int32))
    with pytest.raises(ValueError, match=r"x must be \[M, 384\] with M <= 16777216; it is bfloat16 \[16777217, 384\]"):
        h3mlp.fc1_swiglu_fp8(*many)
    meta = many._replace(**{name: t.to("meta") for name, t in many._asdict().items() if name != "x"})
    meta = meta._replace(x=torch.empty(rows, HIDDEN, dtype=torch.bfloat16, device="meta"))
    refused("M <= 16777216", meta)
    assert h3mlp.fc1_swiglu_fp8(*meta._replace(x=meta.x[1:], adaln_index=meta.adaln_index[1:])).shape == (2**24, FFN)


def test_the_models_function_checks_its_dimensions(inputs):
    with pytest.raises(ValueError, match=r"fc1_weight_q must be \[28672, 5376\].*; it is float8_e4m3fn \[256, 384\]"):
        h3mlp.minimax_h3_fc1_swiglu_fp8(*inputs)
    with pytest.raises(ValueError, match=r"fc1_weight_q must be a dense torch\.Tensor"):
        h3mlp.minimax_h3_fc1_swiglu_fp8(*inputs[:5], None, None)


def test_a_direct_call_of_the_torch_operator_is_checked_too(inputs):
    with pytest.raises(ValueError, match="x must be bfloat16"):
        torch.ops.h3mlp.fc1_swiglu_fp8(inputs.x.float(), *inputs[1:], 1e-5, "fp32", "fused")
    with pytest.raises(ValueError, match="eps must be"):
        torch.ops.h3mlp.fc1_swiglu_fp8(*inputs, 0.0, "fp32", "fused")
    with pytest.raises(ValueError, match="accumulate must be"):
        torch.ops.h3mlp.fc1_swiglu_fp8(*inputs, 1e-5, "fp16", "fused")
    buffers = nan_buffers(70)
    with pytest.raises(ValueError, match="out must not overlap x"):
        torch.ops.h3mlp.fc1_swiglu_fp8_out(
            *inputs, 1e-5, "fp32", "fused", *buffers._replace(out=inputs.x.view(-1)[: 70 * FFN].view(70, FFN))
        )
    for name in buffers._fields:  # for which the dispatcher takes None
        with pytest.raises(ValueError, match=f"{name} must be a dense torch.Tensor; it is None"):
            torch.ops.h3mlp.fc1_swiglu_fp8_out(*inputs, 1e-5, "fp32", "fused", *buffers._replace(**{name: None}))
