"""A name on Hugging Face is the snapshot in the local cache, or one line that says what is missing."""

import sys

import pytest
from checkpoints import checkpoint, save

import h3mlp
from h3mlp.checkpoint import convert, hub

COMMIT = "0" * 39 + "1"


@pytest.fixture
def cache(tmp_path, monkeypatch):
    """Hugging Face's own layout: blobs, snapshots of links to them, and refs."""
    folder = tmp_path / "hub"
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(folder))
    repository = folder / "models--Org--Some-Model.1"
    (repository / "refs").mkdir(parents=True)
    (repository / "refs/main").write_text(COMMIT)
    blob = save(checkpoint("diffusers"), repository / "blobs/blob")
    link = repository / "snapshots" / COMMIT / "transformer/model.safetensors"
    link.parent.mkdir(parents=True)
    link.symlink_to(blob)
    monkeypatch.chdir(tmp_path)
    return repository


@pytest.mark.parametrize("name", ["Org/Some-Model.1/transformer", "Org/Some-Model.1/transformer/model.safetensors"])
def test_a_snapshot(cache, tmp_path, name):
    report = convert.run(name, tmp_path / "prepared.safetensors")
    assert report.description.sources[0]["name"] == "model.safetensors"
    assert h3mlp.load_fc1(tmp_path / "prepared.safetensors", 0).scale.isfinite().all()
    assert cache.is_dir()


@pytest.mark.usefixtures("cache")
def test_its_folders_are_named(tmp_path):
    with pytest.raises(ValueError, match="it holds none; give one of its folders transformer"):
        convert.run("Org/Some-Model.1", tmp_path / "prepared.safetensors")


@pytest.mark.usefixtures("cache")
def test_a_path_goes_first(tmp_path):
    save(checkpoint(), tmp_path / "Org/Some-Model.1/model.safetensors")
    assert hub.find("Org/Some-Model.1").resolve() == tmp_path / "Org/Some-Model.1"


@pytest.mark.usefixtures("cache")
@pytest.mark.parametrize("name", ["Org/Other", "Org/Other/transformer"])
def test_none_of_that_name(name, tmp_path):
    message = rf"{name} is no file or folder here, and Hugging Face's cache in .* has none .*: `hf download Org/Other`"
    with pytest.raises(FileNotFoundError, match=message):
        convert.run(name, tmp_path / "prepared.safetensors")


@pytest.mark.usefixtures("cache")
def test_without_the_library(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "huggingface_hub", None)
    with pytest.raises(FileNotFoundError, match=r"is no file or folder here, and .*pip install huggingface_hub"):
        convert.run("Org/Other", tmp_path / "prepared.safetensors")


@pytest.mark.parametrize(
    "path",
    ["x", "x.safetensors", "models/x.safetensors", "/Org/Name", "./a/b", "a b/c", "../Org/Name", "a/b.json", "a//b/"],
)
def test_what_is_no_name_is_a_path(path, tmp_path, monkeypatch):
    """One that is not there is told as such by whoever opens it."""
    monkeypatch.chdir(tmp_path)
    if path in ("a//b/", "./a/b"):  # pathlib makes names of these
        with pytest.raises(FileNotFoundError, match="is no file or folder here"):
            hub.find(path)
    else:
        with pytest.raises(FileNotFoundError, match="No such file or directory"):
            convert.run(path, tmp_path / "prepared")
