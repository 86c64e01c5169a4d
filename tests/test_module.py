import copy
import io
import itertools

import pytest
import torch
from helpers import FFN, HIDDEN, TABLE_ROWS, bits, make_inputs
from safetensors.torch import load_file, save_file
from torch import nn

import h3mlp
from h3mlp import FC1SwiGLU, PackedFC1, contract


@pytest.fixture
def module(layer) -> FC1SwiGLU:
    return FC1SwiGLU.from_linear(layer.weight, layer.x_norm_weight, gate_order="gate_up")


@pytest.fixture
def linear(layer) -> nn.Linear:
    return with_weight(nn.Linear(HIDDEN, 2 * FFN, bias=False, device="meta"), layer.weight)


@pytest.fixture
def norm(layer) -> nn.RMSNorm:
    return with_weight(nn.RMSNorm(HIDDEN, eps=1e-3, device="meta"), layer.x_norm_weight)


def with_weight(module: nn.Module, weight: torch.Tensor) -> nn.Module:
    module.weight = nn.Parameter(weight)
    return module


def as_bytes(text: bytes) -> torch.Tensor:
    return torch.tensor(list(text), dtype=torch.uint8)


def adaln(layer) -> tuple[torch.Tensor, ...]:
    return layer.activations[2:]


def assert_same_rows(got: torch.Tensor, want: torch.Tensor) -> None:
    """Of calls with different numbers of rows: the same codes, whose products BLAS may add in another order then. That
    moves a BF16 rounding of h or y by a step of 2^-8 once in some thousands: two of them in 1% at most."""
    assert got.shape == want.shape
    assert (got == want).float().mean() >= 0.99
    torch.testing.assert_close(got, want, rtol=2**-6, atol=1e-4)


def assert_same_state(got: FC1SwiGLU, want: FC1SwiGLU) -> None:
    assert [name for name, _ in got.named_parameters()] == ["weight", "weight_scale", "norm_weight"]
    for name, weight in want.named_parameters():
        other = getattr(got, name)
        assert other.dtype == weight.dtype
        assert other.is_contiguous()
        assert torch.equal(bits(other), bits(weight)), name


class TestForward:
    def test_it_is_the_operator(self, module, layer, inputs):
        assert torch.equal(module(layer.x, *adaln(layer)), h3mlp.fc1_swiglu_fp8(*inputs))

    @pytest.mark.parametrize("leading", [(70,), (1, 70), (2, 35), (2, 5, 7), (0, 70), (70, 0)])
    def test_any_leading_shape(self, module, layer, leading):
        count = torch.Size(leading).numel()
        x, index = layer.x[:count].view(*leading, HIDDEN), layer.adaln_index[:count].view(leading)
        got = module(x, layer.adaln_scale, layer.adaln_shift, index)
        assert got.shape == (*leading, FFN)
        if count:
            assert_same_rows(got.view(count, FFN), module(layer.x, *adaln(layer))[:count])

    def test_one_row(self, module, layer):
        index = layer.adaln_index[0]
        got = module(layer.x[0], layer.adaln_scale, layer.adaln_shift, index)
        assert got.shape == (FFN,)
        assert_same_rows(got, module(layer.x, *adaln(layer))[0])

    def test_one_index_for_each_position_of_a_batch(self, module, layer):
        """As diffusers calls it: [B, S, H] and [S]."""
        batch = torch.stack([layer.x, layer.x * 2, layer.x - 1])
        got = module(batch, *adaln(layer))
        for x, y in zip(batch, got, strict=True):
            assert_same_rows(y, module(x, *adaln(layer)))

    @pytest.mark.parametrize("leading", [(1, 6), (3, 6), (6, 1), (3, 1), (1, 1), (6,), (1,)])
    def test_an_index_of_any_shape_that_broadcasts(self, module, layer, leading):
        """As torch has it, and whatever the strides: [1], [S], [B, 1], a scalar, and what ``expand`` makes of them."""
        count = torch.Size(leading).numel()
        x = layer.x[:count].view(*leading, HIDDEN)
        shapes = {torch.Size(part) for i in range(len(leading) + 1) for part in [leading[i:]]}
        shapes |= {
            torch.Size(1 if k in ones else n for k, n in enumerate(shape))
            for shape in list(shapes)
            for ones in itertools.chain.from_iterable(itertools.combinations(range(2), r) for r in (1, 2))
        }
        for shape in shapes:
            index = layer.adaln_index[: shape.numel()].reshape(shape)
            want = module(x, layer.adaln_scale, layer.adaln_shift, index.expand(leading).clone())
            for given in (index, index.expand(leading)):
                got = module(x, layer.adaln_scale, layer.adaln_shift, given)
                assert got.shape == (*leading, FFN)
                assert torch.equal(got, want), shape

    def test_x_of_any_strides(self, module, layer):
        """Transposed in any dimension, with or without a batch, strided, reversed by a copy: the same rows."""
        scale, shift, index = adaln(layer)
        want = module(layer.x[:12], scale, shift, index[:12])
        x = layer.x[:12]
        for given in (
            x.t().contiguous().t(),
            torch.stack([x, x], dim=-1)[..., 0],
            torch.cat([x, x], dim=1)[:, :HIDDEN],
            torch.cat([x, x])[:12],
        ):
            assert torch.equal(given, x)
            assert torch.equal(module(given, scale, shift, index[:12]), want)
            assert torch.equal(module(given[None], scale, shift, index[:12])[0], want)
        batch = x.view(3, 4, HIDDEN)
        want = module(batch, scale, shift, index[:12].view(3, 4))
        for given in (
            batch.transpose(0, 1).contiguous().transpose(0, 1),
            batch.transpose(1, 2).contiguous().transpose(1, 2),
            batch.permute(2, 0, 1).contiguous().permute(1, 2, 0),
        ):
            assert torch.equal(module(given, scale, shift, index[:12].view(3, 4)), want)
        transposed = index[:12].view(3, 4).t().contiguous().t()
        assert torch.equal(module(batch, scale, shift, transposed), want)

    def test_a_slice_of_a_longer_sequence(self, module, layer):
        longer = torch.cat([layer.x, layer.x]).view(2, 70, HIDDEN)
        got = module(longer[:, 3:9], layer.adaln_scale, layer.adaln_shift, layer.adaln_index[3:9])
        assert_same_rows(got[1], module(layer.x, *adaln(layer))[3:9])

    def test_without_adaln(self, module, layer):
        got = module(layer.x[None])
        want = h3mlp.fc1_swiglu_fp8(layer.x, layer.x_norm_weight, None, None, None, *module.packed)
        assert torch.equal(got[0], want)

    @pytest.mark.parametrize("option", [{"eps": 0.5}, {"modulation": "eager"}])
    def test_options_reach_the_operator(self, layer, inputs, option):
        module = FC1SwiGLU.from_linear(layer.weight, layer.x_norm_weight, gate_order="gate_up", **option)
        got = module(layer.x, *adaln(layer))
        assert torch.equal(got, h3mlp.fc1_swiglu_fp8(*inputs, **option))
        assert not torch.equal(got, h3mlp.fc1_swiglu_fp8(*inputs))

    def test_padding(self, module, layer):
        """Rows of index -1 are 0 by the contract; clamped they have row 0 of the tables. Past the tables stays 0."""
        scale, shift, index = adaln(layer)
        index = index.clone()
        index[:3] = torch.tensor([-1, -(2**40), TABLE_ROWS])
        assert (module(layer.x, scale, shift, index)[:3] == 0).all()
        module.clamp_index = True
        got = module(layer.x, scale, shift, index)
        assert torch.equal(got, module(layer.x, scale, shift, index.clamp(min=0)))
        assert (got[:2] != 0).any(dim=1).all()
        assert (got[2] == 0).all()
        assert index[0] == -1, "the caller's index must stay as it was"

    @pytest.mark.parametrize(
        ("change", "match"),
        [
            ({"x": lambda t: t[0, 0]}, r"x must be bfloat16 \[..., 384\]"),
            ({"x": lambda t: t.tolist()}, "x must be a dense torch.Tensor"),
            ({"x": lambda t: t[:, :128]}, r"x must be bfloat16 \[M, 384\]"),
            ({"x": lambda t: t.float()}, "x must be bfloat16"),
            (
                {"index": lambda t: t[:-1]},
                r"index must be \[70\] like x, or of a shape that broadcasts to that; it is .*\[69\]",
            ),
            ({"index": lambda t: t[None]}, r"index must be \[70\] like x"),
            ({"index": lambda t: t[:2]}, r"index must be \[70\] like x"),
            ({"index": lambda t: t[:0]}, r"index must be \[70\] like x"),
            ({"index": lambda t: t[:1, None].expand(1, 70)}, r"index must be \[70\] like x"),
            ({"index": lambda t: t[0].item()}, "index must be a dense torch.Tensor"),
            ({"index": lambda t: t.float()}, "adaln_index must be int32 or int64"),
            ({"index": lambda _: None}, "adaln_index must be a tensor like adaln_scale, or all of"),
        ],
    )
    def test_refused(self, module, layer, change, match):
        arguments = dict(zip(("x", "scale", "shift", "index"), (layer.x, *adaln(layer)), strict=True))
        for name, change_it in change.items():
            arguments[name] = change_it(arguments[name])
        with pytest.raises(ValueError, match=match):
            module(**arguments)

    def test_no_gradient(self, module, layer):
        with pytest.raises(RuntimeError, match="inference operator"):
            module(layer.x.clone().requires_grad_(), *adaln(layer))

    @pytest.mark.parametrize("dynamic", [True, None])
    def test_compiled_for_rows_and_tables_that_change(self, module, dynamic):
        """With dynamic=True the first compilation serves all; without, the second."""
        torch.compiler.reset()
        compiled = torch.compile(module, fullgraph=True, dynamic=dynamic, backend="aot_eager")
        for i, (rows, table_rows) in enumerate([(70, 4), (33, 6), (50, 3), (7, 2)]):
            x, _, *adaln = make_inputs(rows, table_rows=table_rows)[:5]
            with torch._dynamo.config.patch(error_on_recompile=i > (0 if dynamic else 1)):
                assert torch.equal(compiled(x[None], *adaln), module(x[None], *adaln))

    def test_tables_in_fp32(self, module, inputs):
        """As pruned checkpoints have them: rounded to BF16 first. In FP16 they are refused, as by the operator."""
        x, _, scale, shift, index = inputs[:5]
        fine = scale.float() * 1.001, shift.float() * 1.001
        assert not torch.equal(fine[0].bfloat16().float(), fine[0]), "nothing is rounded here"
        want = module(x, *(table.bfloat16() for table in fine), index)
        assert torch.equal(module(x, *fine, index), want)
        assert torch.equal(module(x, fine[0], fine[1].bfloat16(), index), want)
        with pytest.raises(ValueError, match=r"adaln_scale must be bfloat16 .*, so cast to BF16"):
            module(x, scale.half(), shift.half(), index)

    def test_compiled_in_one_graph(self, module, layer):
        torch.compiler.reset()
        compiled = torch.compile(module, fullgraph=True, backend="aot_eager")
        batch = layer.x.view(2, 35, HIDDEN)
        arguments = (layer.adaln_scale, layer.adaln_shift, layer.adaln_index[:35])
        assert torch.equal(compiled(batch, *arguments), module(batch, *arguments))
        assert torch.equal(compiled(layer.x), module(layer.x))


class TestFromLinear:
    def test_the_order_of_the_halves(self, module, layer):
        """Stored the other way round and said so, it is the same layer; not said so, it is another."""
        gate, up = layer.weight.chunk(2)
        swapped = torch.cat([up, gate])
        same = FC1SwiGLU.from_linear(swapped, layer.x_norm_weight, gate_order="up_gate")
        assert_same_state(same, module)
        other = FC1SwiGLU.from_linear(swapped, layer.x_norm_weight, gate_order="gate_up")
        assert not torch.equal(bits(other.weight), bits(module.weight))

    def test_modules(self, module, linear, norm):
        got = FC1SwiGLU.from_linear(linear, norm, gate_order="gate_up")
        assert_same_state(got, module)
        assert got.eps == 1e-3
        assert FC1SwiGLU.from_linear(linear, norm, gate_order="gate_up", eps=1e-6).eps == 1e-6
        assert not any(weight.requires_grad for weight in got.parameters())
        assert got.norm_weight.data_ptr() != norm.weight.data_ptr(), "freeing the model must free the norm"

    def test_the_order_is_asked_for(self, linear, norm):
        with pytest.raises(TypeError, match="gate_order"):
            FC1SwiGLU.from_linear(linear, norm)
        for wrong in ("value_gate", None, 1):
            with pytest.raises(ValueError, match="gate_order must be 'gate_up' or 'up_gate'; it is"):
                FC1SwiGLU.from_linear(linear, norm, gate_order=wrong)

    def wrapped(self, linear):
        from peft import LoraConfig, inject_adapter_in_model

        model = nn.ModuleDict({"fc1": linear})
        return inject_adapter_in_model(LoraConfig(target_modules=["fc1"]), model)["fc1"]

    def hooked(self, linear):
        linear.register_forward_hook(lambda *_: None)
        return linear

    def offloaded(self, linear):
        from accelerate.hooks import AlignDevicesHook, add_hook_to_module

        return add_hook_to_module(linear, AlignDevicesHook(execution_device="cpu"))

    def parametrized(self, linear):
        return nn.utils.parametrizations.weight_norm(linear)

    def with_bias(self, linear):
        linear.bias = nn.Parameter(torch.zeros(2 * FFN))
        return linear

    def a_subclass(self, linear):
        class Linear8bit(nn.Linear):
            pass

        linear.__class__ = Linear8bit
        return linear

    def quantized(self, linear):
        class AffineQuantized(torch.Tensor):
            pass

        linear.weight = nn.Parameter(linear.weight.detach().as_subclass(AffineQuantized))
        return linear

    def compiled(self, linear):
        linear.compile()
        return linear

    @pytest.mark.parametrize(
        ("change", "match"),
        [
            ("wrapped", r"fc1 must be a plain torch.nn.Linear \(merge and unload its LoRA adapters first\); .*peft"),
            ("a_subclass", r"fc1 must be a plain torch.nn.Linear \(quantized .* are not\); it is a .*Linear8bit"),
            ("parametrized", "fc1 must be a plain torch.nn.Linear .*Parametrized"),
            ("quantized", "fc1.weight must be a plain tensor, not quantized; it is a .*AffineQuantized"),
            ("with_bias", r"fc1.bias must be None; it is float32 \[256\]"),
            ("hooked", "fc1 must have no hooks"),
            ("offloaded", "fc1 must have no hooks .*accelerate"),
            ("compiled", "fc1 must have no hooks and not be compiled"),
            (lambda m: m.half(), "fc1.weight must be bfloat16; it is float16"),
            (lambda m: m.to(torch.float8_e4m3fn), "fc1.weight must be bfloat16; it is float8_e4m3fn"),
            (lambda m: m.to("meta"), "fc1.weight must be loaded; it is .*meta"),
            (lambda _: nn.Conv1d(1, 1, 1), "fc1 must be a plain torch.nn.Linear"),
            (lambda m: m.weight[:100], r"fc1_weight must be bfloat16 \[2F, H\]"),
            (lambda _: 3, "fc1_weight must be a dense torch.Tensor"),
        ],
        ids=lambda case: case if isinstance(case, str) and case.isidentifier() else "",
    )
    @pytest.mark.filterwarnings("ignore::UserWarning:peft")
    def test_other_layers_are_refused(self, linear, norm, change, match):
        changed = getattr(self, change)(linear) if isinstance(change, str) else change(linear)
        with pytest.raises(ValueError, match=match):
            FC1SwiGLU.from_linear(changed, norm, gate_order="gate_up")

    @pytest.mark.parametrize(
        ("change", "match"),
        [
            (lambda _: nn.LayerNorm(HIDDEN), "norm must be a torch.nn.RMSNorm over the last dimension, with a weight"),
            (lambda _: nn.RMSNorm(HIDDEN, elementwise_affine=False), "norm must be a torch.nn.RMSNorm .*with a weight"),
            (lambda _: nn.RMSNorm((2, HIDDEN)), "norm must be a torch.nn.RMSNorm over the last dimension"),
            (lambda _: nn.RMSNorm(HIDDEN, dtype=torch.bfloat16), "eps must be a finite positive number .* it is None"),
            (lambda m: m.float(), "norm.weight must be bfloat16; it is float32"),
            (lambda m: m.to("meta"), "norm.weight must be loaded"),
            (lambda _: nn.RMSNorm(128, dtype=torch.bfloat16), r"norm must be bfloat16 \[384\]; it is bfloat16 \[128\]"),
            (lambda m: m.weight.float(), r"norm must be bfloat16 \[384\]; it is float32"),
            (lambda _: None, "norm must be a dense torch.Tensor"),
        ],
    )
    def test_other_norms_are_refused(self, linear, norm, change, match):
        with pytest.raises(ValueError, match=match):
            FC1SwiGLU.from_linear(linear, change(norm), gate_order="gate_up")


class TestFromPacked:
    def test_it_holds_the_weight_itself(self, layer):
        packed = PackedFC1.from_bf16(layer.weight)
        module = FC1SwiGLU.from_packed(packed, layer.x_norm_weight)
        assert module.weight.data_ptr() == packed.weight.data_ptr()
        assert list(module.packed) == [module.weight, module.weight_scale]
        assert (module.hidden, module.ffn) == (HIDDEN, FFN)

    def test_refused(self, layer):
        packed = PackedFC1.from_bf16(layer.weight)
        with pytest.raises(ValueError, match=r"packed must be an h3mlp.PackedFC1; it is .*tuple"):
            FC1SwiGLU.from_packed(tuple(packed), layer.x_norm_weight)
        with pytest.raises(ValueError, match=r"norm_weight must be bfloat16 \[384\]"):
            FC1SwiGLU.from_packed(packed, layer.x_norm_weight[1:])
        with pytest.raises(ValueError, match="norm_weight must be on cpu"):
            FC1SwiGLU.from_packed(packed, layer.x_norm_weight.to("meta"))

    @pytest.mark.parametrize(
        ("option", "match"),
        [
            ({"eps": 0.0}, "eps must be"),
            ({"accumulate": "bf16"}, "accumulate must be"),
            ({"modulation": "both"}, "modulation must be"),
            ({"hidden": 100}, "hidden must be a multiple of 128"),
            ({"ffn": 0}, "ffn must be a positive int"),
        ],
    )
    def test_options(self, option, match):
        with pytest.raises(ValueError, match=match):
            FC1SwiGLU(**option, device="meta")


class TestState:
    """What people do to modules."""

    def test_state_dict(self, module, layer):
        state = module.state_dict()
        assert sorted(state) == ["_extra_state", "norm_weight", "weight", "weight_scale"]
        empty = FC1SwiGLU(HIDDEN, FFN)
        assert empty(layer.x, *adaln(layer)).isnan().all(), "a weight that was never loaded must show"
        assert empty.load_state_dict(state) == ([], [])
        assert_same_state(empty, module)

    @pytest.mark.parametrize("how", ["assign", "to_empty"])
    def test_made_on_the_meta_device(self, module, layer, how):
        with torch.device("meta"):
            empty = nn.ModuleDict({"fc1": FC1SwiGLU(HIDDEN, FFN)})
        assert empty["fc1"].weight.is_meta
        state = nn.ModuleDict({"fc1": module}).state_dict()
        if how == "to_empty":
            empty.to_empty(device="cpu")
        empty.load_state_dict(state, assign=how == "assign")
        assert_same_state(empty["fc1"], module)
        assert torch.equal(empty["fc1"](layer.x, *adaln(layer)), module(layer.x, *adaln(layer)))

    def test_safetensors(self, module, tmp_path):
        save_file(module.state_dict(), tmp_path / "fc1.safetensors")
        again = FC1SwiGLU(HIDDEN, FFN)
        again.load_state_dict(load_file(tmp_path / "fc1.safetensors"))
        assert_same_state(again, module)

    def test_saved_whole(self, module):
        file = io.BytesIO()
        torch.save(module, file)
        file.seek(0)
        again = torch.load(file, weights_only=False)
        assert_same_state(again, module)
        assert (again.eps, again.modulation) == (module.eps, module.modulation)

    def test_deepcopy(self, module):
        again = copy.deepcopy(module)
        assert_same_state(again, module)
        assert again.weight.data_ptr() != module.weight.data_ptr()

    @pytest.mark.parametrize(
        "cast",
        [
            lambda m: m.to(torch.bfloat16),
            lambda m: m.to("cpu", torch.float32),
            lambda m: m.half(),
            lambda m: m.float(),
            lambda m: m.double(),
            lambda m: m.type(torch.float16),
            lambda m: nn.Sequential(m).to(torch.float16)[0],
        ],
    )
    def test_dtypes_stay(self, module, cast):
        before = copy.deepcopy(module)
        assert_same_state(cast(module), before)

    def test_moving(self, module):
        weight = module.weight
        assert module.to("cpu").weight is weight
        moved = module.to("meta")
        assert {weight.device.type for weight in moved.parameters()} == {"meta"}
        assert [weight.dtype for weight in moved.parameters()] == [torch.float8_e4m3fn, torch.float32, torch.bfloat16]

    def test_shared_memory(self, module):
        module.share_memory()
        assert all(weight.is_shared() for weight in module.parameters())

    @pytest.mark.parametrize("assign", [False, True])
    @pytest.mark.parametrize("strict", [False, True])
    def test_rows_of_another_order_are_refused(self, module, strict, assign):
        empty = FC1SwiGLU(HIDDEN, FFN)
        state = module.state_dict()
        untold = {name: value for name, value in state.items() if name != "_extra_state"}
        with pytest.raises(RuntimeError, match="weight comes without _extra_state, which tells its row order"):
            empty.load_state_dict(untold, strict=strict, assign=assign)
        assert empty.weight_scale.isnan().all()

    @pytest.mark.parametrize("assign", [False, True])
    @pytest.mark.parametrize("strict", [False, True])
    @pytest.mark.parametrize(
        ("change", "match"),
        [
            (
                {"_extra_state": torch.tensor(list(b"gate_up"), dtype=torch.uint8)},
                "row order 'gate8_up8'; .* 'gate_up'",
            ),
            ({"_extra_state": torch.tensor(list(b"\xff"), dtype=torch.uint8)}, "row order 'gate8_up8'; it says"),
            ({"_extra_state": "gate8_up8"}, r"the name of a row order, uint8 \[N\]; it is 'gate8_up8' \(str\)"),
            ({"_extra_state": None}, r"the name of a row order, uint8 \[N\]; it is None"),
            ({"_extra_state": {"order": 1}}, r"the name of a row order, uint8 \[N\]; it is .*dict"),
            ({"_extra_state": torch.zeros(9)}, r"the name of a row order, uint8 \[N\]; it is float32"),
            (
                {"_extra_state": torch.zeros(1, 9, dtype=torch.uint8)},
                r"the name of a row order, .*; it is uint8 \[1, 9\]",
            ),
            ({"_extra_state": torch.zeros(9, dtype=torch.uint8, device="meta")}, "the name of a row order, .* on meta"),
            (
                {"weight": torch.zeros(128, HIDDEN).to(torch.float8_e4m3fn)},
                r"size mismatch for (fc1.)?weight: it must be \[256",
            ),
            (
                {"weight_scale": torch.ones(255)},
                r"size mismatch for (fc1.)?weight_scale: it must be \[256\]; it is \[255\]",
            ),
            ({"norm_weight": torch.ones(1).bfloat16()}, r"size mismatch for (fc1.)?norm_weight"),
            ({"norm_weight": torch.ones(HIDDEN)}, "norm_weight must be torch.bfloat16; it is torch.float32"),
            ({"weight_scale": [1.0]}, "weight_scale must be a tensor"),
            ({"weight_scale": ...}, r"weight comes without (fc1.)?weight_scale: codes and scales belong together"),
            ({"weight": ...}, r"weight_scale comes without (fc1.)?weight: codes and scales belong together"),
        ],
    )
    def test_nothing_of_a_refused_state_is_copied(self, layer, module, change, match, strict, assign):
        """Or the module would go on computing with rows, or scales, of another order or layer."""
        state = FC1SwiGLU.from_linear(layer.weight * 2, layer.x_norm_weight + 1, gate_order="gate_up").state_dict()
        state = {name: value for name, value in (state | change).items() if value is not ...}
        kept = copy.deepcopy(module)
        with pytest.raises(RuntimeError, match=match):
            module.load_state_dict(state, strict=strict, assign=assign)
        assert_same_state(module, kept)
        parent = nn.ModuleDict({"fc1": module})
        with pytest.raises(RuntimeError, match=match):
            parent.load_state_dict(
                {f"fc1.{name}": value for name, value in state.items()}, strict=strict, assign=assign
            )
        assert_same_state(module, kept)

    def test_a_part_that_is_whole_by_itself(self, module):
        """The norm weight alone, as a merged adapter would bring it."""
        new = module.norm_weight + 1
        module.load_state_dict({"norm_weight": new}, strict=False)
        assert torch.equal(module.norm_weight, new)

    def test_an_extra_state_given_by_hand(self, module):
        for state, match in ((None, "must be the name of a row order"), (torch.zeros(9, dtype=torch.uint8), "it says")):
            with pytest.raises(ValueError, match=match):
                module.set_extra_state(state)
        module.set_extra_state(module.get_extra_state())

    @pytest.mark.parametrize("assign", [False, True])
    def test_other_dtypes_and_shapes_are_refused(self, module, assign):
        for name, changed, match in (
            ("weight", module.weight.bfloat16(), "weight must be torch.float8_e4m3fn; it is torch.bfloat16"),
            ("weight_scale", module.weight_scale.half(), "weight_scale must be torch.float32"),
            ("weight", module.weight[:128], "size mismatch for weight"),
        ):
            empty = FC1SwiGLU(HIDDEN, FFN)
            with pytest.raises(RuntimeError, match=match):
                empty.load_state_dict({**module.state_dict(), name: changed}, assign=assign)

    def test_printed(self, module):
        assert repr(module) == "FC1SwiGLU(hidden=384, ffn=128, modulation='fused', accumulate='fp32')"


def test_every_buffer_dtype_has_its_integers():
    """Of one size, or the move of a buffer would change its shape."""
    from h3mlp.module import _INTEGER_OF_BYTES

    for dtype in (contract.QUANTIZED, contract.SCALE, contract.ACTIVATION):
        assert _INTEGER_OF_BYTES[dtype.itemsize].itemsize == dtype.itemsize


def test_layers_of_one_model_do_not_disturb_each_other(layer):
    """Interleaved calls of several layers and sizes, as a model makes them."""
    modules = [
        FC1SwiGLU.from_linear(layer.weight * (k + 1), layer.x_norm_weight, gate_order="gate_up") for k in range(3)
    ]
    want = [module(layer.x, *adaln(layer)) for module in modules]
    for k, rows in itertools.product(range(3), (70, 1, 33)):
        got = modules[k](layer.x[:rows], layer.adaln_scale, layer.adaln_shift, layer.adaln_index[:rows])
        assert_same_rows(got, want[k][:rows])
    assert torch.equal(modules[0](layer.x, *adaln(layer)), want[0])
