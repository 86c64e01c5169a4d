"""Loading: by any name of a layer, without a copy, and nothing but what convert has written."""

import json
import signal
import subprocess
import sys

import pytest
import torch
from checkpoints import checkpoint, converted, fc1_of, gate_first, save
from helpers import bits
from safetensors import safe_open
from safetensors.torch import load_file

import h3mlp
from h3mlp import contract, synthetic
from h3mlp.checkpoint import convert
from h3mlp.checkpoint.container import open_checkpoint
from h3mlp.checkpoint.prepared import open_prepared


@pytest.fixture
def prepared(tmp_path):
    return converted(checkpoint("diffusers"), tmp_path)


def bf16(layer):
    return gate_first(fc1_of(checkpoint("diffusers"), "diffusers", layer)["weight"], "diffusers")


def rewritten(path, change, **tensors):
    """The file with other metadata or tensors."""
    with safe_open(path, "pt") as file:
        metadata = file.metadata()
    content = json.loads(metadata["h3mlp"])
    change(content)
    return save(load_file(path) | tensors, path.with_name("rewritten.safetensors"), h3mlp=json.dumps(content))


def same(content):
    """No change."""


@pytest.mark.parametrize(
    ("given", "layer"),
    [
        (1, "blocks.1"),
        ("blocks.1", "blocks.1"),
        ("transformer_blocks.1", "blocks.1"),
        ("token_refiner.refiner_blocks.0", "token_refiner.blocks.0"),
        ("token_refiner.blocks.0", "token_refiner.blocks.0"),
    ],
)
def test_a_layer_is_what_from_bf16_makes(prepared, given, layer):
    got, want = h3mlp.load_fc1(prepared, given), h3mlp.PackedFC1.from_bf16(bf16(layer))
    assert got.layout == contract.PACKED
    assert torch.equal(bits(got.weight), bits(want.weight))
    assert torch.equal(got.scale, want.scale)


@pytest.mark.parametrize("form", ["folder", "index"])
def test_from_several_files(tmp_path, monkeypatch, form):
    monkeypatch.setattr("h3mlp.checkpoint.layout.SHARD_BYTES", 100_000)
    source = save(checkpoint("diffusers"), tmp_path / "source.safetensors")
    convert.run(source, tmp_path / "prepared")
    path = tmp_path / "prepared" / ("model.safetensors.index.json" if form == "index" else "")
    assert len(open_prepared(path).container.files) == 3
    assert torch.equal(h3mlp.load_fc1(path, 1).scale, h3mlp.PackedFC1.from_bf16(bf16("blocks.1")).scale)


def test_nothing_is_copied(prepared):
    """The memory is the file's: what is written into its page is not seen elsewhere, and it is mapped."""
    weight = h3mlp.load_fc1(prepared, 0).weight
    with open("/proc/self/maps") as maps:
        spans = [line.split()[0].split("-") for line in maps if line.rstrip().endswith(str(prepared))]
    assert any(int(first, 16) <= weight.data_ptr() < int(end, 16) for first, end in spans)
    module = h3mlp.FC1SwiGLU.from_packed(h3mlp.PackedFC1(weight, torch.ones(256)), torch.ones(256).bfloat16())
    assert module.weight.data_ptr() == weight.data_ptr()


def test_a_copy_is_not_the_file(prepared):
    """It is the same weight, in memory of its own: the file may be overwritten, cut off or gone."""
    mapped = h3mlp.load_fc1(prepared, 0)
    want = [t.clone() for t in mapped]
    copied = h3mlp.load_fc1(prepared, 0, copy=True)
    module = h3mlp.FC1SwiGLU.from_checkpoint(prepared, 0, copy=True)
    norm = module.norm_weight.clone()
    with open("/proc/self/maps") as maps:
        spans = [line.split()[0].split("-") for line in maps if line.rstrip().endswith(str(prepared))]
    for tensor in (*copied, *module.parameters()):
        assert not any(int(first, 16) <= tensor.data_ptr() < int(end, 16) for first, end in spans)
    with open(prepared, "r+b") as file:
        file.write(bytes(prepared.stat().st_size))
    assert (mapped.weight.view(torch.uint8) == 0).all(), "what is mapped is the file"
    for weight, scale in (copied, module.packed):
        assert torch.equal(bits(weight), bits(want[0]))
        assert torch.equal(scale, want[1])
    assert torch.equal(module.norm_weight, norm)


@pytest.mark.skipif(sys.platform != "linux", reason="what a cut off mapping does")
def test_a_file_that_is_cut_off_afterwards(prepared):
    """A copy does not care; what is mapped ends the process by a signal, as the documentation says."""
    program = (
        "import os, sys, h3mlp\n"
        "mapped, copied = (h3mlp.load_fc1(sys.argv[1], 0, copy=copy).weight for copy in (False, True))\n"
        "os.truncate(sys.argv[1], 0)\n"
        "print(copied.float().sum().isfinite().item(), flush=True)\n"
        "mapped.float().sum()\n"
    )
    done = subprocess.run([sys.executable, "-c", program, str(prepared)], capture_output=True, check=False, timeout=60)
    assert (done.returncode, done.stdout) == (-signal.SIGBUS, b"True\n"), done.stderr


def test_a_file_system_without_mmap(prepared, monkeypatch):
    """One line with the path and the way out, which works."""
    import h3mlp.checkpoint.prepared as module

    def cannot(*_arguments):
        raise OSError(19, "No such device")

    monkeypatch.setattr(module, "safe_open", cannot)
    with pytest.raises(OSError, match=rf"{prepared} cannot be mapped into memory .*: load it with copy=True"):
        h3mlp.load_fc1(prepared, 0)
    assert h3mlp.load_fc1(prepared, 0, copy=True).scale.isfinite().all()


def test_a_tensor_of_a_dtype_that_is_not_known(tmp_path):
    path = tmp_path / "x.safetensors"
    header = json.dumps({"x": {"dtype": "F4", "shape": [4], "data_offsets": [0, 2]}}).encode()
    path.write_bytes(len(header).to_bytes(8, "little") + header + b"ab")
    with pytest.raises(ValueError, match=r"x \(F4 \[4\]\) of .* must be of dtype F64, F32"):
        open_checkpoint(path).tensors["x"].read()


def test_a_module_computes_what_the_bf16_layers_module_does(prepared):
    layer = synthetic.layer(9, 256, 128)
    norm = checkpoint("diffusers")["transformer_blocks.0.norm2.weight"]
    want = h3mlp.FC1SwiGLU.from_linear(bf16("blocks.0"), norm, gate_order="gate_up", eps=1e-6, modulation="eager")
    got = h3mlp.FC1SwiGLU.from_checkpoint(prepared, "transformer_blocks.0", eps=1e-6, modulation="eager")
    assert (got.eps, got.modulation) == (1e-6, "eager")
    given = (layer.x, layer.adaln_scale, layer.adaln_shift, layer.adaln_index)
    assert torch.equal(got(*given), want(*given))


def test_a_layer_is_the_state_dict_of_a_module(prepared):
    start = "token_refiner.blocks.0.fc1_swiglu."
    state = {name.removeprefix(start): tensor for name, tensor in load_file(prepared).items() if name.startswith(start)}
    module = h3mlp.FC1SwiGLU(256, 128)
    module.load_state_dict(state)
    assert torch.equal(module.weight_scale, h3mlp.load_fc1(prepared, "token_refiner.blocks.0").scale)


@pytest.mark.parametrize("layer", [2, -1, True, "blocks.2", "token_refiner.blocks.1", "mlp", None, 1.5])
def test_a_layer_that_is_not_there(prepared, layer):
    with pytest.raises(ValueError, match=r"layer must be one of blocks\.0 to token_refiner\.blocks\.0, or the number"):
        h3mlp.load_fc1(prepared, layer)


def test_a_source(tmp_path):
    path = save(checkpoint(), tmp_path / "source.safetensors")
    with pytest.raises(
        ValueError, match="must be a prepared checkpoint; it is not: make one of it with `h3mlp convert`"
    ):
        h3mlp.load_fc1(path, 0)


def test_no_file(tmp_path):
    with pytest.raises(FileNotFoundError):
        h3mlp.FC1SwiGLU.from_checkpoint(tmp_path / "none.safetensors", 0)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda content: content.update(version=2), "must be 'h3mlp.fc1', version 1; it is 'h3mlp.fc1', version 2"),
        (lambda content: content.update(format="other"), "must be 'h3mlp.fc1', version 1; it is 'other'"),
        (
            lambda content: content.update(layout="gate_up"),
            "must have its rows in order 'gate8_up8'; it says 'gate_up'",
        ),
        (lambda content: content.update(surprise=1), "are not those of a prepared checkpoint"),
        (lambda content: content.pop("layers"), "are not those of a prepared checkpoint"),
        (lambda content: content["layers"].update({"transformer_blocks.0": {}}), "must name layers such as blocks.0"),
        (lambda content: content["layers"].update({"blocks.7": {}}), r"blocks\.7.* must be F8_E4M3 .*; it is missing"),
        (lambda content: content.update(ffn=64), r"must be F8_E4M3 \[128, 256\]; it is blocks"),
    ],
)
def test_other_metadata(prepared, change, message):
    with pytest.raises(ValueError, match=message):
        h3mlp.load_fc1(rewritten(prepared, change), 0)


@pytest.mark.parametrize(
    ("which", "tensor", "message"),
    [
        ("weight", torch.zeros(256, 256), r"must be F8_E4M3 \[256, 256\]; it is blocks\.0"),
        ("weight_scale", torch.zeros(255), r"must be F32 \[256\]"),
        ("norm_weight", torch.zeros(256), r"must be BF16 \[256\]"),
        ("_extra_state", torch.tensor(list(b"gate_up  "), dtype=torch.uint8), "must say 'gate8_up8', the row order"),
    ],
)
def test_other_tensors(prepared, which, tensor, message):
    with pytest.raises(ValueError, match=message):
        h3mlp.load_fc1(rewritten(prepared, same, **{f"blocks.0.fc1_swiglu.{which}": tensor}), 0)


@pytest.mark.parametrize("metadata", ["{", "[]", "3"])
def test_metadata_that_are_none(prepared, metadata):
    save(load_file(prepared), prepared, h3mlp=metadata)
    with pytest.raises(ValueError, match="are not those of a prepared checkpoint"):
        h3mlp.load_fc1(prepared, 0)
