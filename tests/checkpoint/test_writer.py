"""Interrupted for real: killed, out of space, changed meanwhile. DST is what it was, and --resume goes on."""

import errno
import json
import os
import shutil
import signal
import subprocess
import sys
import threading
from collections import namedtuple
from concurrent.futures import Future, ThreadPoolExecutor

import filelock
import pytest
import torch
from checkpoints import checkpoint, save, save_sharded

from h3mlp.checkpoint import convert, units
from h3mlp.checkpoint.destination import Destination

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


def partial_folder(destination):
    return Destination.at(destination).partial


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


def test_everything_that_decides_is_compared(tmp_path):
    """A unit's factors, orders and configurations: none may change between an interrupted run and the next."""
    source = save_sharded(checkpoint(), tmp_path / "source")
    (source / "config.json").write_text("{}")
    pair = {"lora_A": torch.ones(4, 256), "lora_B": torch.ones(256, 4)}
    content = {f"blocks.{i}.mlp.fc1.{name}.weight": t.clone() for i in range(2) for name, t in pair.items()}
    lora = save(content, tmp_path / "adapter/adapter_model.safetensors")
    config = lora.with_name("adapter_config.json")
    config.write_text(json.dumps({"r": 4, "lora_alpha": 8}))
    usual = {"gate_order": "gate_up", "loras": [(lora, 0.5, None, None)], "copy_others": True}
    for change in (
        lambda: config.write_text(json.dumps({"r": 4, "lora_alpha": 4})),
        lambda: config.write_text(json.dumps({"r": 4, "lora_alpha": 8, "use_rslora": True})),
        lambda: config.write_text(json.dumps({"r": 4, "lora_alpha": 8, "swiglu_gate_first": False})),
        lambda: (source / "config.json").write_text('{"num_layers": 2}'),
        {"gate_order": "up_gate"},
        {"loras": [(lora, 0.25, None, None)]},
        {"loras": [(lora, 0.5, 3.0, None)]},
        {"loras": [(lora, 0.5, None, "up_gate")]},
        {"loras": []},
        {"copy_others": False},
    ):
        kept = config.read_text(), (source / "config.json").read_text()
        interrupt(source, tmp_path / "prepared", 5, **usual)
        again = usual | (change if isinstance(change, dict) else {})
        if not isinstance(change, dict):
            change()
        with pytest.raises(ValueError, match="--resume needs the same source and options as before"):
            convert.run(source, tmp_path / "prepared", resume=True, **again)
        config.write_text(kept[0])
        (source / "config.json").write_text(kept[1])
    assert convert.run(source, tmp_path / "prepared", resume=True, **usual).resumed == 1


class Failing:
    """Some calls of os.fsync fail, once each, as the kernel tells an error."""

    def __init__(self, monkeypatch, *failing, error=errno.EIO):
        self.failing, self.error, self.calls, self.sync = set(failing), error, 0, os.fsync
        monkeypatch.setattr(os, "fsync", self)

    def __call__(self, descriptor):
        if os.readlink(f"/proc/self/fd/{descriptor}").endswith(".safetensors"):
            self.calls += 1
            if self.calls in self.failing:
                raise OSError(self.error, os.strerror(self.error))
        self.sync(descriptor)


@pytest.mark.skipif(sys.platform != "linux", reason="tells files apart by /proc")
class TestADiskThatLosesPages:
    """fsync fails once and then succeeds, though pages are lost: nothing is published, and what may be lost is written
    again."""

    @pytest.mark.parametrize("failing", range(1, 5))
    @pytest.mark.parametrize("error", [errno.EIO, errno.EDQUOT])
    def test_it_is_not_published(self, source, whole, tmp_path, monkeypatch, failing, error):
        """Every call is waited for, be it of a unit or of the whole."""
        monkeypatch.setattr(ThreadPoolExecutor, "submit", at_once)
        destination = tmp_path / "prepared.safetensors"
        failing_disk = Failing(monkeypatch, failing, error=error)
        with pytest.raises(OSError, match=r"prepared\.safetensors was not kept by the disk") as told:
            convert.run(source, destination)
        assert told.value.errno == error
        assert failing_disk.calls == failing
        assert not destination.exists()
        # The n-th call is the n-th unit's, the last the whole file's: those before it are on the disk.
        assert convert.run(source, destination, resume=True).resumed == min(failing - 1, 3)
        assert destination.read_bytes() == whole

    def test_a_thread_that_is_late(self, source, whole, tmp_path, monkeypatch):
        """A unit that is finished while the failing call is under way is lost, too."""
        destination, hold = tmp_path / "prepared.safetensors", threading.Event()
        failing_disk = Failing(monkeypatch, 1)

        def late(descriptor):
            in_thread = threading.current_thread() is not threading.main_thread()
            assert not in_thread or hold.wait(60)
            (failing_disk if in_thread else failing_disk.sync)(descriptor)

        monkeypatch.setattr(os, "fsync", late)
        steps = iter(range(1, 100))

        def progress(*_):
            if next(steps) == 7:  # in the third unit
                hold.set()

        with pytest.raises(OSError, match="was not kept by the disk"):
            convert.run(source, destination, progress=progress)
        monkeypatch.undo()
        monkeypatch.setattr(units, "STEP_ROWS", 48)
        assert convert.run(source, destination, resume=True).resumed == 0
        assert destination.read_bytes() == whole

    def test_killed_before_anybody_is_told(self, source, whole, tmp_path):
        """The thread itself notes what is lost."""
        destination = tmp_path / "prepared.safetensors"
        failing = """
import threading
fsync, failed = os.fsync, threading.Event()
def fail_once(descriptor):
    if threading.current_thread() is not threading.main_thread() and not failed.is_set():
        failed.set()
        raise OSError(5, "Input/output error")
    fsync(descriptor)
os.fsync = fail_once
killing = progress
def progress(*step):
    if left == 1:
        failed.wait(60)
        while '"lost"' not in next(Path(sys.argv[2]).parent.glob(".*/journal.jsonl")).read_text():
            pass
    killing(*step)
convert.run("""
        script = KILLED.replace("convert.run(", failing)
        command = [sys.executable, "-c", script, str(source), str(destination), "4"]
        assert subprocess.run(command, check=False, timeout=60).returncode == -signal.SIGKILL
        assert convert.run(source, destination, resume=True).resumed == 0
        assert destination.read_bytes() == whole

    def test_a_journal_that_cannot_be_written_either(self, source, whole, tmp_path, monkeypatch):
        """Then nothing is kept: the journal ends after its first line."""
        from h3mlp.checkpoint.scratch import Scratch

        destination, note = tmp_path / "prepared.safetensors", Scratch.note
        monkeypatch.setattr(ThreadPoolExecutor, "submit", at_once)
        Failing(monkeypatch, 3)

        def full(self, line):
            if "lost" in line:
                raise OSError(errno.EIO, "no")
            note(self, line)

        monkeypatch.setattr(Scratch, "note", full)
        with pytest.raises(OSError, match="was not kept by the disk"):
            convert.run(source, destination)
        assert convert.run(source, destination, resume=True).resumed == 0
        assert destination.read_bytes() == whole


def at_once(_executor, function, *arguments):
    """ThreadPoolExecutor.submit without the thread, so that the order of calls is one."""
    future = Future()
    try:
        future.set_result(function(*arguments))
    except OSError as error:
        future.set_exception(error)
    return future


@pytest.mark.parametrize("error", [errno.ENOSYS, errno.EOPNOTSUPP, errno.EINVAL, errno.EPERM])
@pytest.mark.parametrize(
    ("call", "what"),
    [
        ((os, "truncate"), "make a file larger or write in the middle of it"),
        ((os, "replace"), "rename"),
        ((os, "fsync"), "say that a file is on the disk"),
        ((filelock.FileLock, "acquire"), "lock files"),
    ],
)
def test_a_file_system_that_cannot(source, tmp_path, monkeypatch, call, what, error):
    """Object stores mounted as folders and the like: one line with the path, what it cannot do and the way out, before
    any work."""

    def cannot(*_arguments, **_options):
        raise OSError(error, os.strerror(error))

    seen = []
    with monkeypatch.context() as patched:
        patched.setattr(*call, cannot)
        with pytest.raises(
            OSError, match=rf"is on a file system that cannot {what} \(.*\): convert to a local disk"
        ) as told:
            convert.run(source, tmp_path / "prepared.safetensors", progress=lambda *step: seen.append(step))
    assert str(tmp_path / ".prepared.safetensors.partial") in str(told.value)
    assert "\n" not in str(told.value)
    assert not seen
    convert.run(source, tmp_path / "prepared.safetensors")
    assert not partial_folder(tmp_path / "prepared.safetensors").exists()


def test_a_file_system_without_locks_for_an_old_filelock(source, tmp_path, monkeypatch):
    def cannot(*_arguments, **_options):
        raise NotImplementedError("FileSystem does not appear to support flock")

    monkeypatch.setattr(filelock.FileLock, "acquire", cannot)
    with pytest.raises(OSError, match=r"cannot lock files .*flock.*: convert to a local disk"):
        convert.run(source, tmp_path / "prepared.safetensors")


def test_any_other_error_is_told_as_it_is(source, tmp_path, monkeypatch):
    def denied(*_arguments, **_options):
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))

    monkeypatch.setattr(os, "replace", denied)
    with pytest.raises(PermissionError, match="Permission denied"):
        convert.run(source, tmp_path / "prepared.safetensors")


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
