"""Adapters of every naming: FC1 gets what diffusers or PEFT would compute, and nothing is passed over."""

import json
import math

import numpy_contract as oracle
import pytest
import torch
from checkpoints import FFN, HIDDEN, checkpoint, converted, expected, save
from safetensors.torch import load_file

from h3mlp.checkpoint import inspect, units, verify
from h3mlp.checkpoint.convert import run
from h3mlp.checkpoint.prepared import open_prepared
from h3mlp.tools.checkpoint_views import inspected_head, summary

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


class Merging:
    def merged_with(self, tmp_path, factor, scale=1.0, metadata=None, config=None, alpha=None, **tensors):
        down, up = pair(torch.Generator().manual_seed(5))
        content = {"blocks.0.mlp.fc1.lora_A.weight": down, "blocks.0.mlp.fc1.lora_B.weight": up, **tensors}
        lora = save(content, tmp_path / "adapter/lora.safetensors", **(metadata or {}))
        if config is not None:
            text = config if isinstance(config, str) else json.dumps(config)
            (tmp_path / "adapter/adapter_config.json").write_text(text)
        path = converted(checkpoint(), tmp_path, loras=[(lora, scale, alpha)])
        assert_merged(path, "blocks.0", weights()["blocks.0"], factor * (up @ down))
        return path


class TestScale(Merging):
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
        for word in ("much", "nan", "inf", ""):
            with pytest.raises(ValueError, match="metadata of the adapter must say how it is meant; it does not"):
                self.merged_with(tmp_path, 1, metadata={"alpha": word})

    def test_an_alpha_of_two_elements(self, tmp_path):
        with pytest.raises(ValueError, match=r"fc1\.alpha of .* must be one number; it is .*\[2\]"):
            self.merged_with(tmp_path, 1, **{"blocks.0.mlp.fc1.alpha": torch.ones(2)})

    def test_the_tensors_alpha_is_for_the_tensors_rank(self, tmp_path):
        """Whatever a configuration says of ranks."""
        tensors = {"blocks.0.mlp.fc1.alpha": torch.tensor(2.0)}
        path = self.merged_with(tmp_path, 2 / RANK, config={"r": 12, "lora_alpha": 12}, **tensors)
        assert record_of(path)["alpha_from"] == ["tensor"]


def record_of(path):
    (lora,) = open_prepared(path).description.loras
    return {name: lora[name] for name in ("scale", "rank", "alpha", "alpha_from", "gate_order")}


class TestAlpha(Merging):
    """Which alpha it is, where it is from, and that it is told."""

    def told(self, path):
        """What convert's report, its JSON and inspect say of the adapter."""
        source, lora = path.with_name("source.safetensors"), path.with_name("adapter") / "lora.safetensors"
        report = run(source, path.with_name("again.safetensors"), loras=[(lora, 1.0)])
        lines = ["\n".join(summary(report)), "\n".join(inspected_head(inspect.run(path)))]
        assert report.as_json()["description"]["loras"] == open_prepared(path).description.loras
        return lines

    def test_none_is_assumed_aloud(self, tmp_path):
        path = self.merged_with(tmp_path, 1)
        want = {"scale": 1.0, "rank": [RANK], "alpha": [RANK], "alpha_from": ["assumed"], "gate_order": ["gate_up"]}
        assert record_of(path) == want
        for text in self.told(path):
            assert "lora.safetensors merged, scale 1, rank 4, alpha 4 ASSUMED (it says none" in text

    def test_one_that_is_said_is_not_assumed(self, tmp_path):
        path = self.merged_with(tmp_path, 8 / RANK, config={"lora_alpha": 8, "r": RANK})
        assert record_of(path)["alpha_from"] == ["adapter_config.json"]
        for text in self.told(path):
            assert "rank 4, alpha 8 of adapter_config.json, rows gate_up" in text

    @pytest.mark.parametrize(
        "says",
        [
            {},
            {"config": {"r": 12, "lora_alpha": 12}},
            {"metadata": {"alpha": "3"}},
            {"blocks.0.mlp.fc1.alpha": torch.tensor(10.0)},
            {"metadata": {"alpha": "3"}, "config": {"lora_alpha": 12}},
        ],
    )
    def test_given_by_hand_decides(self, tmp_path, says):
        """In the adapter's own units: 8 at rank 4 is a factor of 2, whatever the file says."""
        path = self.merged_with(tmp_path, 8 / RANK, alpha=8.0, **says)
        assert (record_of(path)["alpha"], record_of(path)["alpha_from"]) == ([8.0], ["given"])

    def test_one_rank_for_all_that_is_not_theirs(self, tmp_path):
        """Published fused adapters: r = 12 and alpha = 12 for attention, FC1 of rank 4 with the strength in it."""
        config = {"r": 12, "lora_alpha": 12, "rank_pattern": {}, "alpha_pattern": {}}
        message = r"mlp\.fc1 must have the rank that adapter_config\.json says, 12; its matrices have 4.*--lora-alpha"
        with pytest.raises(ValueError, match=message):
            self.merged_with(tmp_path, 1, config=config)
        packed = {"transformer.r": 12, "transformer.lora_alpha": 12}
        with pytest.raises(ValueError, match="lora_adapter_metadata says, 12; its matrices have 4"):
            self.merged_with(tmp_path / "packed", 1, metadata={"lora_adapter_metadata": json.dumps(packed)})

    def test_a_pattern_explains_the_rank(self, tmp_path):
        config = {"r": 12, "lora_alpha": 12, "rank_pattern": {r"^blocks\.\d+\.mlp\.fc1": RANK}}
        self.merged_with(tmp_path, 12 / RANK, config=config)

    def test_a_pattern_that_does_not(self, tmp_path):
        with pytest.raises(ValueError, match="says, 5; its matrices have 4"):
            self.merged_with(tmp_path, 1, config={"r": RANK, "lora_alpha": 12, "rank_pattern": {"fc1": 5}})

    def test_a_pattern_explains_the_alpha(self, tmp_path):
        self.merged_with(tmp_path, 6 / RANK, config={"r": 12, "lora_alpha": 12, "alpha_pattern": {"mlp.fc1": 6}})

    def test_two_places_that_differ(self, tmp_path):
        with pytest.raises(
            ValueError, match=r"must say one alpha; it says 12.0 \(adapter_config.json\) and 3.0 \(metadata\)"
        ):
            self.merged_with(tmp_path, 1, metadata={"alpha": "3"}, config={"lora_alpha": 12})
        self.merged_with(tmp_path / "same", 3 / RANK, metadata={"alpha": "3"}, config={"lora_alpha": 3})
        packed = {"lora_adapter_metadata": json.dumps({"transformer.r": 12, "transformer.use_rslora": False})}
        with pytest.raises(ValueError, match=r"must say one rank; it says 4.0 \(adapter_.*\) and 12.0 \(lora_adapter_"):
            self.merged_with(tmp_path / "r", 1, metadata=packed, config={"lora_alpha": 3, "r": 4})
        with pytest.raises(ValueError, match=r"must say one use_rslora; it says True .* and False .*Correct one"):
            self.merged_with(tmp_path / "rs", 1, metadata=packed, config={"lora_alpha": 3, "use_rslora": True})

    def test_two_places_that_complete_each_other(self, tmp_path):
        """The divisor of one and the alpha of the other, whatever else is there."""
        config = {"use_rslora": True, "alpha_pattern": {"attn": 7}}
        path = self.merged_with(tmp_path, 3 / math.sqrt(RANK), metadata={"alpha": "3"}, config=config)
        assert (record_of(path)["alpha"], record_of(path)["alpha_from"]) == ([3.0], ["metadata"])

    @pytest.mark.parametrize("initial", ["pissa", "pissa_niter_16", "olora", "CorDA", "loftq"])
    def test_of_a_weight_that_was_changed(self, tmp_path, initial):
        config = {"lora_alpha": 4, "r": RANK, "init_lora_weights": initial}
        with pytest.raises(ValueError, match=f"init_lora_weights '{initial}' makes an adapter of another weight"):
            self.merged_with(tmp_path, 1, config=config)

    @pytest.mark.parametrize(
        "config",
        [
            "{",
            "[1]",
            '{"lora_alpha": "x"}',
            '{"lora_alpha": true}',
            '{"r": [1]}',
            '{"alpha_pattern": {"(": 1}}',
            '{"alpha_pattern": 3}',
            '{"swiglu_gate_first": "maybe"}',
            '{"swiglu_gate_first": []}',
        ],
    )
    def test_a_damaged_configuration(self, tmp_path, config):
        """One line, whatever is in it."""
        with pytest.raises(ValueError, match=r"must say (its alpha|how it is meant)") as refusal:
            self.merged_with(tmp_path, 1, config=config)
        assert "\n" not in str(refusal.value)

    @pytest.mark.parametrize("option", ["scale", "alpha"])
    def test_no_finite_number(self, tmp_path, option):
        with pytest.raises(ValueError, match=f"the {option} of .* must be finite; it is nan"):
            self.merged_with(tmp_path, 1, **{option: math.nan})


class TestOrderOfTheHalves:
    """Of the rows of B. What is merged is computed here in logical order."""

    def merge(
        self,
        tmp_path,
        naming,
        of_checkpoint="diffusers",
        gate_first=None,
        given=None,
        metadata=None,
        config=None,
    ):
        """Merge an adapter under a naming whose rows are gate first or not, and say whether it came out right."""
        down, up = pair(torch.Generator().manual_seed(11))
        module = "blocks.0.mlp.fc1" if naming == "native" else "transformer_blocks.0.ff.net.0.proj"
        stored = up if gate_first else torch.cat(up.chunk(2)[::-1])
        content = {f"{module}.lora_A.weight": down, f"{module}.lora_B.weight": stored}
        lora = save(content, tmp_path / "adapter/lora.safetensors", **(metadata or {}))
        if config:
            lora.with_name("adapter_config.json").write_text(json.dumps(config))
        path = converted(checkpoint(of_checkpoint), tmp_path, loras=[(lora, 1.0, 4.0, given)])
        assert_merged(path, "blocks.0", weights()["blocks.0"], up @ down)
        return path

    @pytest.mark.parametrize("said", ["true", "True", "1"])
    @pytest.mark.parametrize("of_checkpoint", ["native", "diffusers"])
    def test_the_file_says_it(self, tmp_path, said, of_checkpoint):
        """As trainers write it under diffusers' names."""
        path = self.merge(tmp_path, "diffusers", of_checkpoint, gate_first=True, metadata={"swiglu_gate_first": said})
        assert record_of(path)["gate_order"] == ["gate_up"]

    def test_it_says_the_other(self, tmp_path):
        self.merge(tmp_path, "native", gate_first=False, metadata={"swiglu_gate_first": "false"})

    @pytest.mark.parametrize("key", ["swiglu_gate_first", "transformer.swiglu_gate_first"])
    def test_among_the_metadata_of_diffusers(self, tmp_path, key):
        packed = json.dumps({key: True, "transformer.r": 4})
        self.merge(tmp_path, "diffusers", gate_first=True, metadata={"lora_adapter_metadata": packed})

    def test_in_pefts_configuration(self, tmp_path):
        self.merge(tmp_path, "diffusers", gate_first=True, config={"swiglu_gate_first": True, "r": 4})

    def test_two_statements_that_differ(self, tmp_path):
        metadata = {"swiglu_gate_first": "false", "lora_adapter_metadata": json.dumps({"swiglu_gate_first": True})}
        message = (
            r"must say one order of its halves; it says gate_up \(lora_adapter_metadata\) and up_gate \(metadata\)"
        )
        with pytest.raises(ValueError, match=message):
            self.merge(tmp_path, "diffusers", gate_first=True, metadata=metadata)
        self.merge(tmp_path, "diffusers", gate_first=True, metadata=metadata, given="gate_up")

    def test_given_by_hand_decides(self, tmp_path):
        self.merge(tmp_path, "diffusers", gate_first=True, given="gate_up")
        self.merge(
            tmp_path / "said", "diffusers", gate_first=True, given="gate_up", metadata={"swiglu_gate_first": "0"}
        )

    def test_no_order(self, tmp_path):
        with pytest.raises(ValueError, match="gate_order must be 'gate_up' or 'up_gate'; it is 'gate'"):
            self.merge(tmp_path, "diffusers", given="gate")

    @pytest.mark.parametrize("naming", ["native", "diffusers"])
    def test_of_a_checkpoint_that_is_not_as_its_names_say(self, tmp_path, naming):
        """An adapter of the same naming was trained on it, so that its rows are in that order; one of the other naming
        was not."""
        other = {"native": "diffusers", "diffusers": "native"}[naming]
        stored = checkpoint(naming)
        for name in stored:
            if "fc1" in name or "net.0" in name:
                stored[name] = torch.cat(stored[name].chunk(2)[::-1])
        order = {"native": "up_gate", "diffusers": "gate_up"}[naming]
        for of_adapter, gate_first in ((naming, order == "gate_up"), (other, other == "native")):
            down, up = pair(torch.Generator().manual_seed(11))
            module = "blocks.0.mlp.fc1" if of_adapter == "native" else "transformer_blocks.0.ff.net.0.proj"
            rows = up if gate_first else torch.cat(up.chunk(2)[::-1])
            folder = tmp_path / of_adapter
            lora = save({f"{module}.lora_A.weight": down, f"{module}.lora_B.weight": rows}, folder / "lora.safetensors")
            path = converted(stored, folder, loras=[(lora,)], gate_order=order)
            assert_merged(path, "blocks.0", weights()["blocks.0"], up @ down)
            verified = verify.run(path, folder / "source.safetensors", rows=8, loras=[(lora,)], gate_order=order)
            assert verified.ok

    def test_a_name_that_does_not_say_it(self, tmp_path):
        down, up = pair(torch.Generator().manual_seed(11))
        content = {f"blocks.0.ff.net.0.proj.lora_{name}.weight": t for name, t in (("A", down), ("B", up))}
        lora = save(content, tmp_path / "adapter/lora.safetensors")
        with pytest.raises(
            ValueError, match=r"gate_order must be given for blocks\.0\.ff\.net\.0\.proj.*--lora-gate-order"
        ):
            converted(checkpoint(), tmp_path, loras=[(lora,)])
        path = converted(checkpoint(), tmp_path, loras=[(lora, 1.0, None, "gate_up")])
        assert_merged(path, "blocks.0", weights()["blocks.0"], up @ down)


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
    assert report.left_to_engine == tuple(sorted((*others, "token_refiner.blocks.0.attn.out_proj")))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"blocks.0.mlp.fc3.lora_A.weight": ...}, "blocks.0.mlp.fc3.lora_A.weight of .* must belong to a linear layer"),
        ({"text_encoder.layers.0.lora_A.weight": ...}, "text_encoder.* must belong to a linear layer"),
        ({"blocks.0.mlp.fc1.surprise": ...}, "surprise of .* it is on FC1, and is of an unknown kind"),
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
