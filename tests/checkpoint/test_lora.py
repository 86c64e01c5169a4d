"""Adapters of every naming: FC1 gets what diffusers or PEFT would compute, and nothing is passed over."""

import json
import math

import numpy_contract as oracle
import pytest
import torch
from checkpoints import FFN, HIDDEN, checkpoint, converted, expected, save
from safetensors.torch import load_file

from h3mlp.checkpoint import units
from h3mlp.checkpoint.convert import run
from h3mlp.checkpoint.prepared import open_prepared

RANK = 4


@pytest.fixture(autouse=True)
def small_steps(monkeypatch):
    """Each half of 128 rows in three steps."""
    monkeypatch.setattr(units, "STEP_ROWS", 48)


def pair(generator, rank=RANK, rows=2 * FFN, hidden=HIDDEN):
    down = torch.randn(rank, hidden, generator=generator) * hidden**-0.5
    return down, torch.randn(rows, rank, generator=generator) * 0.3


def assert_merged(path, layer, weight, delta):
    """The prepared layer is the FP32 sum, quantized once. The sum of a product over 4 ranks is the same in any order to
    a rounding of FP32 (2^-24 relative), which moves a code in one of about 10^5 cases: 99.9% must be equal and the rest
    neighbours, while a delta that is off by any factor moves most."""
    codes, scales = expected({"weight": weight.float() + delta}, "native", "FP32")
    found = load_file(path)
    torch.testing.assert_close(found[f"{layer}.fc1_swiglu.weight_scale"], torch.from_numpy(scales), rtol=1e-6, atol=0)
    got = found[f"{layer}.fc1_swiglu.weight"].view(torch.uint8).int()
    want = oracle.to_torch(codes).view(torch.uint8).int()
    assert (got == want).float().mean() > 0.999
    assert ((got & 0x7F) - (want & 0x7F)).abs().max() <= 1


def weights():
    return {f"blocks.{i}": checkpoint()[f"blocks.{i}.mlp.fc1.weight"] for i in range(2)}


KOHYA = ("lora_down.weight", "lora_up.weight")
PEFT = ("lora_A.weight", "lora_B.weight")


@pytest.mark.parametrize(
    ("module", "names", "naming"),
    [
        ("blocks.0.mlp.fc1", PEFT, "native"),
        ("diffusion_model.blocks.0.mlp.fc1", PEFT, "native"),
        ("base_model.model.blocks.0.mlp.fc1", PEFT, "native"),
        ("blocks.0.mlp.fc1", ("lora_A.default.weight", "lora_B.default.weight"), "native"),
        ("diffusion_model.blocks.0.mlp.fc1", KOHYA, "native"),
        ("lora_unet_blocks_0_mlp_fc1", KOHYA, "native"),
        ("transformer.transformer_blocks.0.ff.net.0.proj", PEFT, "diffusers"),
        ("transformer_blocks.0.ff.net.0.proj", ("lora.down.weight", "lora.up.weight"), "diffusers"),
        ("lora_transformer_transformer_blocks_0_ff_net_0_proj", KOHYA, "diffusers"),
        (
            "transformer.transformer_blocks.0.ff.net.0.proj",
            ("lora_linear_layer.down.weight", "lora_linear_layer.up.weight"),
            "diffusers",
        ),
    ],
)
@pytest.mark.parametrize("of_checkpoint", ["native", "diffusers"])
def test_every_naming(tmp_path, module, names, naming, of_checkpoint):
    """In logical row order: a diffusers adapter on a native checkpoint and the reverse."""
    down, up = pair(torch.Generator().manual_seed(3))
    stored = up if naming == "native" else torch.cat(up.chunk(2)[::-1])
    lora = save({f"{module}.{names[0]}": down, f"{module}.{names[1]}": stored}, tmp_path / "lora.safetensors")
    path = converted(checkpoint(of_checkpoint), tmp_path, loras=[(lora, 1.0)])
    assert_merged(path, "blocks.0", weights()["blocks.0"], up @ down)
    assert_merged(path, "blocks.1", weights()["blocks.1"], 0)
    layers = open_prepared(path).description.layers
    assert [layers[name]["form"] for name in ("blocks.0", "blocks.1")] == ["BF16 + 1 LoRA", "BF16"]


def test_it_is_what_diffusers_computes(tmp_path):
    """The conversion of a kohya adapter by diffusers and its fusing by PEFT, on the small model."""
    pytest.importorskip("peft")
    minimax_h3 = pytest.importorskip("minimax_h3")
    from diffusers.loaders.lora_conversion_utils import (
        _convert_non_diffusers_minimax_h3_lora_to_diffusers as as_diffusers,
    )

    generator = torch.Generator().manual_seed(4)
    lora = {}
    for block in ("blocks.0", "blocks.1", "token_refiner.blocks.1"):
        down, up = pair(generator)
        flat = f"lora_unet_{block.replace('.', '_')}_mlp_fc1"
        lora |= {f"{flat}.lora_down.weight": down, f"{flat}.lora_up.weight": up, f"{flat}.alpha": torch.tensor(2.0)}
    file = save(lora, tmp_path / "lora.safetensors")
    model = minimax_h3.transformer().float()
    source = save(model.state_dict(), tmp_path / "source.safetensors")
    run(source, tmp_path / "prepared.safetensors", loras=[(file, 0.7)])
    model.load_lora_adapter(as_diffusers(dict(lora)), prefix="transformer")
    model.fuse_lora(lora_scale=0.7)
    model.unload_lora()
    for name, ours in (("transformer_blocks", "blocks"), ("token_refiner.refiner_blocks", "token_refiner.blocks")):
        for i in range(2):
            weight = model.get_submodule(f"{name}.{i}").ff.net[0].proj.weight.detach()
            up, gate = weight.chunk(2)
            assert_merged(tmp_path / "prepared.safetensors", f"{ours}.{i}", torch.cat([gate, up]), 0)


class TestScale:
    def merged_with(self, tmp_path, factor, scale=1.0, metadata=None, config=None, **tensors):
        down, up = pair(torch.Generator().manual_seed(5))
        content = {"blocks.0.mlp.fc1.lora_A.weight": down, "blocks.0.mlp.fc1.lora_B.weight": up, **tensors}
        lora = save(content, tmp_path / "adapter/lora.safetensors", **(metadata or {}))
        if config is not None:
            (tmp_path / "adapter/adapter_config.json").write_text(json.dumps(config))
        path = converted(checkpoint(), tmp_path, loras=[(lora, scale)])
        assert_merged(path, "blocks.0", weights()["blocks.0"], factor * (up @ down))
        return path

    def test_of_the_caller(self, tmp_path):
        path = self.merged_with(tmp_path, -0.3, scale=-0.3)
        (lora,) = open_prepared(path).description.loras
        assert (lora["name"], lora["scale"]) == ("lora.safetensors", -0.3)
        assert len(lora["sha256"]) == 64

    def test_an_alpha(self, tmp_path):
        self.merged_with(tmp_path, 10 / RANK, **{"blocks.0.mlp.fc1.alpha": torch.tensor(10.0)})

    def test_an_alpha_in_bf16_of_one_element(self, tmp_path):
        self.merged_with(tmp_path, 0.5, **{"blocks.0.mlp.fc1.alpha": torch.tensor([2.0], dtype=torch.bfloat16)})

    def test_pefts_config(self, tmp_path):
        self.merged_with(tmp_path, 8 / RANK, config={"lora_alpha": 8, "r": RANK})

    def test_pefts_patterns(self, tmp_path):
        self.merged_with(tmp_path, 2 / RANK, config={"lora_alpha": 8, "alpha_pattern": {"blocks.1": 5, "mlp.fc1": 2}})

    def test_rank_stabilized(self, tmp_path):
        self.merged_with(tmp_path, 8 / math.sqrt(RANK), config={"lora_alpha": 8, "use_rslora": True})

    def test_the_metadata_of_diffusers(self, tmp_path):
        packed = {"transformer.lora_alpha": 6, "transformer.r": RANK}
        self.merged_with(tmp_path, 6 / RANK, metadata={"lora_adapter_metadata": json.dumps(packed)})

    def test_an_alpha_in_the_metadata(self, tmp_path):
        self.merged_with(tmp_path, 3 / RANK, metadata={"alpha": "3"})

    def test_no_number(self, tmp_path):
        with pytest.raises(ValueError, match="must say its alpha as a number"):
            self.merged_with(tmp_path, 1, metadata={"alpha": "much"})


def test_several_adapters_add_up(tmp_path):
    generator = torch.Generator().manual_seed(6)
    loras, delta = [], 0
    for i, (scale, rank) in enumerate([(1.0, 4), (0.5, 7)]):
        down, up = pair(generator, rank)
        content = {"blocks.1.mlp.fc1.lora_A.weight": down, "blocks.1.mlp.fc1.lora_B.weight": up}
        loras.append((save(content, tmp_path / f"{i}.safetensors"), scale))
        delta = delta + scale * (up @ down)
    path = converted(checkpoint(), tmp_path, loras=loras)
    assert_merged(path, "blocks.1", weights()["blocks.1"], delta)


@pytest.mark.parametrize("form", ["E4M3 per channel", "E5M2 per tensor", "FP16"])
def test_on_every_form_of_weight(tmp_path, form):
    """A repacked form too is quantized again then, and the report says so."""
    from checkpoints import fc1_of, values_of

    tensors = checkpoint(form=form)
    down, up = pair(torch.Generator().manual_seed(7))
    lora = save(
        {"blocks.0.mlp.fc1.lora_A.weight": down, "blocks.0.mlp.fc1.lora_B.weight": up}, tmp_path / "l.safetensors"
    )
    path = converted(tensors, tmp_path, loras=[(lora, 1.0)])
    assert_merged(path, "blocks.0", values_of(fc1_of(tensors, "native", "blocks.0")), up @ down)
    layer = open_prepared(path).description.layers["blocks.0"]
    assert layer["action"] == ("requantized" if " per " in form else "quantized")


def test_other_layers_are_left_to_the_engine(tmp_path):
    generator = torch.Generator().manual_seed(8)
    others = ("blocks.0.attn.qkv_proj", "blocks.1.mlp.fc2", "final_layer.adaln_proj.linear", "condition_proj")
    content = {}
    for module in ("blocks.0.mlp.fc1", *others):
        down, up = pair(generator)
        content |= {f"diffusion_model.{module}.lora_A.weight": down, f"diffusion_model.{module}.lora_B.weight": up}
    content["lora_unet_token_refiner_blocks_0_attn_out_proj.lora_down.weight"] = torch.zeros(4, 8)
    lora = save(content, tmp_path / "lora.safetensors")
    source = save(checkpoint(), tmp_path / "source.safetensors")
    report = run(source, tmp_path / "prepared.safetensors", loras=[(lora, 1.0)])
    assert report.left_to_engine == tuple(sorted((*others, "token_refiner_blocks_0_attn_out_proj")))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"blocks.0.mlp.fc3.lora_A.weight": ...}, "blocks.0.mlp.fc3.lora_A.weight of .* must belong to a linear layer"),
        ({"text_encoder.layers.0.lora_A.weight": ...}, "text_encoder.* must belong to a linear layer"),
        ({"blocks.0.mlp.fc1.surprise": ...}, "surprise of .* must belong to a linear layer"),
        ({"lora_unet_blocks_0_mlp_fc9.lora_down.weight": ...}, "must belong to a linear layer"),
        ({"blocks.0.mlp.fc1.lora_B.weight": None}, "both matrices of its pair; the one for up is missing"),
        ({"blocks.0.mlp.fc1.lora_A.weight": None}, "both matrices of its pair; the one for down is missing"),
        ({"blocks.0.mlp.fc1.dora_scale": ...}, "must be a pair of LoRA matrices"),
        ({"blocks.0.mlp.fc1.lora_magnitude_vector": ...}, "must be a pair of LoRA matrices"),
        ({"blocks.0.mlp.fc1.lokr_w1": ...}, "must be a pair of LoRA matrices"),
        ({"blocks.0.mlp.fc1.diff": ...}, "must be a pair of LoRA matrices"),
        (
            {"blocks.9.mlp.fc1.lora_A.weight": ..., "blocks.9.mlp.fc1.lora_B.weight": ...},
            "must be one of the checkpoint's layers",
        ),
        ({"diffusion_model.blocks.0.mlp.fc1.lora_A.weight": ...}, "must have one down matrix for blocks.0.mlp.fc1"),
        ({"transformer_blocks.0.ff.net.0.proj.lora_A.weight": ...}, "must have one pair for blocks.0|both matrices"),
        ({"blocks.0.mlp.fc1.lora_A.weight": torch.zeros(4, HIDDEN - 1)}, r"must have \[rank, 256\] and \[256, rank\]"),
        ({"blocks.0.mlp.fc1.lora_A.weight": torch.zeros(5, HIDDEN)}, r"must have \[rank, 256\] and \[256, rank\]"),
        ({"blocks.0.mlp.fc1.lora_A.weight": torch.zeros(4, HIDDEN, dtype=torch.int8)}, "must be BF16, F16 or F32"),
        ({"blocks.0.mlp.fc1.lora_A.weight": torch.zeros(4, HIDDEN, 1)}, "must be BF16, F16 or F32"),
        ({"blocks.0.mlp.fc1.alpha": torch.tensor(math.nan)}, "must have a finite alpha"),
        (
            {"blocks.0.mlp.fc1.lora_A.weight": torch.full((4, HIDDEN), math.inf)},
            "gate row 0 of blocks.0.mlp.fc1.weight must be finite with",
        ),
    ],
)
def test_refusals(tmp_path, change, message):
    down, up = pair(torch.Generator().manual_seed(9))
    content = {"blocks.0.mlp.fc1.lora_A.weight": down, "blocks.0.mlp.fc1.lora_B.weight": up}
    content |= {key: torch.zeros(4, HIDDEN) if value is ... else value for key, value in change.items()}
    content = {key: value for key, value in content.items() if value is not None}
    lora = save(content, tmp_path / "lora.safetensors")
    with pytest.raises(ValueError, match=message):
        converted(checkpoint(), tmp_path, loras=[(lora, 1.0)])
    assert sorted(path.name for path in tmp_path.iterdir()) == ["lora.safetensors", "source.safetensors"]


def test_an_adapter_that_does_not_touch_fc1(tmp_path):
    lora = save({"blocks.0.attn.out_proj.lora_A.weight": torch.zeros(4, 8)}, tmp_path / "lora.safetensors")
    with pytest.raises(ValueError, match=r"must touch FC1; it only has blocks.0.attn.out_proj"):
        converted(checkpoint(), tmp_path, loras=[(lora, 1.0)])
