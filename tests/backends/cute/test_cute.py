"""What backend cute says about devices, and its errors; without a GPU."""

import importlib.util

import pytest
import torch

from h3mlp import contract
from h3mlp.backends import cute

CUDA = torch.device("cuda", 0)


@pytest.fixture
def gpu(monkeypatch):
    """A machine whose GPU has the given compute capability."""

    def pretend(*capability: int) -> None:
        monkeypatch.setattr(torch.version, "hip", None)
        monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _device: capability)

    return pretend


def without(monkeypatch, package: str) -> None:
    find = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == package else find(name))


def test_the_cpu_is_not_served():
    assert cute.serves(torch.device("cpu")) == (False, "serves CUDA devices only")


@pytest.mark.parametrize("capability", [(8, 9), (10, 0), (12, 0)])
def test_other_architectures_are_not_served(gpu, capability):
    gpu(*capability)
    number = ".".join(map(str, capability))
    assert cute.serves(CUDA) == (False, f"has kernels for sm_90a; this is compute capability {number}")


@pytest.mark.parametrize("package", ["cutlass", "tvm_ffi"])
def test_a_missing_compiler_is_named_with_the_extra(gpu, monkeypatch, package):
    gpu(9, 0)
    without(monkeypatch, package)
    monkeypatch.setattr(torch.version, "cuda", "12.8")
    assert cute.serves(CUDA) == (False, "needs the CuTe DSL: pip install 'h3mlp[cu12]'")


def test_hopper_is_served(gpu):
    pytest.importorskip("cutlass")
    pytest.importorskip("tvm_ffi")
    gpu(9, 0)
    assert cute.serves(CUDA) == (True, "kernels for sm_90a, compiled when first used")


def test_importing_the_package_does_not_import_the_compiler():
    """0.5 s, which a CPU user need not wait for."""
    import subprocess
    import sys

    code = "import sys, h3mlp; from h3mlp.backends import cute; sys.exit('cutlass' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_a_failed_launch_says_what_was_attempted():
    pytest.importorskip("cutlass")
    from h3mlp.backends.cute import launch

    def fail(*_arguments):
        raise RuntimeError("CUDA Error Code: 1")

    kernel = launch._Compiled("gemm_sm90_128x160_fp32", fail)
    message = "kernel gemm_sm90_128x160_fp32 was not launched on cpu for 77 rows: CUDA Error Code: 1"
    with pytest.raises(RuntimeError, match=message):
        launch._launch(kernel, 77, torch.zeros(1))


def test_vectors_fit():
    pytest.importorskip("cutlass")
    from h3mlp.backends.cute.norm_quant import vectors_fit

    aligned = torch.zeros(4, 128, dtype=contract.ACTIVATION)
    assert vectors_fit(aligned, aligned[0])
    assert not vectors_fit(aligned, aligned.view(-1)[1:129])
    assert not vectors_fit(torch.zeros(4, 132, dtype=contract.ACTIVATION)[:, :128])
