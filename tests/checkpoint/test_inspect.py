"""What a checkpoint is, in every form."""

import json

import pytest
from checkpoints import FORMS, REPACKED, block_names, checkpoint, converted, save, save_sharded
from rich.console import Console

from h3mlp.checkpoint import inspect
from h3mlp.tools.checkpoint_views import inspected_table


def shown(found):
    console = Console(width=100, highlight=False, markup=False)
    with console.capture() as capture:
        console.print(inspected_table(found), crop=False)
    return capture.get()


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("naming", ["native", "diffusers"])
def test_a_source(tmp_path, naming, form):
    tensors = checkpoint(naming, form)
    found = inspect.run(save_sharded(tensors, tmp_path / "source"))
    assert (found.prepared, found.files, found.other_tensors) == (False, 3, 4)
    assert found.bytes == sum(tensor.nbytes for tensor in tensors.values())
    assert [line.layer for line in found.lines] == list(block_names(naming))
    order = {"native": "gate_up", "diffusers": "up_gate"}[naming]
    for line, name in zip(found.lines, block_names(naming).values(), strict=True):
        assert line.name.startswith(f"{name}.")
        assert (line.form, line.gate_order, line.shape, line.snr_db) == (form, order, (256, 256), None)
        scales = [tensor for key, tensor in tensors.items() if key.startswith(f"{name}.") and key.endswith("_scale")]
        assert line.scale_range == ((scales[0].min().item(), scales[0].max().item()) if scales else None)
    text = shown(found)
    assert "a checkpoint to be prepared by `h3mlp convert`" in text
    assert text.count(form) >= 3


@pytest.mark.parametrize("form", ["BF16", "E4M3 per channel", "E5M2 per tensor"])
def test_a_prepared_one(tmp_path, form):
    found = inspect.run(converted(checkpoint("diffusers", form), tmp_path, copy_others=True))
    assert (found.prepared, found.files, found.other_tensors) == (True, 1, 7)  # with the three norm2
    action = "repacked" if form in REPACKED else "requantized" if " per " in form else "quantized"
    for line in found.lines:
        assert (line.form, line.action) == (form, action)
        assert 0 < line.scale_range[0] < line.scale_range[1] < 1
        assert (line.snr_db is None) == (form in REPACKED)
    text = shown(found)
    assert "a prepared checkpoint of h3mlp" in text
    assert "of source.safetensors" in text
    json.dumps(found.as_json(), allow_nan=False)


def test_the_order_that_is_given(tmp_path):
    tensors = {name.replace("mlp.fc1", "ff.net.0.proj"): tensor for name, tensor in checkpoint().items()}
    path = save(tensors, tmp_path / "source.safetensors")
    with pytest.raises(ValueError, match="gate_order must be given"):
        inspect.run(path)
    assert {line.gate_order for line in inspect.run(path, "up_gate").lines} == {"up_gate"}
