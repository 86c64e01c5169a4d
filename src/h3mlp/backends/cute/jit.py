"""Kernels of the CuTe DSL: compile, keep in memory and on disk, and read the machine code.

A compile takes 1 to 6 s, loading its object file from disk 0.03 s for the first and 0.002 s for the next, importing the
DSL 0.45 s. So ``load`` looks in memory, then on disk, then compiles; and this module imports the DSL only when a kernel
is asked for.
"""

import hashlib
import logging
import os
import platform
import re
import tempfile
import threading
import warnings
from collections.abc import Callable, Iterable
from functools import lru_cache
from importlib import metadata
from pathlib import Path
from typing import Protocol

import torch

from ..._version import __version__
from ...files import whole
from . import sass
from .sass import Report

FUNCTION = "h3mlp_kernel"
"""Name of the compiled function in its object file; each file is linked on its own, so that one name serves all."""

DIGEST_BYTES = hashlib.sha256().digest_size


def _sources() -> str:
    """A hash of the code that kernels are made of."""
    folder = Path(__file__).parent
    found = hashlib.sha256()
    for source in (*sorted(folder.rglob("*.py")), folder.parent.parent / "contract.py"):
        found.update(source.read_bytes())
    return found.hexdigest()


SOURCES = _sources()
"""As imported: a file edited later is not what this process compiles."""

_log = logging.getLogger("h3mlp")
_lock = threading.Lock()  # the DSL keeps the options of a compile in one global object: one compile at a time
_loaded: dict[tuple[str, str, str], Callable] = {}


class Kernel(Protocol):
    """A GPU kernel to compile: a frozen dataclass of plain values, so that ``repr`` is its identity.

    It may also have ``shared_bytes``, the shared memory of a block, where the launch does not fix it;
    ``ptxas_options``; and ``multiplies_with``, the one of ``sass.TENSOR_CORE`` that its machine code shall have.
    """

    @property
    def name(self) -> str:
        """What people call it, e.g. ``gemm_sm90_256x128_fp32``."""

    def trace(self) -> tuple[Callable, tuple]:
        """The ``@cute.jit`` function, and the fake arguments that it is compiled for."""


def load(kernel: Kernel, arch: str) -> Callable:
    """The compiled kernel. It takes torch tensors and launches on torch's current stream.

    Keep what this returns rather than ask for every launch: the look-up takes about 1 us, the launch itself 4.5 us.

    Args:
        kernel: what to compile.
        arch: the architecture to compile for, e.g. ``sm_90a``; the GPU of this machine plays no part.

    Raises:
        ImportError: the CuTe DSL is not installed; says which extra brings it.
        RuntimeError: the kernel does not compile; says which, for which architecture, and the compiler's message.
    """
    identity = (type(kernel).__module__, repr(kernel), arch)
    function = _loaded.get(identity)
    if function is None:
        with _lock:
            function = _loaded.get(identity)
            if function is None:
                file = object_file(kernel, arch)
                function = _loaded[identity] = _from_disk(file) or _build(kernel, arch, file)
    return function


def inspect(kernel: Kernel, arch: str) -> Report:
    """Compile without a GPU and report what the machine code needs and which instructions multiply.

    Raises:
        ImportError: the CuTe DSL is not installed.
        RuntimeError: the kernel does not compile, or nvdisasm is missing or cannot read it.
    """
    with _lock, tempfile.TemporaryDirectory() as scratch:
        compiled = _compile(kernel, arch, cubin_folder=scratch)
    shared = getattr(kernel, "shared_bytes", None)
    if shared is None:
        shared = sass.launch_shared_bytes(compiled.ir_module)
    return sass.report(kernel.name, arch, compiled.artifacts.CUBIN, shared, getattr(kernel, "multiplies_with", None))


def disassembly(kernel: Kernel, arch: str) -> str:
    """Compile without a GPU; the machine code as nvdisasm prints it.

    Raises:
        as ``inspect``.
    """
    with _lock, tempfile.TemporaryDirectory() as scratch:
        return sass.disassemble(_compile(kernel, arch, cubin_folder=scratch).artifacts.CUBIN)


def cache_folder() -> Path:
    """Where compiled kernels are kept: ``$H3MLP_CACHE_DIR``, ``$XDG_CACHE_HOME/h3mlp`` or ``~/.cache/h3mlp``."""
    if own := os.environ.get("H3MLP_CACHE_DIR"):
        return Path(own).expanduser()
    return Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser() / "h3mlp"


def object_file(kernel: Kernel, arch: str) -> Path:
    """The file of this kernel: its name holds a hash of everything that decides about the content.

    Raises:
        ImportError: the CuTe DSL is not installed.
    """
    parts = (*_toolchain(), *_dsl_settings(), arch, type(kernel).__module__, repr(kernel))
    key = key_of(parts)
    return cache_folder() / f"{re.sub(r'[^A-Za-z0-9_.-]', '_', kernel.name)[:80]}-{arch}-{key}.o"


def key_of(parts: Iterable[str]) -> str:
    """What stands for all of these in a file's name."""
    return hashlib.sha256("\0".join(parts).encode()).hexdigest()[:32]


def install_hint() -> str:
    """The command that brings the CuTe DSL for the CUDA version of this torch; both where torch has none."""
    major = (torch.version.cuda or "").partition(".")[0]
    extras = [f"cu{major}"] if major in ("12", "13") else ["cu13", "cu12"]
    return " or ".join(f"pip install 'h3mlp[{extra}]'" for extra in extras)


def versions() -> dict[str, str | None]:
    """The installed CuTe DSL, the CUDA versions that it can compile with, and TVM-FFI; None where there is none."""
    flavours = [cuda for cuda in ("cu12", "cu13") if _version(f"nvidia-cutlass-dsl-libs-{cuda}")]
    return {
        "cute_dsl": _version("nvidia-cutlass-dsl"),
        "cute_dsl_cuda": ", ".join(flavours) or None,
        "tvm_ffi": _version("apache-tvm-ffi"),
    }


def _version(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def _dsl():
    try:
        import cutlass
        import cutlass.cute
        import tvm_ffi  # noqa: F401  a separate package, without which the DSL fails late and obscurely
    except ImportError as missing:
        raise ImportError(f"GPU kernels need the CuTe DSL ({missing}): {install_hint()}") from missing
    return cutlass


@lru_cache(maxsize=1)
def _toolchain() -> tuple[str, ...]:
    """What compiles: h3mlp's sources, the packages, the host.

    The Python version is not among them: no interface of Python's is in the object file.
    """
    cutlass = _dsl()
    cuda = cutlass.CUDA_VERSION  # of the flavour that the DSL chose for this driver
    return (
        __version__,
        SOURCES,
        cutlass.__version__,
        f"cuda {cuda.major}.{cuda.minor}",
        *(f"{name} {version}" for name, version in versions().items()),
        platform.machine(),
        _cpu_features(),
    )


def _cpu_features() -> str:
    """The host part of the object file is compiled for this very CPU (AVX-512 where it has it), and a home directory
    may be shared with a machine that would stop at an illegal instruction."""
    try:
        with open("/proc/cpuinfo", encoding="utf-8") as lines:
            return next((line for line in lines if line.startswith(("flags", "Features"))), "")
    except OSError:
        return ""


def _dsl_settings() -> tuple[str, ...]:
    """The user's settings of the DSL, such as CUTE_DSL_LINEINFO for a profiler."""
    return tuple(sorted(f"{name}={value}" for name, value in os.environ.items() if name.startswith("CUTE_DSL_")))


def _compile(kernel: Kernel, arch: str, cubin_folder: str | None = None):
    """The DSL's compiled function; with its cubin if given a folder, which the DSL needs to pass it on."""
    cute = _dsl().cute
    try:
        options = [cute.EnableTVMFFI(True), cute.GPUArch(arch)]
        if ptxas_options := getattr(kernel, "ptxas_options", None):
            options.append(cute.PtxasOptions(ptxas_options))
        if cubin_folder:
            from cutlass.base_dsl.compiler import DumpDir  # the one option that cutlass.cute does not name

            options += [cute.KeepCUBIN(True), DumpDir(cubin_folder)]
        with warnings.catch_warnings():
            # Those of the DSL are for who writes a kernel. A filter of "error" would raise them within the DSL, which
            # reports, for one, a static loop of 64 steps as "requires all arguments to be Python integers".
            warnings.simplefilter("ignore")
            function, arguments = kernel.trace()
            return cute.compile[tuple(options)](function, *arguments)
    except Exception as error:
        reason = re.sub(r"\x1b\[[0-9;]*m", "", str(error))  # the DSL colours its messages, terminal or not
        message = f"kernel {kernel.name} does not compile for {arch}: {type(error).__name__}: {reason.strip()}"
        raise RuntimeError(message) from error


def _build(kernel: Kernel, arch: str, file: Path) -> Callable:
    """Compile, keep the object file if it can be kept, and link it."""
    compiled = _compile(kernel, arch)
    try:
        if _sources() != SOURCES:
            raise OSError("the sources were edited while the process ran")
        file.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        with whole(file) as partial:
            _export(compiled, partial)
        return _link(file)
    except OSError as error:
        _log.info("kernel %s is not kept on disk: %s", kernel.name, error)
    with tempfile.TemporaryDirectory() as scratch:
        file = Path(scratch, file.name)
        _export(compiled, file)
        return _link(file)


def _export(compiled, file: Path) -> None:
    """An object file with the SHA-256 of its content behind it, where the linker does not look."""
    compiled.export_to_c(str(file), FUNCTION)
    content = file.read_bytes()
    file.write_bytes(content + hashlib.sha256(content).digest())


def _from_disk(file: Path) -> Callable | None:
    try:
        content = file.read_bytes()
    except FileNotFoundError:
        return None
    except OSError as error:
        _log.info("kernel cache: %s", error)
        return None
    # Before it is linked: the linker may crash the process on a damaged file.
    if hashlib.sha256(content[:-DIGEST_BYTES]).digest() != content[-DIGEST_BYTES:]:
        _log.warning("kernel cache: %s is damaged and is built anew", file)
        return None
    try:
        return _link(file)
    except Exception as error:  # whatever the reason, compiling is the way out
        _log.warning("kernel cache: %s does not link and is built anew: %s", file, error)
        return None


def _link(file: Path) -> Callable:
    return _dsl().cute.runtime.load_module(str(file), enable_tvm_ffi=True)[FUNCTION]
