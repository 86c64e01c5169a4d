"""What is wrong with a checkpoint is found before DST exists, and named."""

import json

import pytest
import torch
from checkpoints import FFN, HIDDEN, checkpoint, converted, save, save_sharded
from helpers import bits
from safetensors.torch import load_file

from h3mlp.checkpoint import convert, verify
from h3mlp.checkpoint.prepared import open_prepared
from h3mlp.tools.checkpoint_views import summary, verdict

FC1 = "blocks.1.mlp.fc1"
E4M3 = torch.float8_e4m3fn


def refused(tmp_path, tensors, message, **options):
    """One clear message, and nothing beside the source."""
    with pytest.raises(ValueError, match=message) as refusal:
        converted(tensors, tmp_path, **options)
    assert "\n" not in str(refusal.value)
    assert [path.name for path in tmp_path.iterdir()] == ["source.safetensors"]


class TestNumbers:
    @pytest.mark.parametrize("value", [torch.nan, torch.inf, -torch.inf])
    @pytest.mark.parametrize("row", [0, 127, 128, 255])  # the first and the last of each half
    def test_not_finite(self, tmp_path, value, row):
        tensors = checkpoint()
        tensors[f"{FC1}.weight"][row, 7] = value
        refused(tmp_path, tensors, f"{FC1}.weight must be finite; row {row} has {value}")

    @pytest.mark.parametrize("form", ["FP16", "FP32"])
    def test_not_finite_in_other_forms(self, tmp_path, form):
        tensors = checkpoint("diffusers", form)
        name = "transformer_blocks.0.ff.net.0.proj.weight"
        tensors[name][200, 0] = torch.inf
        refused(tmp_path, tensors, f"{name} must be finite; row 200 has inf")

    @pytest.mark.parametrize("code", [0x7F, 0xFF])
    @pytest.mark.parametrize("granularity", ["channel", "tensor", "128x128 block"])
    def test_a_nan_code(self, tmp_path, code, granularity):
        tensors = checkpoint(form=f"E4M3 per {granularity}")
        tensors[f"{FC1}.weight"].view(torch.uint8)[130, 255] = code
        refused(tmp_path, tensors, f"{FC1}.weight must be finite; row 130 has nan")

    def test_an_inf_code_of_e5m2(self, tmp_path):
        tensors = checkpoint(form="E5M2 per tensor")
        tensors[f"{FC1}.weight"].view(torch.uint8)[3, 0] = 0xFC
        refused(tmp_path, tensors, f"{FC1}.weight must be finite; row 3 has -inf")

    @pytest.mark.parametrize("value", [torch.nan, torch.inf, -0.5])
    def test_a_scale(self, tmp_path, value):
        tensors = checkpoint(form="E4M3 per channel")
        tensors[f"{FC1}.weight_scale"][9] = value
        refused(tmp_path, tensors, f"{FC1}.weight_scale must be finite and not negative; it has {value}")

    def test_the_reciprocal_of_a_scale(self, tmp_path):
        tensors = checkpoint(form="E4M3 per channel")
        tensors[f"{FC1}.weight_scale"] = 1 / tensors[f"{FC1}.weight_scale"]
        refused(tmp_path, tensors, f"{FC1}.weight_scale must be what the codes are multiplied by")

    @pytest.mark.parametrize(("dtype", "value"), [(torch.bfloat16, torch.nan), (torch.float32, 3.4e38)])
    def test_a_norm_weight(self, tmp_path, dtype, value):
        tensors = checkpoint()
        tensors["blocks.0.norm2.weight"] = tensors["blocks.0.norm2.weight"].to(dtype)
        tensors["blocks.0.norm2.weight"][3] = value
        refused(tmp_path, tensors, "blocks.0.norm2.weight must be finite; element 3 is not")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({f"{FC1}.weight": None}, "blocks.1 must have its FC1 weight; it is missing, while others are there"),
        ({"blocks.1": None}, None),  # the last one, all of it: nothing says that it should be there
        ({"blocks.0": None}, r"must have the FC1 weight of blocks\.0; it is missing"),
        ({"blocks.1.norm2.weight": None}, "blocks.1 must have its norm weight, norm2.weight, beside blocks.1.mlp.fc1"),
        ({"blocks.1.norm2.weight": torch.zeros(HIDDEN - 1)}, r"norm2.weight must be BF16, FP16 or FP32 \[256\]"),
        (
            {"blocks.1.norm2.weight": torch.zeros(HIDDEN, dtype=E4M3)},
            r"norm2.weight must be BF16, FP16 or FP32 \[256\]",
        ),
        ({f"{FC1}.weight": torch.zeros(FFN, HIDDEN)}, "must have a gate and an up half, .256, 256.; one is missing"),
        ({f"{FC1}.weight": torch.zeros(384, HIDDEN)}, r"must be \[256, 256\]; it is"),
        (
            {f"{FC1}.weight": torch.zeros(2 * FFN, 128), "blocks.1.norm2.weight": torch.zeros(128)},
            "must be as large as",
        ),
        ({f"{FC1}.weight": torch.zeros(2, FFN, HIDDEN)}, r"must be \[256"),
        ({f"{FC1}.weight": torch.zeros(2 * FFN)}, r"must be \[256"),
        ({f"{FC1}.weight": torch.zeros(2 * FFN, HIDDEN, dtype=torch.int8)}, "must be BF16, FP16, FP32, E4M3 or E5M2"),
        (
            {f"{FC1}.weight": torch.zeros(2 * FFN, HIDDEN, dtype=torch.float64)},
            "must be BF16, FP16, FP32, E4M3 or E5M2",
        ),
        ({f"{FC1}.bias": torch.zeros(2 * FFN)}, f"{FC1}.bias must not be there"),
        ({f"{FC1}.weight_scale": torch.ones(2 * FFN)}, "weight_scale must not be there: .* needs no scale"),
        ({f"model.{FC1}.weight": torch.zeros(2 * FFN, HIDDEN)}, "blocks.1 must be there once; it is as"),
        ({"transformer_blocks.1.ff.net.0.proj.weight": torch.zeros(2 * FFN, HIDDEN)}, "blocks.1 must be there once"),
        # Of another model, or of this one in other files: parts of a layer, and whole layers.
        (
            {"blocks.1.norm2.weight": None, "model.blocks.1.norm2.weight": torch.ones(HIDDEN)},
            "must name all its layers in one way; it has blocks.0.mlp.fc1.weight and model.blocks.1.norm2.weight",
        ),
        (
            {"blocks.1.norm2.weight": None, "transformer_blocks.1.norm2.weight": torch.ones(HIDDEN)},
            "must name all its layers in one way; it has .* and transformer_blocks.1.norm2.weight",
        ),
        (
            {
                "blocks.1": None,
                "net.blocks.1.mlp.fc1.weight": torch.zeros(2 * FFN, HIDDEN),
                "net.blocks.1.norm2.weight": torch.ones(HIDDEN),
            },
            "must name all its layers in one way; it has .* and net.blocks.1.mlp.fc1.weight",
        ),
        (
            {f"{FC1}.weight": None, "blocks.1.ff.net.0.proj.weight": torch.zeros(2 * FFN, HIDDEN)},
            "must name all its layers in one way; it has .* and blocks.1.ff.net.0.proj.weight",
        ),
    ],
)
def test_tensors(tmp_path, change, message):
    tensors = checkpoint()
    for name, value in change.items():
        if value is None:
            tensors = {key: kept for key, kept in tensors.items() if not key.startswith(name)}
        else:
            tensors[name] = value
    if message:
        refused(tmp_path, tensors, message)
    else:
        converted(tensors, tmp_path)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"weight_scale": None}, "must have a scale: weight_scale, scale_weight, weight_scale_inv; none is there"),
        ({"scale_weight": torch.ones(1)}, "must have one scale; it has"),
        (
            {"weight_scale": torch.ones(3)},
            r"must be floating point of shape \[\], \[1\], \[2\], \[256\], \[256, 1\], \[2, 2\]",
        ),
        ({"weight_scale": torch.ones(2 * FFN, 2)}, "must be floating point of shape"),
        ({"weight_scale": torch.ones(2 * FFN, dtype=torch.int32)}, "must be floating point of shape"),
        ({"weight_scale": torch.ones(2 * FFN, dtype=E4M3)}, "must be floating point of shape"),
        ({"weight_zero": torch.ones(2 * FFN)}, "weight_zero must not be there"),
    ],
)
def test_scales(tmp_path, change, message):
    tensors = checkpoint(form="E4M3 per channel")
    for tail, value in change.items():
        tensors[f"{FC1}.{tail}"] = value
    refused(tmp_path, {name: tensor for name, tensor in tensors.items() if tensor is not None}, message)


@pytest.mark.parametrize("naming", ["native", "diffusers"])
@pytest.mark.parametrize("form", ["E4M3", "E5M2"])
def test_a_scale_for_each_half(tmp_path, naming, form):
    """In the order of the halves, as vLLM fuses the static scales of two weights: the same as one a row."""
    tensors = checkpoint(naming, f"{form} per tensor")
    scales = torch.tensor([2.0**-9, 2.0**-11])
    spread = {}
    for name in tensors:
        if name.endswith("weight_scale"):
            tensors[name] = scales.clone()
            spread[name] = scales.repeat_interleave(FFN)
    halves = load_file(converted(tensors, tmp_path / "halves"))
    rows = load_file(converted(tensors | spread, tmp_path / "rows"))
    assert halves.keys() == rows.keys()
    assert all(torch.equal(bits(halves[name]), bits(rows[name])) for name in rows)
    layer = open_prepared(tmp_path / "halves/prepared.safetensors").description.layers["blocks.0"]
    assert (layer["form"], layer["action"]) == (
        f"{form} per half",
        "repacked" if form == "E4M3" else "requantized",
    )
    assert verify.run(tmp_path / "halves/prepared.safetensors", tmp_path / "rows/source.safetensors", rows=2).ok


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64])
def test_scales_of_other_dtypes(tmp_path, dtype):
    tensors = checkpoint(form="E4M3 per tensor")
    tensors[f"{FC1}.weight_scale"] = torch.tensor([2.0**-9], dtype=dtype)
    converted(tensors, tmp_path)


class TestMarkersOfComfyUI:
    def marked(self, marker):
        tensors = checkpoint(form="E4M3 per tensor")
        tensors[f"{FC1}.comfy_quant"] = torch.tensor(list(marker.encode()), dtype=torch.uint8)
        tensors[f"{FC1}.input_scale"] = torch.tensor(1.0)
        return tensors

    @pytest.mark.parametrize("asked", [True, False])
    def test_plain_fp8(self, tmp_path, asked):
        """What it asks for in full precision is quantized all the same, and everything that reports says so."""
        tensors = self.marked(json.dumps({"format": "float8_e4m3fn", "full_precision_matrix_mult": asked}))
        source = save(tensors, tmp_path / "source.safetensors")
        report = convert.run(source, tmp_path / "prepared.safetensors")
        layers = report.description.layers
        assert [layer["full_precision"] for layer in layers.values()] == [False, asked, False]
        verified = verify.run(tmp_path / "prepared.safetensors", source, rows=2)
        assert verified.ok
        for lines in (summary(report), verdict(verified)):
            assert ("here activations are quantized to FP8" in "\n".join(lines)) == asked

    @pytest.mark.parametrize(
        "marker",
        [
            '{"format": "int8_tensorwise"}',
            '{"format": "float8_e4m3fn", "convrot": true}',
            "{}",
            "[]",
            "float8",
            "",
            "\n",
        ],
    )
    def test_anything_else(self, tmp_path, marker):
        refused(tmp_path, self.marked(marker), f"{FC1}.comfy_quant must say that the weight is plain FP8")


class TestNames:
    def test_nothing_of_the_model(self, tmp_path):
        refused(
            tmp_path, {"encoder.layers.0.mlp.up.weight": torch.zeros(2)}, "it has none, but encoder.layers.0.mlp.up"
        )
        (tmp_path / "source.safetensors").unlink()
        refused(tmp_path, {}, "it has none at all")

    def test_a_naming_that_does_not_say_the_order(self, tmp_path):
        tensors = {name.replace("mlp.fc1", "ff.net.0.proj"): tensor for name, tensor in checkpoint().items()}
        refused(tmp_path, tensors, "gate_order must be given for blocks.0.ff.net.0.proj.weight")
        converted(tensors, tmp_path, gate_order="gate_up")

    def test_an_order_that_is_none(self, tmp_path):
        refused(tmp_path, checkpoint(), "gate_order must be", gate_order="gate_first")

    @pytest.mark.parametrize(
        ("config", "message"),
        [
            ({"num_layers": 3, "num_refiner_layers": 1}, r"must have the FC1 weight of blocks\.2; it is missing"),
            ({"num_layers": 2, "num_refiner_layers": 2}, r"must have the FC1 weight of token_refiner\.blocks\.1"),
            ({"num_layers": 1}, "must have 1 blocks, as config.json says; it has 2"),
            ({"num_layers": "2"}, "num_layers of .*config.json must be a number of layers; it is '2'"),
            ({"num_layers": 2.0}, "num_layers of .* must be a number of layers; it is 2.0"),
            ({"num_layers": -1}, "num_layers of .* must be a number of layers; it is -1"),
            ({"num_refiner_layers": [1]}, r"num_refiner_layers of .* must be a number of layers; it is \[1\]"),
        ],
    )
    def test_another_number_of_layers_than_the_config_says(self, tmp_path, config, message):
        source = save_sharded(checkpoint(), tmp_path / "source")
        (source / "config.json").write_text(json.dumps(config))
        with pytest.raises(ValueError, match=message):
            convert.run(source, tmp_path / "prepared")

    @pytest.mark.parametrize("config", ["{", "[]", "{}", '{"num_layers": 2}', '{"num_layers": null}'])
    def test_a_config_that_says_nothing_else(self, tmp_path, config):
        source = save_sharded(checkpoint(), tmp_path / "source")
        (source / "config.json").write_text(config)
        convert.run(source, tmp_path / "prepared")


class TestDestination:
    def test_prepared_already(self, tmp_path):
        path = converted(checkpoint(), tmp_path)
        with pytest.raises(ValueError, match="must not be prepared yet; it is"):
            convert.run(path, tmp_path / "again.safetensors")

    def test_no_folder(self, tmp_path):
        source = save(checkpoint(), tmp_path / "source.safetensors")
        with pytest.raises(ValueError, match="must be in a folder that exists"):
            convert.run(source, tmp_path / "none" / "prepared.safetensors")
