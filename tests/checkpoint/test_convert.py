"""From every naming and form to a prepared checkpoint, bit for bit against the oracle."""

import hashlib
import json
import shutil

import checkpoints
import numpy_contract as oracle
import pytest
import torch
from checkpoints import FORMS, REPACKED, block_names, checkpoint, converted, expected, fc1_of, save, save_sharded
from helpers import bits
from hypothesis import given
from hypothesis import strategies as st
from safetensors import safe_open
from safetensors.torch import load_file, save_file

import h3mlp
from h3mlp.checkpoint import convert, units
from h3mlp.checkpoint.prepared import open_prepared
from h3mlp.tools.checkpoint_views import summary


def assert_layers(path, tensors, naming, form, prefix=""):
    """The prepared file has what the oracle makes of the tensors, and nothing else."""
    found = load_file(path)
    for layer, name in block_names(naming).items():
        codes, scales = expected(fc1_of(tensors, naming, layer, prefix), naming, form)
        oracle.assert_same_bits(found.pop(f"{layer}.fc1_swiglu.weight"), codes, f"codes of {layer}")
        oracle.assert_same_bits(found.pop(f"{layer}.fc1_swiglu.weight_scale"), scales, f"scales of {layer}")
        norm = tensors[f"{prefix}{name}.norm2.weight"].bfloat16()
        assert torch.equal(found.pop(f"{layer}.fc1_swiglu.norm_weight"), norm)
        assert bytes(found.pop(f"{layer}.fc1_swiglu._extra_state").tolist()) == b"gate8_up8"
    assert not found


@pytest.fixture(params=[48, 512])
def steps(request, monkeypatch):
    """Rows at a time: some that do not divide 128, and all of them."""
    monkeypatch.setattr(units, "STEP_ROWS", request.param)


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("naming", ["native", "diffusers"])
@pytest.mark.usefixtures("steps")
def test_every_naming_and_form(tmp_path, naming, form):
    tensors = checkpoint(naming, form)
    report = convert.run(save(tensors, tmp_path / "source.safetensors"), tmp_path / "prepared.safetensors")
    assert_layers(tmp_path / "prepared.safetensors", tensors, naming, form)
    layers = report.description.layers
    assert {layer["form"] for layer in layers.values()} == {form}
    action = "repacked" if form in REPACKED else "requantized" if " per " in form else "quantized"
    assert {layer["action"] for layer in layers.values()} == {action}
    again = "rounded to FP8 a second time" in "\n".join(summary(report))
    assert again == (action == "requantized")


@pytest.mark.parametrize("scale_name", ["weight_scale", "scale_weight", "weight_scale_inv"])
@pytest.mark.parametrize("shape", ["[2F]", "[2F, 1]", "[1]", "[]", "blocks"])
def test_every_name_and_shape_of_a_scale(tmp_path, scale_name, shape):
    granularity = {"[1]": "tensor", "[]": "tensor", "blocks": "128x128 block"}.get(shape, "channel")
    form = f"E4M3 per {granularity}"
    tensors = checkpoint(form=form, scale_name=scale_name)
    for name in tensors:
        if name.endswith(scale_name):
            tensors[name] = {"[2F]": tensors[name].flatten(), "[1]": tensors[name].view(-1)}.get(shape, tensors[name])
    assert_layers(converted(tensors, tmp_path), tensors, "native", form)


@pytest.mark.parametrize("form", ["BF16", "E4M3 per channel"])
def test_both_namings_become_the_same_tensors(tmp_path, form):
    prepared = [load_file(converted(checkpoint(naming, form), tmp_path / naming)) for naming in ("native", "diffusers")]
    assert prepared[0].keys() == prepared[1].keys()
    for name, tensor in prepared[0].items():
        assert torch.equal(bits(tensor), bits(prepared[1][name])), name


def test_bf16_is_prepared_as_the_library_prepares_it(tmp_path):
    tensors = checkpoint()
    codes, scales = h3mlp.prepare_fc1_weight_fp8(tensors["blocks.1.mlp.fc1.weight"])
    found = load_file(converted(tensors, tmp_path))
    assert torch.equal(bits(found["blocks.1.fc1_swiglu.weight"]), bits(codes))
    assert torch.equal(found["blocks.1.fc1_swiglu.weight_scale"], scales)


@given(
    prefixes=st.lists(st.sampled_from(["model", "diffusion_model", "transformer", "net", "module"]), max_size=2),
    naming=st.sampled_from(["native", "diffusers"]),
    shards=st.integers(1, 3),
    shuffled=st.randoms(use_true_random=False),
)
def test_any_prefix_and_any_order_of_tensors(tmp_path_factory, prefixes, naming, shards, shuffled):
    """Found by name, never by position."""
    folder = tmp_path_factory.mktemp("any")
    prefix = "".join(f"{part}." for part in prefixes)
    tensors = checkpoint(naming, prefix=prefix)
    order = list(tensors)
    shuffled.shuffle(order)
    source = save_sharded({name: tensors[name] for name in order}, folder / "source", shards)
    convert.run(source, folder / "prepared.safetensors", hashes=False)
    assert_layers(folder / "prepared.safetensors", tensors, naming, "BF16", prefix)
    shutil.rmtree(folder)


@pytest.mark.parametrize("naming", ["native", "diffusers"])
def test_a_gate_order_that_is_not_the_names(tmp_path, naming):
    tensors = checkpoint(naming)
    other = {"native": "diffusers", "diffusers": "native"}[naming]
    order = {"native": "gate_up", "diffusers": "up_gate"}[other]
    found = load_file(converted(tensors, tmp_path, gate_order=order))
    codes, _ = expected(fc1_of(tensors, naming, "blocks.0"), other, "BF16")
    oracle.assert_same_bits(found["blocks.0.fc1_swiglu.weight"], codes)


def test_weights_are_not_rounded_to_bf16_first(tmp_path):
    tensors = checkpoint(form="FP32")
    name = "blocks.0.mlp.fc1.weight"
    tensors[name] = tensors[name] * (1 + 2.0**-11)
    found = load_file(converted(tensors, tmp_path))["blocks.0.fc1_swiglu.weight_scale"]
    _, of_fp32 = oracle.prepare(tensors[name].numpy())
    _, of_bf16 = oracle.prepare(oracle.from_torch(tensors[name].bfloat16()))
    oracle.assert_same_bits(found, of_fp32)
    assert (of_fp32 != of_bf16).any()


def test_zeros_and_numbers_at_the_ends(tmp_path):
    """A row of zeros, subnormals, a scale of zero."""
    tensors = checkpoint()
    weight = tensors["blocks.0.mlp.fc1.weight"]
    weight[0], weight[1], weight[2, 3], weight[200] = 0.0, -0.0, 3e38, weight[200] * 2.0**-120
    assert_layers(converted(tensors, tmp_path), tensors, "native", "BF16")
    tensors = checkpoint(form="E4M3 per channel")
    tensors["blocks.0.mlp.fc1.weight_scale"][7] = 0
    assert_layers(converted(tensors, tmp_path / "scale"), tensors, "native", "E4M3 per channel")


def test_the_snr_of_the_largest_numbers(tmp_path):
    """Whose squares FP32 does not have: the metadata are JSON, and the SNR is that of the rounding."""
    tensors = checkpoint(form="FP32")
    tensors["blocks.0.mlp.fc1.weight"] *= 1e38
    layer = open_prepared(converted(tensors, tmp_path)).description.layers["blocks.0"]
    assert layer["snr_db"] == pytest.approx(31.5, abs=0.5)


class TestWhatIsWritten:
    def test_metadata(self, tmp_path):
        source = save(checkpoint("diffusers", "E4M3 per 128x128 block"), tmp_path / "source.safetensors")
        convert.run(source, tmp_path / "prepared.safetensors")
        with safe_open(tmp_path / "prepared.safetensors", "pt") as file:
            metadata = file.metadata()
        assert metadata["format"] == "pt"
        content = json.loads(metadata["h3mlp"])
        assert (content["format"], content["version"], content["layout"]) == ("h3mlp.fc1", 1, "gate8_up8")
        assert (content["hidden"], content["ffn"], content["loras"]) == (256, 128, [])
        assert "nearest even" in content["rounding"]
        assert content["made_by"] == h3mlp.__version__
        digest = hashlib.sha256(source.read_bytes()).hexdigest()
        assert content["sources"] == [{"name": source.name, "bytes": source.stat().st_size, "sha256": digest}]
        assert list(content["layers"]) == ["blocks.0", "blocks.1", "token_refiner.blocks.0"]
        layer = content["layers"]["token_refiner.blocks.0"]
        assert layer["source"] == "token_refiner.refiner_blocks.0.ff.net.0.proj.weight"
        assert (layer["naming"], layer["gate_order"]) == ("diffusers", "up_gate")
        assert (layer["form"], layer["action"]) == ("E4M3 per 128x128 block", "requantized")

    def test_without_hashes(self, tmp_path):
        path = converted(checkpoint(), tmp_path, hashes=False)
        assert [source["sha256"] for source in open_prepared(path).description.sources] == [None]

    @pytest.mark.parametrize("form", ["BF16", "E5M2 per tensor", "E4M3 per channel"])
    def test_the_snr_is_that_of_the_rounding(self, tmp_path, form):
        """Over every 16th of 256 rows it is within 0.5 dB of that over all: the squared error of one element varies by
        as much as its mean, and 4096 of them average to 1.6% or 0.07 dB; both are of one draw."""
        tensors = checkpoint(form=form)
        layer = open_prepared(converted(tensors, tmp_path)).description.layers["blocks.0"]
        stored = fc1_of(tensors, "native", "blocks.0")
        codes, scales = expected(stored, "native", form)
        got = h3mlp.unpack_fc1_rows(oracle.to_torch(codes).float() * torch.from_numpy(scales)[:, None])
        want = checkpoints.values_of(stored)
        if form == "E4M3 per channel":
            assert torch.equal(got, want)
            assert layer["snr_db"] is None
        else:
            snr = 10 * torch.log10(want.square().sum() / (got - want).square().sum()).item()
            assert layer["snr_db"] == pytest.approx(snr, abs=0.5)

    def test_other_tensors_are_left_out(self, tmp_path):
        source = save(checkpoint(), tmp_path / "source.safetensors")
        report = convert.run(source, tmp_path / "prepared.safetensors")
        assert (report.copied, report.left_out) == ((), 4)  # three fc2 and proj_out

    def test_other_tensors_copied(self, tmp_path):
        tensors = checkpoint("diffusers", "E4M3 per channel")
        tensors["rope.table"] = torch.arange(6, dtype=torch.int64).view(2, 3)
        tensors["empty"] = torch.empty(0, 5)
        tensors["scalar"] = torch.tensor(2.0, dtype=torch.float64)
        path = converted(tensors, tmp_path, copy_others=True)
        found = load_file(path)
        kept = {name: tensor for name, tensor in tensors.items() if ".ff.net.0." not in name}
        for name, tensor in kept.items():
            assert found[name].dtype == tensor.dtype
            assert torch.equal(found[name], tensor), name
        assert {name for name in found if ".fc1_swiglu." not in name} == set(kept)

    def test_tensors_are_aligned_to_their_elements(self, tmp_path):
        tensors = checkpoint() | {"a.odd": torch.zeros(3, dtype=torch.uint8), "b.wide": torch.zeros(5)}
        for stored in open_prepared(converted(tensors, tmp_path, copy_others=True)).container.tensors.values():
            size = {"F32": 4, "BF16": 2}.get(stored.dtype, 1)
            assert stored.offset % (size if stored.nbytes % 64 else 64) == 0, stored

    def test_a_folder_in_several_files(self, tmp_path, monkeypatch):
        monkeypatch.setattr("h3mlp.checkpoint.layout.SHARD_BYTES", 150_000)
        tensors = checkpoint("diffusers")
        source = save_sharded(tensors, tmp_path / "source")
        (source / "config.json").write_text('{"num_layers": 2, "num_refiner_layers": 1}')
        report = convert.run(source, tmp_path / "prepared", copy_others=True)
        files = sorted(file.name for file in (tmp_path / "prepared").iterdir())
        count = len(report.files)
        assert count > 2
        shards = [f"model-{i + 1:05d}-of-{count:05d}.safetensors" for i in range(count)]
        assert files == sorted([*shards, "config.json", "model.safetensors.index.json"])
        index = json.loads((tmp_path / "prepared/model.safetensors.index.json").read_text())
        found = {}
        for shard in shards:
            content = load_file(tmp_path / "prepared" / shard)
            assert sum(tensor.nbytes for tensor in content.values()) <= 150_000
            assert all(index["weight_map"][name] == shard for name in content)
            found |= content
        assert index["weight_map"].keys() == found.keys()
        assert index["metadata"]["total_size"] == sum(tensor.nbytes for tensor in found.values())
        save_file(found, tmp_path / "one.safetensors")
        one = converted(tensors, tmp_path / "other", copy_others=True)
        want = load_file(one)
        assert found.keys() == want.keys()
        assert all(torch.equal(bits(found[name]), bits(want[name])) for name in want)

    def test_a_folder_of_one_file(self, tmp_path):
        source = save(checkpoint(), tmp_path / "source.safetensors")
        convert.run(source, tmp_path / "prepared")
        assert [file.name for file in (tmp_path / "prepared").iterdir()] == ["model.safetensors"]
        assert_layers(tmp_path / "prepared/model.safetensors", checkpoint(), "native", "BF16")

    @pytest.mark.parametrize("destination", ["prepared.safetensors", "prepared"])
    def test_an_earlier_conversion_is_replaced(self, tmp_path, destination):
        for seed in (0, 1):
            source = save(checkpoint(seed=seed), tmp_path / "source.safetensors")
            convert.run(source, tmp_path / destination)
        file = tmp_path / destination
        assert_layers(file if file.is_file() else file / "model.safetensors", checkpoint(seed=1), "native", "BF16")
        assert sorted(path.name for path in tmp_path.iterdir()) == sorted([destination, "source.safetensors"])

    def test_progress(self, tmp_path):
        seen = []
        converted(checkpoint(), tmp_path, progress=lambda *step: seen.append(step))
        steps, done, total = zip(*seen, strict=True)
        assert dict.fromkeys(steps) == dict.fromkeys(["blocks.0", "blocks.1", "token_refiner.blocks.0", "checksums"])
        assert list(done) == sorted(done)
        assert set(total) == {done[-1]}
