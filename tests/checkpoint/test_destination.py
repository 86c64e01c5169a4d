"""What is at DST and not ours stays, whatever happens, and what was begun is always finished.

The calls that remove, rename or replace are in ``Destination.put`` (the new folder's rename, the replacement of a file,
the removal of a stale one), ``Scratch.clear`` and ``Scratch.release`` (files of the hidden folder, and it itself) and
``scratch._replace`` (the journal). Each has tests here with something that is not ours in its way.
"""

import hashlib
import json
import os
import shutil
from pathlib import Path

import pytest
import torch
from checkpoints import checkpoint, save, save_sharded
from safetensors import safe_open
from safetensors.torch import load_file

from h3mlp.checkpoint import convert, layout
from h3mlp.checkpoint.destination import Destination
from h3mlp.checkpoint.prepared import open_prepared


@pytest.fixture
def source(tmp_path):
    return save(checkpoint(), tmp_path / "source/source.safetensors")


@pytest.fixture
def shards(monkeypatch):
    """Two files: two layers in the first."""
    monkeypatch.setattr(layout, "SHARD_BYTES", 150_000)


def content(folder: Path) -> dict[str, bytes | str]:
    """All that is below a folder, links as what they point to."""
    return {
        str(path.relative_to(folder)): os.readlink(path) if path.is_symlink() else path.read_bytes()
        for path in folder.rglob("*")
        if path.is_symlink() or path.is_file()
    }


def scale_of(path: Path) -> torch.Tensor:
    return open_prepared(path).fc1(open_prepared(path).layers[0]).scale.clone()


def refused(source, destination, message, root, **options):
    """Nothing at all changes below the root, and no work was done."""
    before = content(root)
    seen = []
    with pytest.raises(ValueError, match=message) as refusal:
        convert.run(source, destination, progress=lambda *step: seen.append(step), **options)
    assert "\n" not in str(refusal.value)
    assert content(root) == before
    assert not seen
    assert not list(root.rglob(".*partial*"))


class TestFolder:
    """As cp: files are put into it, and what is there stays."""

    @pytest.fixture
    def models(self, tmp_path):
        """A folder as people have it."""
        folder = tmp_path / "models"
        folder.mkdir()
        (folder / "notes.txt").write_text("mine")
        (folder / "old.pth").write_bytes(b"pickle")
        (folder / "sub").mkdir()
        (folder / "sub/vae.safetensors").write_bytes(b"deep")
        return folder

    def test_it_keeps_what_is_in_it(self, source, models):
        before = content(models)
        convert.run(source, models)
        after = content(models)
        assert after.keys() == {*before, "model.safetensors"}
        assert before.items() <= after.items()
        assert list(open_prepared(models).layers)

    def test_a_prepared_file_beside_a_vae(self, source, models):
        """The folder that was once replaced whole: with one prepared file of another name."""
        convert.run(source, models / "h3.safetensors")
        save({"decoder.weight": torch.zeros(2)}, models / "vae.safetensors")
        message = r"must not hold h3\.safetensors, which is not of an earlier .* or a file there: .*NAME\.safetensors"
        refused(source, models, message, models)

    def test_a_file_with_such_a_name_in_it(self, source, models):
        mine = save({"blocks.0.fc1_swiglu.weight": torch.zeros(2)}, models / "model.safetensors")
        refused(source, models, r"model\.safetensors must be new or of an earlier h3mlp convert", models)
        refused(source, mine, r"model\.safetensors must be new or of an earlier h3mlp convert", models)

    def test_metadata_of_that_key(self, source, models):
        mine = save({"w": torch.zeros(2)}, models / "model.safetensors", h3mlp="my notes")
        refused(source, models, "must be new or of an earlier", models)
        refused(source, mine, "must be new or of an earlier", models)

    def test_a_folder_of_ours_with_a_readme(self, source, models):
        convert.run(source, models)
        (models / "README.md").write_text("how to use it")
        other = save(checkpoint(seed=1), source.parent / "other.safetensors")
        before = scale_of(models)
        convert.run(other, models)
        assert (models / "README.md").read_text() == "how to use it"
        assert (models / "notes.txt").read_text() == "mine"
        assert not torch.equal(scale_of(models), before)

    @pytest.mark.parametrize(("first", "second"), [(150_000, 10**9), (10**9, 150_000), (100_000, 150_000)])
    def test_another_number_of_files(self, source, models, monkeypatch, first, second):
        """Stale files and a stale index of the earlier conversion go, named by its index, and nothing else."""
        monkeypatch.setattr(layout, "SHARD_BYTES", first)
        convert.run(source, models)
        earlier = {name for name in content(models) if name.startswith("model")}
        monkeypatch.setattr(layout, "SHARD_BYTES", second)
        convert.run(save(checkpoint(seed=1), source.parent / "other.safetensors"), models)
        want = source.parent / "want"
        convert.run(source.parent / "other.safetensors", want)
        assert {name: data for name, data in content(models).items() if name.startswith("model")} == content(want)
        assert not (earlier - content(want).keys()) & content(models).keys()
        assert (models / "notes.txt").read_text() == "mine"

    @pytest.mark.usefixtures("shards")
    def test_a_file_of_the_set_that_somebody_replaced(self, source, models):
        convert.run(source, models)
        save({"w": torch.zeros(2)}, models / "model-00002-of-00002.safetensors")
        refused(source, models, r"model-00002-of-00002\.safetensors must be new or of an earlier", models)

    @pytest.mark.usefixtures("shards")
    def test_an_index_of_somebody_else(self, source, models):
        (models / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": {}}))
        refused(source, models, r"model\.safetensors\.index\.json must be new or of an earlier", models)

    def test_an_index_of_another_name(self, source, models):
        (models / "diffusion_pytorch_model.safetensors.index.json").write_text("{}")
        refused(source, models, r"must not hold diffusion_pytorch_model\.safetensors\.index\.json", models)

    @pytest.mark.usefixtures("shards")
    @pytest.mark.parametrize("weight_map", [None, [], {"x": 3}, {"x": None}])
    def test_a_damaged_index(self, source, models, weight_map):
        convert.run(source, models)
        index = json.loads((models / "model.safetensors.index.json").read_text())
        (models / "model.safetensors.index.json").write_text(json.dumps(index | {"weight_map": weight_map}))
        refused(source, models, r"model-00001-of-00002\.safetensors must be new or of an earlier", models)

    def test_metadata_that_name_files_elsewhere(self, source, models):
        """As somebody might write them, to have a file removed."""
        outside = models.parent / "outside.json"
        outside.write_text("mine")
        convert.run(source, models)
        with safe_open(models / "model.safetensors", "pt") as file:
            content = json.loads(file.metadata()["h3mlp"])
        content["beside"] = {"../outside.json": hashlib.sha256(b"mine").hexdigest()}
        save(load_file(models / "model.safetensors"), models / "model.safetensors", h3mlp=json.dumps(content))
        convert.run(source, models)
        assert outside.read_text() == "mine"

    @pytest.mark.usefixtures("shards")
    def test_an_index_that_names_files_elsewhere(self, source, models):
        """Only the names in the folder itself are the earlier conversion's."""
        convert.run(source, models)
        outside = models.parent / "outside.safetensors"
        shutil.copy(models / "model-00001-of-00002.safetensors", outside)
        index = json.loads((models / "model.safetensors.index.json").read_text())
        index["weight_map"]["x"] = "../outside.safetensors"
        (models / "model.safetensors.index.json").write_text(json.dumps(index))
        convert.run(source, models)
        assert outside.exists()

    @pytest.mark.parametrize("to", ["elsewhere.safetensors", "nowhere.safetensors"])
    def test_a_symlink_in_it(self, source, models, to):
        """As in Hugging Face's cache: neither it nor what it leads to is touched."""
        convert.run(source, models.parent / "elsewhere.safetensors")
        (models / "model.safetensors").symlink_to(models.parent / to)
        refused(source, models, r"model\.safetensors must be new .*; what is there is a symlink", models)

    def test_a_folder_where_a_file_should_be(self, source, models):
        (models / "model.safetensors").mkdir()
        refused(source, models, r"model\.safetensors must be new or of an earlier", models)


class TestConfig:
    """config.json, copied with --all, has no metadata: it is ours if it is as it was copied."""

    @pytest.fixture
    def sharded(self, tmp_path):
        folder = save_sharded(checkpoint(), tmp_path / "sharded")
        (folder / "config.json").write_text('{"num_layers": 2}')
        return folder

    def test_it_is_replaced_where_it_is_ours(self, sharded, tmp_path):
        convert.run(sharded, tmp_path / "models", copy_others=True)
        (sharded / "config.json").write_text('{"num_layers": 2, "more": 1}')
        convert.run(sharded, tmp_path / "models", copy_others=True)
        assert (tmp_path / "models/config.json").read_bytes() == (sharded / "config.json").read_bytes()

    def test_it_goes_where_it_is_ours(self, sharded, tmp_path):
        convert.run(sharded, tmp_path / "models", copy_others=True)
        convert.run(sharded, tmp_path / "models")
        assert list(content(tmp_path / "models")) == ["model.safetensors"]

    def test_one_that_was_changed_stays(self, sharded, tmp_path):
        models = tmp_path / "models"
        convert.run(sharded, models, copy_others=True)
        (models / "config.json").write_text('{"num_layers": 2, "mine": 1}')
        refused(sharded, models, r"config\.json must be new or of an earlier", models, copy_others=True)
        convert.run(sharded, models)
        assert (models / "config.json").read_text() == '{"num_layers": 2, "mine": 1}'

    def test_a_symlink_to_the_same_stays(self, sharded, tmp_path):
        models = tmp_path / "models"
        convert.run(sharded, models, copy_others=True)
        (models / "config.json").unlink()
        (models / "config.json").symlink_to(sharded / "config.json")
        message = r"config\.json must be new .*; what is there is a symlink"
        refused(sharded, models, message, tmp_path, copy_others=True)
        convert.run(sharded, models)
        assert (models / "config.json").is_symlink()

    def test_somebody_elses_stays(self, sharded, tmp_path):
        models = tmp_path / "models"
        models.mkdir()
        (models / "config.json").write_text("{}")
        refused(sharded, models, r"config\.json must be new or of an earlier", models, copy_others=True)
        shutil.copy(sharded / "config.json", models)
        convert.run(sharded, models, copy_others=True)


class TestSymlinks:
    def test_the_source_behind_one(self, source, tmp_path):
        (tmp_path / "link").symlink_to(tmp_path)
        for destination in ("link/source", "source", "link/source/source.safetensors", "link/link/source"):
            message = "must be another file or folder than the source"
            refused(tmp_path / "link/source/source.safetensors", tmp_path / destination, message, tmp_path)
            refused(source, tmp_path / destination, message, tmp_path)

    def test_a_source_that_is_one(self, source, tmp_path):
        """As in Hugging Face's cache: neither its own folder nor that of the file is a destination."""
        (tmp_path / "snapshot").mkdir()
        link = tmp_path / "snapshot/model.safetensors"
        link.symlink_to(source)
        for destination in ("snapshot", "source", "snapshot/model.safetensors"):
            message = "must be another file or folder than the source"
            refused(link, tmp_path / destination, message, tmp_path)

    def test_a_file_is_written_where_it_leads(self, source, tmp_path):
        (tmp_path / "disk").mkdir()
        (tmp_path / "out.safetensors").symlink_to("disk/h3.safetensors")
        for _ in range(2):
            convert.run(source, tmp_path / "out.safetensors")
            assert (tmp_path / "out.safetensors").is_symlink()
            assert list(content(tmp_path / "disk")) == ["h3.safetensors"]

    def test_a_folder_is_written_where_it_leads(self, source, tmp_path):
        (tmp_path / "disk").mkdir()
        (tmp_path / "out").symlink_to("disk")
        convert.run(source, tmp_path / "out")
        assert (tmp_path / "out").is_symlink()
        assert list(content(tmp_path / "disk")) == ["model.safetensors"]

    def test_one_to_itself(self, source, tmp_path):
        (tmp_path / "loop.safetensors").symlink_to("loop.safetensors")
        refused(source, tmp_path / "loop.safetensors", "it is a symlink to itself", tmp_path)


class TestKinds:
    """A destination of the wrong kind is refused before any work."""

    def test_a_folder_that_is_named_like_a_file(self, source, tmp_path):
        (tmp_path / "x.safetensors").mkdir()
        message = r"must be a file, since it ends in \.safetensors; what is there is a folder"
        refused(source, tmp_path / "x.safetensors", message, tmp_path)

    def test_a_file_where_a_folder_should_be(self, source, tmp_path):
        (tmp_path / "notes.txt").write_text("mine")
        refused(source, tmp_path / "notes.txt", r"must be a folder, or end in \.safetensors; .* is a file", tmp_path)

    def test_a_pipe(self, source, tmp_path):
        os.mkfifo(tmp_path / "pipe.safetensors")
        refused(source, tmp_path / "pipe.safetensors", "is neither file nor folder", tmp_path)

    def test_the_current_folder(self, source, tmp_path, monkeypatch):
        """Also where the folder above, which may be another disk, cannot be written."""
        (tmp_path / "here").mkdir()
        monkeypatch.chdir(tmp_path / "here")
        made = []
        convert.run(source, Path(), progress=lambda *_: made.extend(path.name for path in Path().iterdir()))
        assert set(made) == {".model.partial"}
        assert [path.name for path in Path().iterdir()] == ["model.safetensors"]

    def test_a_hidden_folder_of_somebody_else(self, source, tmp_path):
        """Where the unfinished checkpoint would lie."""
        for name, there in ((".h3.safetensors.partial", "mine.txt"), (".models.partial", "files/mine.txt")):
            file = tmp_path / name / there
            file.parent.mkdir(parents=True)
            file.write_text("mine")
            destination = tmp_path / name.removeprefix(".").removesuffix(".partial")
            before = content(tmp_path)
            for resume in (False, True):
                with pytest.raises(ValueError, match=r"there is something else in it, .*: move it away first"):
                    convert.run(source, destination, resume=resume)
                assert content(tmp_path) == before

    def test_something_in_the_hidden_folder(self, source, tmp_path):
        """What somebody put among the unfinished files is still there when they are done."""
        destination = tmp_path / "models"
        with pytest.raises(KeyboardInterrupt):
            convert.run(source, destination, progress=interrupt)
        mine = tmp_path / ".models.partial/files/mine.txt"
        mine.write_text("mine")
        convert.run(source, tmp_path / "models")
        assert mine.exists() or (destination / "mine.txt").exists()


def interrupt(*_):
    raise KeyboardInterrupt


class Killed(BaseException):
    """No handler runs that a killed process would not have run: every call after it is refused as well."""


class Mortal:
    """Dies at the n-th call that changes a name, before or after that is done."""

    CALLS = ((os, "replace"), (os, "rename"), (Path, "unlink"), (Path, "rmdir"), (Path, "mkdir"))

    def __init__(self, monkeypatch):
        self.left, self.dead, self.after = -1, False, False
        for owner, name in self.CALLS:
            monkeypatch.setattr(owner, name, self._wrapped(getattr(owner, name)))

    def _wrapped(self, call):
        def wrapper(*args, **options):
            self.left -= 1
            self.dead = self.dead or self.left == 0
            try:
                return None if self.dead and not self.after else call(*args, **options)
            finally:
                if self.dead:
                    self.after = False  # the next call does nothing
                    raise Killed

        return wrapper

    def run(self, left, after, *arguments, **options) -> bool:
        """Whether the conversion was killed."""
        self.left, self.after, self.dead = left, after, False
        try:
            convert.run(*arguments, **options)
        except Killed:
            return True
        finally:
            self.left, self.dead = -1, False
        return False


@pytest.mark.parametrize("resume", [False, True])
@pytest.mark.parametrize("earlier", [False, True])
@pytest.mark.parametrize("kind", ["file", "folder"])
def test_killed_at_any_change_of_a_name(source, tmp_path, monkeypatch, kind, earlier, resume):
    """Whenever that is: what can be opened at DST is one conversion, the earlier or the new; what is not ours is there;
    and the next run ends with what an undisturbed one would have made, and without a trace."""
    other = save(checkpoint(seed=1), tmp_path / "source/other.safetensors")
    name = "h3.safetensors" if kind == "file" else "h3"
    monkeypatch.setattr(layout, "SHARD_BYTES", 150_000)
    want_path = tmp_path / ("want" if kind == "folder" else "want.safetensors")
    convert.run(source, want_path)
    want = content(want_path) if kind == "folder" else {name: want_path.read_bytes()}
    before = tmp_path / "before"
    (before / "h3" if kind == "folder" else before).mkdir(parents=True)
    if earlier:
        monkeypatch.setattr(layout, "SHARD_BYTES", 100_000)  # three files
        convert.run(other, before / name)
        (before / "h3/README.md" if kind == "folder" else before / "README.md").write_text("mine")
        monkeypatch.setattr(layout, "SHARD_BYTES", 150_000)
    elif kind == "folder":
        (before / "h3").rmdir()
    scales = [scale_of(path) for path in ([before / name] if earlier else []) + [want_path]]
    (before / "notes.txt").write_text("mine")
    mortal = Mortal(monkeypatch)
    for after in (False, True):
        for left in range(1, 100):
            root = tmp_path / f"{after}-{left}"
            shutil.copytree(before, root)
            folder = root / name if kind == "folder" else root
            killed = mortal.run(left, after, source, root / name)
            try:
                found = scale_of(root / name)
            except (ValueError, OSError):
                assert kind == "folder" or not earlier, "a file is always whole"
            else:
                assert any(torch.equal(found, one) for one in scales)
            report = convert.run(source, root / name, resume=resume)
            assert report.files
            got = content(folder)
            assert {name: data for name, data in got.items() if not name.endswith((".txt", ".md"))} == want
            assert (root / "notes.txt").read_text() == "mine"
            assert not earlier or (folder / "README.md").read_text() == "mine"
            assert not list(root.rglob(".*"))
            shutil.rmtree(root)
            if not killed:
                break
        assert left > 5


def test_something_appears_while_it_is_made(source, tmp_path):
    """Looked for again before each file is put there. What was made is kept, and comes when the way is free."""
    (tmp_path / "models").mkdir()
    mine = tmp_path / "models/model.safetensors"

    def appear(*_):
        if not mine.exists():
            save({"w": torch.zeros(2)}, mine)

    with pytest.raises(ValueError, match=r"model\.safetensors must be new or of an earlier"):
        convert.run(source, tmp_path / "models", progress=appear)
    assert list(load_file(mine)) == ["w"]
    with pytest.raises(ValueError, match=r"model\.safetensors must be new or of an earlier"):
        convert.run(source, tmp_path / "models", resume=True)
    mine.rename(tmp_path / "mine.safetensors")
    seen = []
    report = convert.run(source, tmp_path / "models", resume=True, progress=lambda step, *_: seen.append(step))
    assert (report.resumed, seen) == (3, ["checksums"])
    assert [path.name for path in (tmp_path / "models").iterdir()] == ["model.safetensors"]


@pytest.mark.usefixtures("shards")
def test_a_stale_file_that_somebody_replaces_meanwhile(source, tmp_path, monkeypatch):
    """It would have been removed with the earlier conversion; now it stays."""
    convert.run(source, tmp_path / "models")
    monkeypatch.setattr(layout, "SHARD_BYTES", 10**9)
    mine = tmp_path / "models/model-00002-of-00002.safetensors"

    def replace(*_):
        save({"w": torch.zeros(2)}, mine)

    convert.run(source, tmp_path / "models", progress=replace)
    assert list(load_file(mine)) == ["w"]
    files = {"model.safetensors", "model-00002-of-00002.safetensors"}
    assert {path.name for path in (tmp_path / "models").iterdir()} == files


@pytest.mark.usefixtures("shards")
def test_files_of_two_conversions_are_not_opened(source, tmp_path):
    """As they are for a moment while files are replaced, and forever if somebody copies them so."""
    other = save(checkpoint(seed=1), tmp_path / "source/other.safetensors")
    convert.run(source, tmp_path / "a")
    convert.run(other, tmp_path / "b")
    shutil.copy(tmp_path / "b/model-00002-of-00002.safetensors", tmp_path / "a")
    with pytest.raises(ValueError, match="must be of one conversion; its files are of 2: convert again"):
        open_prepared(tmp_path / "a")


def test_where_the_unfinished_lies(tmp_path):
    """On the same disk, so that it can be renamed: an existing folder may be another one than the folder above."""
    (tmp_path / "there").mkdir()
    partial = {name: Destination.at(tmp_path / name).partial for name in ("new", "there", "x.safetensors")}
    assert partial == {
        "new": tmp_path / ".new.partial",
        "there": tmp_path / "there/.model.partial",
        "x.safetensors": tmp_path / ".x.safetensors.partial",
    }
    assert Destination.at(Path("/")).partial == Path("/.model.partial")
