"""Names of layers: every prefix and both namings are understood, and nothing else."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from h3mlp.checkpoint import names

PREFIX = st.lists(st.sampled_from(["model", "diffusion_model", "transformer", "net", "module"]), max_size=3)
NAMED = st.sampled_from(
    [
        ("blocks", "mlp.fc1", "native", "blocks", "fc1"),
        ("token_refiner.blocks", "mlp.fc1", "native", "token_refiner.blocks", "fc1"),
        ("transformer_blocks", "ff.net.0.proj", "diffusers", "blocks", "fc1"),
        ("token_refiner.refiner_blocks", "ff.net.0.proj", "diffusers", "token_refiner.blocks", "fc1"),
        ("blocks", "mlp.fc2", "native", "blocks", "fc2"),
        ("transformer_blocks", "ff.net.2", "diffusers", "blocks", "fc2"),
        ("blocks", "norm2", "native", "blocks", "norm2"),
        ("token_refiner.refiner_blocks", "norm2", "diffusers", "token_refiner.blocks", "norm2"),
        ("blocks", "ff.net.0.proj", "mixed", "blocks", "fc1"),
        ("transformer_blocks", "mlp.fc1", "mixed", "blocks", "fc1"),
    ]
)
TAIL = st.sampled_from(["weight", "weight_scale", "scale_weight", "weight_scale_inv", "bias", "input_scale"])


@given(PREFIX, NAMED, st.integers(0, 999_999), TAIL)
def test_every_name_under_every_prefix(prefixes, named, index, tail):
    stack, module, naming, of_layer, what = named
    prefix = "".join(f"{part}." for part in prefixes)
    part = names.parse(f"{prefix}{stack}.{index}.{module}.{tail}")
    of_block = "diffusers" if "transformer" in stack or "refiner_blocks" in stack else "native"
    assert part == (names.Layer(of_layer, index), what, tail, naming, of_block, prefix)


@given(PREFIX, NAMED, st.integers(0, 999), st.text("abz._019\né ", min_size=1, max_size=6))
def test_anything_more_in_front_or_behind_is_another_tensor(prefixes, named, index, more):
    stack, module, *_ = named
    name = f"{''.join(f'{part}.' for part in prefixes)}{stack}.{index}.{module}.weight"
    assert names.parse(f"{more.strip('.')}x.{name}") is None
    assert names.parse(f"{name}.{more}") is None
    assert names.parse(name + "\n") is None


@pytest.mark.parametrize(
    "name",
    [
        "blocks.00.mlp.fc1.weight",
        "blocks.-1.mlp.fc1.weight",
        "blocks.٣.mlp.fc1.weight",
        "blocks..mlp.fc1.weight",
        "blocks.0.mlp.fc1",
        "blocks.0.mlp.fc3.weight",
        "single_blocks.0.mlp.fc1.weight",
        "refiner_blocks.0.ff.net.0.proj.weight",
        "blocks.0.mlp.fc1.weight.absmax",
        "xmodel.blocks.0.mlp.fc1.weight",
        "modelblocks.0.mlp.fc1.weight",
        "",
    ],
)
def test_other_names(name):
    assert names.parse(name) is None


@given(st.text())
def test_any_text_is_a_name_or_none(text):
    assert names.parse(text) is None
    assert names.parse_layer(text) is None


@pytest.mark.parametrize(
    ("given", "layer"),
    [
        (3, ("blocks", 3)),
        ("blocks.3", ("blocks", 3)),
        ("transformer_blocks.3", ("blocks", 3)),
        ("model.diffusion_model.blocks.3", ("blocks", 3)),
        ("token_refiner.refiner_blocks.0", ("token_refiner.blocks", 0)),
        (-1, None),
        (True, None),
        (1.0, None),
        ("3", None),
        ("blocks.3.mlp", None),
        (None, None),
    ],
)
def test_a_layer_by_number_or_name(given, layer):
    assert names.parse_layer(given) == layer


def test_the_gate_order_of_each_naming():
    assert names.gate_order("native", None, "x") == "gate_up"
    assert names.gate_order("diffusers", None, "x") == "up_gate"
    assert names.gate_order("diffusers", "gate_up", "x") == "gate_up"
    assert names.gate_order("mixed", "up_gate", "x") == "up_gate"
    with pytest.raises(ValueError, match="gate_order must be given for x, whose name is half MiniMax's"):
        names.gate_order("mixed", None, "x")
