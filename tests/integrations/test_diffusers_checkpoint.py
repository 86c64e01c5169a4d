"""``apply(checkpoint=)`` and ``load``: the bits of ``apply`` on the BF16 model."""

import copy
import shutil

import checkpoints
import pytest
import torch
from torch import nn

pytest.importorskip("diffusers", reason="diffusers is not installed")

import diffusers
import minimax_h3
from diffusers.models.transformers import transformer_minimax_h3 as original
from minimax_h3 import BLOCKS as NAMES
from minimax_h3 import fc1s, is_untouched
from peft import LoraConfig

from h3mlp.checkpoint import convert
from h3mlp.integrations import diffusers as integration

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning:peft", "ignore::FutureWarning")


@pytest.fixture
def model() -> diffusers.MiniMaxH3Transformer3DModel:
    return minimax_h3.transformer()


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("checkpoint")
    minimax_h3.transformer().save_pretrained(folder / "source")
    convert.run(folder / "source", folder / "prepared", copy_others=True)
    return folder


@pytest.fixture
def prepared(folder):
    return folder / "prepared"


@pytest.mark.parametrize("modulation", ["fused", "eager"])
def test_the_bits_of_apply(model, prepared, modulation):
    quantized = copy.deepcopy(model)
    want = integration.apply(quantized, modulation=modulation)
    got = integration.apply(model, checkpoint=prepared, modulation=modulation)
    assert got == want
    assert torch.equal(minimax_h3.run(model), minimax_h3.run(quantized))


def test_a_native_checkpoint_of_the_same_weights(model, tmp_path):
    """What diffusers itself makes of the native names: halves exchanged, as its conversion says."""
    from diffusers.loaders.single_file_utils import (
        convert_minimax_h3_transformer_checkpoint_to_diffusers as to_diffusers,
    )

    native = checkpoints.checkpoint(refiners=2)
    del native["proj_out.weight"]
    source = checkpoints.save(native, tmp_path / "source.safetensors")
    convert.run(source, tmp_path / "prepared.safetensors")
    theirs = to_diffusers(dict(native), dict(model.config))
    assert not model.load_state_dict(theirs, strict=False).unexpected_keys
    quantized = copy.deepcopy(model)
    integration.apply(quantized)
    integration.apply(model, checkpoint=tmp_path / "prepared.safetensors")
    assert torch.equal(minimax_h3.run(model), minimax_h3.run(quantized))


def test_weights_that_were_never_loaded(model, prepared):
    quantized = copy.deepcopy(model)
    integration.apply(quantized)
    for name in NAMES:
        model.get_submodule(name).ff.net[0].to("meta")
        model.get_submodule(name).norm2.to("meta")
    integration.apply(model, checkpoint=prepared)
    assert torch.equal(minimax_h3.run(model), minimax_h3.run(quantized))


def test_a_quantized_fc1_is_replaced(model, prepared):
    class Quantized(nn.Linear):
        pass

    for name in NAMES:
        model.get_submodule(name).ff.net[0].proj.__class__ = Quantized
    integration.apply(model, checkpoint=prepared)
    assert set(fc1s(model)) == {f"{name}.ff.net.0" for name in NAMES}


def test_the_eps_is_the_models(model, prepared):
    for name in NAMES:
        model.get_submodule(name).norm2.eps = 1e-3
    integration.apply(model, checkpoint=prepared)
    assert {fc1.eps for fc1 in fc1s(model).values()} == {1e-3}


def test_some_blocks_and_the_rest_later(model, prepared):
    integration.apply(model, checkpoint=prepared, blocks=[1])
    integration.apply(model, blocks=[0, *NAMES[:2]])
    quantized = minimax_h3.transformer()
    integration.apply(quantized)
    assert torch.equal(minimax_h3.run(model), minimax_h3.run(quantized))


def test_restored(model, prepared):
    want = minimax_h3.run(model)
    integration.apply(model, checkpoint=prepared, keep_weights=True)
    integration.restore(model)
    assert torch.equal(minimax_h3.run(model), want)


def test_nothing_to_keep(model, prepared):
    model.transformer_blocks[1].ff.net[0].to("meta")
    with pytest.raises(ValueError, match=r"keep_weights must be False, since the weights of transformer_blocks\.1"):
        integration.apply(model, checkpoint=prepared, keep_weights=True)
    assert is_untouched(model)


def test_lora_on_fc1_would_be_lost(model, prepared):
    model.add_adapter(LoraConfig(target_modules=["net.0.proj"]))
    with pytest.raises(ValueError, match=r"must be a torch.nn.Linear without bias.*h3mlp convert --lora"):
        integration.apply(model, checkpoint=prepared)
    assert is_untouched(model)


def test_offloaded_before(model, prepared):
    model.transformer_blocks[0].ff.net[0].proj.register_forward_hook(lambda *_: None)
    with pytest.raises(ValueError, match="must have no hooks"):
        integration.apply(model, checkpoint=prepared)
    assert is_untouched(model)


@pytest.mark.parametrize(
    ("tensors", "message"),
    [
        (lambda: checkpoints.checkpoint(layers=1, refiners=2), r"checkpoint must have transformer_blocks\.1"),
        (lambda: checkpoints.checkpoint(refiners=1), r"checkpoint must have token_refiner\.refiner_blocks\.1"),
    ],
)
def test_another_checkpoint(model, tmp_path, tensors, message):
    path = checkpoints.converted(tensors(), tmp_path)
    with pytest.raises(ValueError, match=message):
        integration.apply(model, checkpoint=path)
    assert is_untouched(model)


def test_another_size(prepared):
    with torch.device("meta"):
        model = original.MiniMaxH3Transformer3DModel(hidden_size=384, ffn_dim=128, num_layers=2)
    with pytest.raises(ValueError, match=r"checkpoint must have the size of .*, \[256, 384\]; it has \[256, 256\]"):
        integration.apply(model, checkpoint=prepared)
    assert is_untouched(model)


def test_not_prepared(model, folder):
    with pytest.raises(ValueError, match="must be a prepared checkpoint"):
        integration.apply(model, checkpoint=folder / "source")
    assert is_untouched(model)


@pytest.mark.parametrize("modulation", ["fused", "eager"])
def test_loaded(folder, prepared, modulation):
    want = diffusers.MiniMaxH3Transformer3DModel.from_pretrained(folder / "source", torch_dtype=torch.bfloat16)
    integration.apply(want, modulation=modulation)
    got = integration.load(prepared, modulation=modulation)
    assert not got.training
    assert {name: (t.dtype, t.shape) for name, t in got.state_dict().items()} == {
        name: (t.dtype, t.shape) for name, t in want.state_dict().items()
    }
    assert not any(parameter.requires_grad for parameter in got.parameters())
    assert torch.equal(minimax_h3.run(got), minimax_h3.run(want))


def test_a_copy_outlives_the_files(model, folder, tmp_path):
    """The weights of a model that was loaded so are not the files'."""
    shutil.copytree(folder / "prepared", tmp_path / "prepared")
    want = integration.load(folder / "prepared")
    loaded = integration.load(tmp_path / "prepared", copy=True)
    integration.apply(model, checkpoint=tmp_path / "prepared", copy=True)
    for file in (tmp_path / "prepared").glob("*.safetensors"):
        with open(file, "r+b") as opened:
            opened.write(bytes(file.stat().st_size))
    assert torch.equal(minimax_h3.run(loaded), minimax_h3.run(want))
    for name, fc1 in fc1s(model).items():
        assert torch.equal(fc1.weight_scale, want.get_submodule(name).weight_scale)


def test_loaded_from_other_precisions(model, tmp_path):
    model.half().save_pretrained(tmp_path / "source")
    convert.run(tmp_path / "source", tmp_path / "prepared", copy_others=True)
    want = diffusers.MiniMaxH3Transformer3DModel.from_pretrained(tmp_path / "source", torch_dtype=torch.bfloat16)
    got = integration.load(tmp_path / "prepared")
    for name, tensor in want.state_dict().items():
        if ".ff.net.0." not in name and ".norm2." not in name:
            assert torch.equal(got.state_dict()[name], tensor), name


def test_what_cannot_be_loaded(folder, tmp_path):
    convert.run(folder / "source", tmp_path / "alone")
    with pytest.raises(ValueError, match=r"folder must be what `h3mlp convert --all` made .* and has none"):
        integration.load(tmp_path / "alone")
    shutil.copy(folder / "source/config.json", tmp_path / "alone")
    with pytest.raises(ValueError, match=r"must have the tensors of MiniMaxH3Transformer3DModel; \S+ is missing"):
        integration.load(tmp_path / "alone")
