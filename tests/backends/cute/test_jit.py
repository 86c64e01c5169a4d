"""Compile, cache and inspect, on a kernel of 0.03 s. No GPU is needed; that the result is right is tests/gpu's job."""

import errno
import logging
import os
import subprocess
import sys
import threading
from pathlib import Path

import pytest
import torch

from h3mlp.backends.cute import jit, sass

pytest.importorskip("cutlass", reason="the CuTe DSL is not installed")

from backends.cute.tiny_kernel import Tiny

TESTS = Path(__file__).parents[2]
ARCH = "sm_90a"
LOAD_TINY = f"from backends.cute.tiny_kernel import Tiny; assert callable(jit.load(Tiny(), {ARCH!r}))"


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch) -> Path:
    """An empty cache on disk and in memory. That somebody edits the sources meanwhile plays no part."""
    folder = tmp_path / "cache"
    monkeypatch.setenv("H3MLP_CACHE_DIR", str(folder))
    monkeypatch.setattr(jit, "_loaded", {})
    monkeypatch.setattr(jit, "_sources", lambda: jit.SOURCES)
    return folder


@pytest.fixture
def compiles(monkeypatch) -> list[str]:
    """The names of the kernels that were compiled."""
    names = []
    compile_kernel = jit._compile

    def counted(kernel, *arguments):
        names.append(kernel.name)
        return compile_kernel(kernel, *arguments)

    monkeypatch.setattr(jit, "_compile", counted)
    return names


def start(code: str) -> subprocess.Popen:
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(TESTS), *filter(None, sys.path)])}
    command = [sys.executable, "-c", f"from h3mlp.backends.cute import jit\n{code}"]
    return subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)


def finish(process: subprocess.Popen) -> None:
    output, _ = process.communicate(timeout=120)
    assert process.returncode == 0, output


def forget(monkeypatch) -> None:
    monkeypatch.setattr(jit, "_loaded", {})


def test_a_kernel_is_compiled_once(compiles):
    function = jit.load(Tiny(), ARCH)
    assert callable(function)
    assert jit.load(Tiny(), ARCH) is function
    assert jit.load(Tiny(64), ARCH) is not function
    assert compiles == ["tiny_128", "tiny_64"]


def test_threads_get_one_compile(compiles):
    barrier = threading.Barrier(6)
    functions = []

    def ask():
        barrier.wait()
        functions.append(jit.load(Tiny(), ARCH))

    threads = [threading.Thread(target=ask) for _ in range(barrier.parties)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(functions) == barrier.parties
    assert len(set(map(id, functions))) == 1
    assert len(compiles) == 1


def test_a_new_process_loads_from_disk(folder):
    jit.load(Tiny(), ARCH)
    assert list(folder.iterdir()) == [jit.object_file(Tiny(), ARCH)]
    finish(start(f"jit._compile = None\n{LOAD_TINY}"))


def test_two_processes_with_a_cold_cache(folder):
    processes = [start(LOAD_TINY) for _ in range(2)]
    for process in processes:
        finish(process)
    assert list(folder.iterdir()) == [jit.object_file(Tiny(), ARCH)], "one file, and nothing left over"
    assert jit._from_disk(jit.object_file(Tiny(), ARCH)) is not None


def test_a_full_disk_leaves_nothing_behind(folder, monkeypatch):
    export = jit._export
    drafts = []

    def fill_disk_once(compiled, file):
        export(compiled, file)
        drafts.append(file)
        if len(drafts) == 1:
            file.write_bytes(file.read_bytes()[:100])
            raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(jit, "_export", fill_disk_once)
    assert callable(jit.load(Tiny(), ARCH))
    assert drafts[0].is_relative_to(folder), "the draft is on the file system of the file, so that it can be renamed"
    assert list(folder.iterdir()) == []
    assert not any(draft.exists() for draft in drafts)


@pytest.mark.parametrize(
    "damage",
    [
        lambda content: content[:1000] + bytes([content[1000] ^ 1]) + content[1001:],
        lambda content: content[: len(content) // 2],
        lambda content: content[:-1],
        lambda content: content[:0],
        lambda content: bytes(len(content)),
    ],
    ids=["one bit", "half", "one byte short", "empty", "zeros"],
)
def test_a_damaged_file_is_rebuilt_and_never_linked(damage, compiles, monkeypatch, caplog):
    jit.load(Tiny(), ARCH)
    file = jit.object_file(Tiny(), ARCH)
    good = file.read_bytes()
    file.write_bytes(damage(good))
    forget(monkeypatch)
    linked = []
    link = jit._link
    monkeypatch.setattr(jit, "_link", lambda path: linked.append(path.read_bytes()) or link(path))
    assert callable(jit.load(Tiny(), ARCH))
    assert len(compiles) == 2
    assert linked == [good]
    assert file.read_bytes() == good
    assert "is damaged and is built anew" in caplog.text


def test_an_intact_file_that_does_not_link_is_rebuilt(compiles, monkeypatch):
    jit.load(Tiny(), ARCH)
    forget(monkeypatch)
    failures = [RuntimeError("symbol not found")]
    link = jit._link

    def fail_once(path):
        if failures:
            raise failures.pop()
        return link(path)

    monkeypatch.setattr(jit, "_link", fail_once)
    assert callable(jit.load(Tiny(), ARCH))
    assert len(compiles) == 2


@pytest.mark.parametrize("place", ["a file", "below a file", "/proc/h3mlp"])
def test_a_folder_that_cannot_be_written_costs_only_time(place, tmp_path, compiles, monkeypatch, caplog):
    caplog.set_level(logging.INFO, logger="h3mlp")
    (tmp_path / "a file").write_text("not a folder")
    folder = {"a file": tmp_path / "a file", "below a file": tmp_path / "a file" / "cache"}.get(place, Path(place))
    monkeypatch.setenv("H3MLP_CACHE_DIR", str(folder))
    assert callable(jit.load(Tiny(), ARCH))
    forget(monkeypatch)
    assert callable(jit.load(Tiny(), ARCH))
    assert len(compiles) == 2
    assert "kernel tiny_128 is not kept on disk" in caplog.text
    assert all(record.levelno == logging.INFO for record in caplog.records)


def test_a_kernel_of_edited_sources_is_not_kept(folder, monkeypatch, caplog):
    """Its file would bear the hash of the sources as imported, and hold who knows which."""
    caplog.set_level(logging.INFO, logger="h3mlp")
    monkeypatch.setattr(jit, "_sources", lambda: "edited")
    assert callable(jit.load(Tiny(), ARCH))
    assert not folder.exists()
    assert "not kept on disk: the sources were edited" in caplog.text


def test_the_key_holds_all_that_decides(monkeypatch):
    files = [jit.object_file(Tiny(), ARCH)]
    assert jit.object_file(Tiny(), ARCH) == files[0]
    files.append(jit.object_file(Tiny(), "sm_120a"))
    files.append(jit.object_file(Tiny(64), ARCH))
    files.append(jit.object_file(Tiny(add=1), ARCH))  # equal to Tiny(add=1.0), but compiled as an integer
    files.append(jit.object_file(Tiny(registers=2), ARCH))
    monkeypatch.setenv("CUTE_DSL_LINEINFO", "1")
    files.append(jit.object_file(Tiny(), ARCH))
    monkeypatch.delenv("CUTE_DSL_LINEINFO")
    versions = {"cute_dsl": "9.9", "cute_dsl_cuda": "cu99", "tvm_ffi": "9.9"}
    changes = {"__version__": "9.9", "SOURCES": "", "_cpu_features": lambda: "", "versions": lambda: versions}
    for name, value in changes.items():
        with monkeypatch.context() as changed:
            changed.setattr(jit, name, value)
            jit._toolchain.cache_clear()
            files.append(jit.object_file(Tiny(), ARCH))
    jit._toolchain.cache_clear()
    assert len(set(files)) == len(files) == 10
    assert jit.object_file(Tiny(), ARCH) == files[0]
    assert files[0].name.startswith("tiny_128-sm_90a-")


@pytest.mark.parametrize(
    ("environment", "expected"),
    [
        ({"H3MLP_CACHE_DIR": "/a", "XDG_CACHE_HOME": "/b"}, "/a"),
        ({"H3MLP_CACHE_DIR": "~/a"}, "/home/someone/a"),
        ({"XDG_CACHE_HOME": "/b"}, "/b/h3mlp"),
        ({}, "/home/someone/.cache/h3mlp"),
    ],
)
def test_cache_folder(environment, expected, monkeypatch):
    for name in ("H3MLP_CACHE_DIR", "XDG_CACHE_HOME"):
        monkeypatch.delenv(name, raising=False)
    for name, value in {"HOME": "/home/someone", **environment}.items():
        monkeypatch.setenv(name, value)
    assert jit.cache_folder() == Path(expected)


@pytest.mark.parametrize(
    ("kernel", "arch", "reason"),
    [
        (Tiny(broken=True), ARCH, "no_such_instruction"),
        (Tiny(), "sm_12", "KeyError: 'sm_12'"),
        (Tiny(threads="x"), ARCH, r"DSLUserCodeError: error\[LAUNCH_INVALID_DIMENSION\]"),
    ],
)
@pytest.mark.parametrize("job", [jit.load, jit.inspect])
def test_a_failed_compile_says_what_and_why(job, kernel, arch, reason, folder):
    with pytest.raises(RuntimeError, match=rf"kernel {kernel.name} does not compile for {arch}: .*{reason}") as failed:
        job(kernel, arch)
    assert failed.value.__cause__ is not None
    assert "\x1b" not in str(failed.value), "no colours: it may go to a log"
    assert not folder.exists()
    assert callable(jit.load(Tiny(), ARCH)), "the next kernel is not affected"


@pytest.mark.parametrize(
    ("cuda", "hint"),
    [
        (None, "pip install 'h3mlp[cu13]' or pip install 'h3mlp[cu12]'"),
        ("13.0", "pip install 'h3mlp[cu13]'"),
        ("12.8", "pip install 'h3mlp[cu12]'"),
    ],
)
@pytest.mark.parametrize("missing", ["cutlass", "tvm_ffi"])
def test_without_the_dsl_the_extra_is_named(missing, cuda, hint, monkeypatch):
    monkeypatch.setitem(sys.modules, missing, None)
    monkeypatch.setattr(torch.version, "cuda", cuda)
    jit._toolchain.cache_clear()
    with pytest.raises(ImportError) as refused:
        jit.load(Tiny(), ARCH)
    assert str(refused.value).endswith(f": {hint}")
    assert missing in str(refused.value)


@pytest.mark.parametrize("arch", ["sm_89", "sm_90a", "sm_120a"])
def test_inspect(arch, monkeypatch, pytestconfig):
    texts = []
    disassemble = sass.disassemble
    monkeypatch.setattr(sass, "disassemble", lambda cubin: texts.append(disassemble(cubin)) or texts[-1])
    small, spilling = (jit.inspect(kernel, arch) for kernel in (Tiny(), Tiny(1024, registers=100)))
    number = arch.removeprefix("sm_").removesuffix("a")
    # The second is what CUDA 12's compiler writes for all but the newest.
    assert all(f".target\t{arch}\n" in text or f" EF_CUDA_SM{number} " in text for text in texts)
    assert (small.kernel, small.arch) == ("tiny_128", arch)
    assert (small.local_bytes, small.shared_bytes, small.spills) == (0, 4 * 128, False)
    assert 1 < small.registers < 64
    assert spilling.registers == 64, "1024 threads share 65536"
    assert spilling.local_bytes >= 4 * (100 - 64)
    assert spilling.spills
    assert spilling.shared_bytes == 4 * 1024
    assert not list(pytestconfig.invocation_params.dir.glob("*.cubin")), "the DSL's own choice of a place"


def test_a_kernel_may_state_its_shared_memory():
    class Stated(Tiny):
        shared_bytes = 1234

    assert jit.inspect(Stated(), ARCH).shared_bytes == 1234
