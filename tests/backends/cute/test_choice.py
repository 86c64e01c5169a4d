"""Which GEMM a device gets, on a pretended GPU."""

import json
import logging
from types import SimpleNamespace

import pytest
import torch

from h3mlp.backends.cute import choice, jit
from h3mlp.backends.cute.choice import Choice

ARCH = "sm_120a"
DEFAULT = Choice("unit_scale", "128x256")


@pytest.fixture(autouse=True)
def gpu(monkeypatch, tmp_path):
    """What tells one GPU from another, and an empty cache."""
    found = SimpleNamespace(name="NVIDIA GeForce RTX 5090", multi_processor_count=170)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _device: found)
    monkeypatch.setenv("H3MLP_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.delenv(choice.ENVIRONMENT, raising=False)
    monkeypatch.setattr(choice, "_told", {})
    return found


def test_candidates():
    assert choice.candidates("sm_90a") == ()
    assert choice.candidates("sm_89") == tuple(Choice("plain", tile) for tile in choice.TILES)
    for arch in ("sm_120a", "sm_121a"):
        assert choice.candidates(arch)[0] == DEFAULT
        assert len(set(choice.candidates(arch))) == 6


def test_the_order_of_what_decides(monkeypatch):
    assert choice.current(0, ARCH) == (DEFAULT, choice.NOT_MEASURED)
    choice.keep(0, ARCH, {DEFAULT: 9.0, Choice("plain", "128x128"): 8.0})
    assert choice.current(0, ARCH) == (Choice("plain", "128x128"), "measured")
    monkeypatch.setenv(choice.ENVIRONMENT, "plain:256x128")
    assert choice.current(0, ARCH) == (Choice("plain", "256x128"), "$H3MLP_GEMM")
    choice.tell(0, DEFAULT)
    assert choice.current(0, ARCH) == (DEFAULT, "told by warmup")
    assert choice.current(1, ARCH)[1] == "$H3MLP_GEMM", "another device"
    choice.tell(0, None)
    assert choice.current(0, ARCH)[1] == "$H3MLP_GEMM"


@pytest.mark.parametrize(("form", "want"), [(-1, "unit_scale"), (0, "plain"), (2, "unit_scale")])
def test_a_call_may_ask_for_a_form(form, want):
    """With the tile that was chosen."""
    chosen = Choice("unit_scale", "256x128")
    assert choice.with_form(chosen, form, ARCH) == Choice(want, "256x128")


def test_a_form_that_the_gpu_lacks_is_not_taken():
    chosen = Choice("plain", "128x128")
    assert choice.with_form(chosen, 2, "sm_89") == chosen
    assert choice.with_form(None, 2, "sm_90a") is None


def test_there_is_none_on_hopper(monkeypatch):
    monkeypatch.setenv(choice.ENVIRONMENT, "plain:256x128")
    assert choice.current(0, "sm_90a") is None


def test_a_measurement_holds_for_a_model_of_gpu_and_these_kernels(gpu, monkeypatch):
    choice.keep(0, ARCH, {Choice("plain", "128x128"): 8.0})
    assert choice.current(3, ARCH)[1] == "measured", "the same model"
    with monkeypatch.context() as changed:
        changed.setattr(jit, "SOURCES", "other kernels")
        assert choice.current(0, ARCH)[1] == choice.NOT_MEASURED
    assert choice.current(0, "sm_121a")[1] == choice.NOT_MEASURED
    gpu.multi_processor_count = 188
    assert choice.current(0, ARCH)[1] == choice.NOT_MEASURED


def test_what_is_kept_can_be_read_by_a_person(tmp_path):
    choice.keep(0, ARCH, {DEFAULT: 9.0, Choice("plain", "128x128"): 8.5})
    (file,) = (tmp_path / "cache").iterdir()
    assert file.name.startswith("gemm-sm_120a-")
    times = {"unit_scale:128x256": 9.0, "plain:128x128": 8.5}
    assert json.loads(file.read_text()) == {"gemm": ["plain", "128x128"], "microseconds": times}


@pytest.mark.parametrize("content", ["", "{}", '{"gemm": 3}', '{"gemm": ["plain"]}', "\0"])
def test_a_damaged_file_is_no_measurement(content, tmp_path, caplog):
    choice.keep(0, ARCH, {Choice("plain", "128x128"): 8.0})
    (file,) = (tmp_path / "cache").iterdir()
    file.write_text(content)
    assert choice.current(0, ARCH)[1] == choice.NOT_MEASURED
    assert "cannot be read, measure again" in caplog.text


def test_a_kept_candidate_that_is_none_any_more_is_no_measurement():
    choice.keep(0, ARCH, {Choice("plain", "512x512"): 8.0})
    assert choice.current(0, ARCH)[1] == choice.NOT_MEASURED


def test_a_folder_that_cannot_be_written_holds_it_in_memory(tmp_path, monkeypatch, caplog):
    caplog.set_level(logging.INFO, logger="h3mlp")
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("H3MLP_CACHE_DIR", str(tmp_path / "file" / "cache"))
    choice.keep(0, ARCH, {Choice("plain", "128x128"): 8.0})
    assert choice.current(0, ARCH)[0] == Choice("plain", "128x128")
    assert "plain:128x128 is not kept on disk" in caplog.text


@pytest.mark.parametrize("text", ["fast", "plain", "plain:8x8", "unit_scale:128x256 "])
def test_what_is_no_candidate_is_refused(text, monkeypatch):
    wanted = "one of unit_scale:128x256, plain:128x256, unit_scale:256x128, .* on sm_120a; it is "
    with pytest.raises(ValueError, match=f"gemm must be {wanted}{text!r}"):
        choice.parse("gemm", text, ARCH)
    monkeypatch.setenv(choice.ENVIRONMENT, text)
    with pytest.raises(ValueError, match=f"H3MLP_GEMM must be {wanted}{text!r}"):
        choice.current(0, ARCH)


def test_where_there_is_no_choice_every_text_is_refused():
    with pytest.raises(ValueError, match="gemm must be unset: there is no choice on sm_90a; it is 'plain:128x256'"):
        choice.parse("gemm", "plain:128x256", "sm_90a")
