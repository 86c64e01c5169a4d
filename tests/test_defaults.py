"""torch's default dtype and device, which loaders of models change, decide nothing here."""

import ast
import contextlib
from pathlib import Path

import pytest
import torch
from checkpoints import FORMS, checkpoint, converted, save
from helpers import bits, make_inputs

import h3mlp
from h3mlp import reference, synthetic
from h3mlp.checkpoint import convert, inspect, verify

SOURCES = sorted(Path(h3mlp.__file__).parent.rglob("*.py"))

CONSTRUCTORS = frozenset(
    (
        *("arange", "as_tensor", "asarray", "empty", "empty_strided", "eye", "full", "linspace", "logspace", "ones"),
        *("rand", "randint", "randn", "randperm", "scalar_tensor", "tensor", "zeros"),
    )
)
"""Of torch, whose dtype or device is the default where none is named."""


def constructors(source: str):
    """The calls of constructors of tensors: line, name, and the names of their keyword arguments."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Call) and (called := ast.unparse(node.func)).startswith("torch."):
            name = called.removeprefix("torch.")
            if name in CONSTRUCTORS:
                yield node.lineno, name, {keyword.arg for keyword in node.keywords}


@pytest.mark.parametrize("file", SOURCES, ids=lambda file: file.name)
def test_every_constructor_names_dtype_and_device(file):
    for line, name, given in constructors(file.read_text(encoding="utf-8")):
        assert {"dtype", "device"} <= given, f"{file}:{line}: torch.{name} takes a default"


def test_constructors_are_found():
    """The check above sees what it is for."""
    found = list(constructors("x = torch.empty(3)\ny = [torch.full((), 1.0, dtype=d) for d in e]\nz = numpy.empty(3)"))
    assert found == [(1, "empty", set()), (2, "full", {"dtype"})]
    assert sum(len(list(constructors(file.read_text(encoding="utf-8")))) for file in SOURCES) > 20


@contextlib.contextmanager
def defaults(dtype=None, device=None):
    before = torch.get_default_dtype()
    try:
        torch.set_default_dtype(dtype or before)
        torch.set_default_device(device)
        yield
    finally:
        torch.set_default_dtype(before)
        torch.set_default_device(None)


DEFAULTS = [
    {"dtype": torch.bfloat16},
    {"dtype": torch.float64},
    {"device": "meta"},
    {"dtype": torch.float16, "device": "meta"},
]


@pytest.fixture(params=DEFAULTS, ids=str)
def under(request):
    """A context with other defaults."""
    return lambda: defaults(**request.param)


@pytest.mark.parametrize("form", FORMS)
def test_a_conversion(tmp_path, form, under):
    """Byte for byte, with an adapter on one layer."""
    torch.manual_seed(0)
    adapter = {
        f"blocks.1.mlp.fc1.{name}": tensor
        for name, tensor in (
            ("lora_A.weight", torch.randn(4, 256)),
            ("lora_B.weight", torch.randn(256, 4) * 0.1),
            ("alpha", torch.tensor(3.0)),
        )
    }
    lora = save(adapter, tmp_path / "lora.safetensors")
    path = converted(checkpoint(form=form), tmp_path, loras=[(lora, 0.5)])
    source, again = tmp_path / "source.safetensors", tmp_path / "again.safetensors"
    seen = inspect.run(path), inspect.run(source), verify.run(path, source, rows=4, loras=[(lora, 0.5)])
    assert seen[2].ok
    with under():
        convert.run(source, again, loras=[(lora, 0.5)])
        other = inspect.run(path), inspect.run(source), verify.run(path, source, rows=4, loras=[(lora, 0.5)])
    assert again.read_bytes() == path.read_bytes()
    assert other == seen


@pytest.mark.parametrize("copy", [False, True])
def test_loading_and_the_module(tmp_path, under, copy):
    path = converted(checkpoint(), tmp_path)
    want = h3mlp.FC1SwiGLU.from_checkpoint(path, 0)
    layer = synthetic.layer(5, 256, 128)
    given = (layer.x, layer.adaln_scale, layer.adaln_shift, layer.adaln_index)
    y = want(*given)
    with under():
        got = h3mlp.FC1SwiGLU.from_checkpoint(path, 0, copy=copy)
        assert torch.equal(got(*given), y)
        empty = h3mlp.FC1SwiGLU(256, 128, device="cpu")
        empty.load_state_dict(want.state_dict())
    for name, weight in want.named_parameters():
        for other in (got, empty):
            assert torch.equal(bits(getattr(other, name)), bits(weight)), name


def test_the_operator(under):
    inputs = make_inputs(9)
    want = h3mlp.fc1_swiglu_fp8(*inputs), reference.fc1_swiglu_fp8(*inputs)
    weight = synthetic.layer(1, 384, 128).weight
    packed = h3mlp.prepare_fc1_weight_fp8(weight)
    with under():
        got = h3mlp.fc1_swiglu_fp8(*inputs), reference.fc1_swiglu_fp8(*inputs)
        again = h3mlp.prepare_fc1_weight_fp8(weight)
        layer = make_inputs(9)
    for mine, theirs in zip((*got, *again), (*want, *packed), strict=True):
        assert torch.equal(bits(mine), bits(theirs))
    for mine, theirs in zip(layer, inputs, strict=True):
        assert torch.equal(bits(mine), bits(theirs)), "synthetic data"
