"""Interrupted for real: killed, out of space, changed meanwhile. DST is what it was, and --resume goes on."""

import errno
import os
import shutil
import signal
import subprocess
import sys
from collections import namedtuple

import filelock
import pytest
from checkpoints import checkpoint, save

from h3mlp.checkpoint import convert, units
from h3mlp.checkpoint.writer import partial_folder

STEPS = 9
"""Three layers in three steps of 48 rows at most."""

KILLED = """
import os, signal, sys
from pathlib import Path
from h3mlp.checkpoint import convert, units
units.STEP_ROWS = 48
left = int(sys.argv[3])
def progress(*_):
    global left
    left -= 1
    if not left:
        os.kill(os.getpid(), signal.SIGKILL)
convert.run(Path(sys.argv[1]), Path(sys.argv[2]), resume="--resume" in sys.argv, progress=progress)
"""


@pytest.fixture(autouse=True)
def small_steps(monkeypatch):
    monkeypatch.setattr(units, "STEP_ROWS", 48)


@pytest.fixture
def source(tmp_path):
    return save(checkpoint(), tmp_path / "source.safetensors")


@pytest.fixture
def whole(source, tmp_path):
    """What an undisturbed run writes."""
    convert.run(source, tmp_path / "whole.safetensors")
    return (tmp_path / "whole.safetensors").read_bytes()


def kill(source, destination, after, *arguments):
    command = [sys.executable, "-c", KILLED, str(source), str(destination), str(after), *arguments]
    assert subprocess.run(command, check=False, timeout=120).returncode == -signal.SIGKILL


class Stopped(Exception):
    pass


def stopping(after, error=Stopped):
    steps = iter(range(1, after + 1))

    def progress(*_):
        if next(steps) == after:
            raise error

    return progress


def interrupt(source, destination, after, error=Stopped, **options):
    with pytest.raises(error):
        convert.run(source, destination, progress=stopping(after, error), **options)


class TestKilled:
    def test_and_resumed(self, source, whole, tmp_path):
        """Killed twice, in different layers; what is finished is not read again."""
        destination = tmp_path / "prepared.safetensors"
        kill(source, destination, 4)
        assert not destination.exists()
        kill(source, destination, 5, "--resume")
        assert not destination.exists()
        report = convert.run(source, destination, resume=True)
        assert report.resumed == 2
        assert report.bytes_read == 256 * 256 * 2
        assert destination.read_bytes() == whole
        assert not partial_folder(destination).exists()

    def test_and_begun_anew(self, source, whole, tmp_path):
        destination = tmp_path / "prepared.safetensors"
        kill(source, destination, 7)
        assert convert.run(source, destination).resumed == 0
        assert destination.read_bytes() == whole

    def test_what_was_there_stays(self, source, tmp_path):
        destination = tmp_path / "prepared.safetensors"
        convert.run(save(checkpoint(seed=1), tmp_path / "earlier.safetensors"), destination)
        before = destination.read_bytes()
        kill(source, destination, STEPS)
        assert destination.read_bytes() == before


@pytest.mark.parametrize("destination", ["prepared.safetensors", "prepared"])
@pytest.mark.parametrize("after", range(1, STEPS + 2))
def test_interrupted_anywhere(source, whole, tmp_path, after, destination):
    """In every step of every layer, and in the checksums."""
    destination = tmp_path / destination
    interrupt(source, destination, after)
    assert not destination.exists()
    report = convert.run(source, destination, resume=True)
    assert report.resumed == (after - 1) // 3
    file = destination if destination.is_file() else destination / "model.safetensors"
    assert file.read_bytes() == whole


class TestResumed:
    def test_by_ctrl_c(self, source, whole, tmp_path):
        destination = tmp_path / "prepared.safetensors"
        interrupt(source, destination, 5, KeyboardInterrupt)
        assert convert.run(source, destination, resume=True).resumed == 1
        assert destination.read_bytes() == whole

    def test_with_copies(self, source, tmp_path):
        want, destination = tmp_path / "want.safetensors", tmp_path / "prepared.safetensors"
        convert.run(source, want, copy_others=True)
        interrupt(source, destination, STEPS + 3, copy_others=True)
        assert convert.run(source, destination, copy_others=True, resume=True).resumed == 5
        assert destination.read_bytes() == want.read_bytes()

    def test_nothing_was_begun(self, source, whole, tmp_path):
        assert convert.run(source, tmp_path / "prepared.safetensors", resume=True).resumed == 0
        assert (tmp_path / "prepared.safetensors").read_bytes() == whole

    @pytest.mark.parametrize("change", ["source", "option"])
    def test_something_else_was_begun(self, source, tmp_path, change):
        destination = tmp_path / "prepared.safetensors"
        interrupt(source, destination, 5)
        if change == "source":
            save(checkpoint(seed=1), source)
        options = {"copy_others": True} if change == "option" else {}
        with pytest.raises(ValueError, match="--resume needs the same source and options as before"):
            convert.run(source, destination, resume=True, **options)
        assert partial_folder(destination).exists()

    def test_a_flipped_byte_is_written_again(self, source, whole, tmp_path):
        destination = tmp_path / "prepared.safetensors"
        interrupt(source, destination, 8)
        partial = partial_folder(destination) / "files" / destination.name
        content = bytearray(partial.read_bytes())
        place = content.index(whole[-1000:-990]) if whole[-1000:-990] in content else len(content) // 2
        content[place] ^= 0x40
        partial.write_bytes(content)
        convert.run(source, destination, resume=True)
        assert destination.read_bytes() == whole

    def test_a_cut_off_journal(self, source, whole, tmp_path):
        destination = tmp_path / "prepared.safetensors"
        interrupt(source, destination, 8)
        journal = partial_folder(destination) / "journal.jsonl"
        journal.write_bytes(journal.read_bytes()[:-20])
        assert convert.run(source, destination, resume=True).resumed == 1
        assert destination.read_bytes() == whole

    def test_a_cut_off_file(self, source, whole, tmp_path):
        destination = tmp_path / "prepared.safetensors"
        interrupt(source, destination, 8)
        os.truncate(partial_folder(destination) / "files" / destination.name, 5000)
        assert convert.run(source, destination, resume=True).resumed == 0
        assert destination.read_bytes() == whole


def test_killed_between_the_renames_of_a_folder(source, tmp_path):
    """The folder that was there is put back by the next run, whatever becomes of that one."""
    destination = tmp_path / "prepared"
    convert.run(save(checkpoint(seed=1), tmp_path / "earlier.safetensors"), destination)
    before = (destination / "model.safetensors").read_bytes()
    partial_folder(destination).mkdir()
    destination.rename(partial_folder(destination) / "old")
    interrupt(source, destination, 1)
    assert (destination / "model.safetensors").read_bytes() == before


def test_the_source_changes_meanwhile(source, tmp_path):
    def touch(*_):
        os.utime(source, (1, 1))

    with pytest.raises(ValueError, match="must not change while it is read; it did"):
        convert.run(source, tmp_path / "prepared.safetensors", progress=touch)
    assert [path.name for path in tmp_path.iterdir()] == ["source.safetensors"]


def test_the_source_is_cut_off_meanwhile(source, tmp_path):
    def cut(*_):
        os.truncate(source, 5000)

    with pytest.raises(ValueError, match="it was changed or cut off"):
        convert.run(source, tmp_path / "prepared.safetensors", progress=cut)
    assert [path.name for path in tmp_path.iterdir()] == ["source.safetensors"]


def test_two_at_once(source, tmp_path):
    destination = tmp_path / "prepared.safetensors"
    partial_folder(destination).mkdir()
    with (
        filelock.FileLock(partial_folder(destination) / "lock"),
        pytest.raises(ValueError, match="must not be written by two at once"),
    ):
        convert.run(source, destination)
    assert not destination.exists()


class TestFullDisk:
    @pytest.fixture
    def disk(self, tmp_path):
        """256 KiB; the checkpoint takes 200,000 bytes."""
        folder = tmp_path / "disk"
        folder.mkdir()
        mount = ["mount", "-t", "tmpfs", "-o", "size=256k", "tmpfs", str(folder)]
        if not shutil.which("mount") or subprocess.run(mount, capture_output=True, check=False).returncode:
            pytest.skip("mounting a small disk needs root")
        yield folder
        subprocess.run(["umount", str(folder)], check=True)

    def test_it_is_known_before(self, source, disk):
        (disk / "other").write_bytes(bytes(150_000))
        with pytest.raises(
            OSError, match=r"prepared\.safetensors needs 2[0-9,]+ bytes; 1[0-9,]+ are free on that disk"
        ):
            convert.run(source, disk / "prepared.safetensors")
        assert [path.name for path in disk.iterdir()] == ["other"]

    def test_it_fills_up_meanwhile(self, source, whole, disk, monkeypatch):
        (disk / "other").write_bytes(bytes(150_000))
        plenty = namedtuple("Usage", "free")(10**9)
        monkeypatch.setattr(shutil, "disk_usage", lambda _: plenty)
        destination = disk / "prepared.safetensors"
        with pytest.raises(OSError, match="No space left") as full:
            convert.run(source, destination)
        assert full.value.errno == errno.ENOSPC
        assert not destination.exists()
        (disk / "other").unlink()
        assert convert.run(source, destination, resume=True).resumed >= 1
        assert destination.read_bytes() == whole
