"""A file that is written whole: where a symlink leads, and over nothing but a file."""

import os

import pytest

from h3mlp.files import whole


def write(path, text="new"):
    with whole(path) as partial:
        partial.write_text(text)


def test_it_appears_and_is_replaced(tmp_path):
    for text in ("one", "two"):
        write(tmp_path / "x", text)
        assert (tmp_path / "x").read_text() == text
    assert [path.name for path in tmp_path.iterdir()] == ["x"]


def test_nothing_is_left_of_one_that_fails(tmp_path):
    (tmp_path / "x").write_text("old")
    with pytest.raises(TypeError):
        write(tmp_path / "x", 3)
    assert (tmp_path / "x").read_text() == "old"
    assert [path.name for path in tmp_path.iterdir()] == ["x"]


def test_a_symlink_is_followed(tmp_path):
    (tmp_path / "disk").mkdir()
    (tmp_path / "link").symlink_to("disk/x")
    for text in ("one", "two"):
        write(tmp_path / "link", text)
        assert (tmp_path / "link").is_symlink()
        assert (tmp_path / "disk/x").read_text() == text


@pytest.mark.parametrize("kind", ["pipe", "folder"])
def test_anything_but_a_file_stays(tmp_path, kind):
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "folder").mkdir()
    (tmp_path / "link").symlink_to(kind)
    for name in (kind, "link"):
        with pytest.raises(OSError, match=f"{kind} must be a file; there is something else"):
            write(tmp_path / name)
