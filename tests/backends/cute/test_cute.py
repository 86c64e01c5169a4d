"""What backend cute says about devices, and its errors; without a GPU."""

import contextlib
import functools
import importlib.util

import pytest
import torch
from helpers import make_inputs, make_mlp_inputs, nan_buffers, nan_mlp_buffers, shifted, without_adaln

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


@pytest.mark.parametrize("capability", [(8, 0), (8, 6), (10, 0), (10, 3)])
def test_other_architectures_are_not_served(gpu, capability):
    gpu(*capability)
    number = ".".join(map(str, capability))
    architectures = "sm_90a, sm_120a, sm_121a, sm_89"
    assert cute.serves(CUDA) == (False, f"has kernels for {architectures}; this is compute capability {number}")


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


@pytest.mark.parametrize(
    ("capability", "arch", "form"),
    [((12, 0), "sm_120a", "unit_scale"), ((12, 1), "sm_121a", "unit_scale"), ((8, 9), "sm_89", "plain")],
)
def test_where_there_is_a_choice_of_gemms_it_is_said(gpu, monkeypatch, tmp_path, capability, arch, form):
    pytest.importorskip("cutlass")
    pytest.importorskip("tvm_ffi")
    from types import SimpleNamespace

    gpu(*capability)
    found = SimpleNamespace(name="a GPU", multi_processor_count=170)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _device: found)
    monkeypatch.setenv("H3MLP_CACHE_DIR", str(tmp_path))
    reason = f"kernels for {arch}, compiled when first used; GEMM {form}:128x256 (not measured: call h3mlp.warmup)"
    assert cute.serves(CUDA) == (True, reason)
    monkeypatch.setenv("H3MLP_GEMM", "plain:128x128")
    assert cute.serves(CUDA)[1].endswith("; GEMM plain:128x128 ($H3MLP_GEMM)")


def test_importing_the_package_does_not_import_the_compiler():
    """0.5 s, which a CPU user need not wait for."""
    import subprocess
    import sys

    code = "import sys, h3mlp; from h3mlp.backends import cute; sys.exit('cutlass' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


@pytest.fixture
def launched(monkeypatch):
    """The kernels that ``launch`` runs, by name with their arguments, on a pretended GPU 0; they write 1 everywhere."""
    pytest.importorskip("cutlass")
    from h3mlp.backends.cute import jit, launch, variants

    calls = []

    @functools.cache
    def load(kernel, arch):
        def run(*arguments):
            calls.append((kernel.name, arch, arguments))
            for written in _written(kernel.name, arguments):
                written.fill_(1)

        return run

    monkeypatch.setattr(jit, "load", load)
    monkeypatch.setattr(launch, "_gpu", lambda _device: variants.KNOWN["sm_90a"])
    monkeypatch.setattr(torch.cuda, "current_device", lambda: None)  # as the index of a CPU tensor's device
    caches = launch._norm_quant, launch._gemm, launch._quantize_rows, launch._chosen
    for cached in caches:
        cached.cache_clear()
    yield calls
    for cached in caches:
        cached.cache_clear()


def _written(name: str, arguments: tuple) -> tuple:
    if name.startswith("norm_quant"):
        return arguments[5:7]
    if name == "quantize_rows":
        return arguments[1:3]
    return arguments[7:8] if "_gated_" in name else arguments[4:5]


def places(tensors) -> list[tuple[int, int]]:
    """Where each begins, and its rows."""
    return [(t.data_ptr(), len(t)) for t in tensors]


def names(calls: list) -> list[str]:
    return [name for name, _, _ in calls]


def test_both_kernels_are_launched_once(launched):
    from h3mlp.backends.cute import launch

    inputs, buffers = make_inputs(5), nan_buffers(5)
    launch.fc1_swiglu(inputs, 1e-5, buffers, "fp32")
    launch.fc1_swiglu(inputs._replace(adaln_index=inputs.adaln_index.int()), 1e-5, buffers, "fast")
    assert names(launched) == [
        "norm_quant_i64",
        "gemm_sm90_swiglu_128x32_fp32",
        "norm_quant_i32",
        "gemm_sm90_swiglu_128x32_fast",
    ]
    _, arch, stage1 = launched[0]
    assert arch == "sm_90a"
    assert all(
        a is b for a, b in zip(stage1, (*inputs[:5], buffers.workspace_q, buffers.workspace_scale), strict=False)
    )
    assert stage1[7:] == (1e-5,)
    _, _, stage2 = launched[1]
    wanted = (buffers.workspace_q, buffers.workspace_scale, *inputs[5:], buffers.out)
    assert all(a is b for a, b in zip(stage2, wanted, strict=False))
    assert stage2[5:] == (132,)


@pytest.mark.parametrize("name", ["x", "x_norm_weight", "adaln_scale", "adaln_shift"])
def test_what_is_not_aligned_takes_the_scalar_kernel(launched, name):
    from h3mlp.backends.cute import launch

    inputs, buffers = make_inputs(5), nan_buffers(5)
    launch.fc1_swiglu(inputs._replace(**{name: shifted(getattr(inputs, name))}), 1e-5, buffers, "fp32")
    assert names(launched)[0] == "norm_quant_i64_scalar"
    if name != "x_norm_weight":
        gaps = getattr(inputs, name).new_zeros((16, 388))[: getattr(inputs, name).shape[0], :384]
        launch.fc1_swiglu(inputs._replace(**{name: gaps}), 1e-5, buffers, "fp32")
        assert names(launched)[2] == "norm_quant_i64_scalar"


@pytest.mark.parametrize("name", ["out", "workspace_q", "fc1_weight_q"])
def test_where_tma_cannot_go_a_copy_does(launched, name):
    """And what the kernels wrote arrives in the caller's buffers."""
    from h3mlp.backends.cute import launch

    inputs, buffers = make_inputs(5), nan_buffers(5)
    if name == "fc1_weight_q":
        inputs = inputs._replace(fc1_weight_q=shifted(inputs.fc1_weight_q))
    else:
        buffers = buffers._replace(**{name: shifted(getattr(buffers, name))})
    launch.fc1_swiglu(inputs, 1e-5, buffers, "fp32")
    assert len(launched) == 2
    stage2 = launched[1][2]
    assert all(t.data_ptr() % 16 == 0 for t in (stage2[0], stage2[2], stage2[4]))
    used = {"workspace_q": stage2[0], "fc1_weight_q": stage2[2], "out": stage2[4]}
    given = {**inputs._asdict(), **buffers._asdict()}
    assert [other for other in used if used[other] is not given[other]] == [name], "no other tensor is copied"
    assert all((buffer.float() == 1).all() for buffer in buffers)


def test_warmup_launches_each_kernel_once(launched, monkeypatch):
    from h3mlp.backends.cute import launch

    monkeypatch.setattr(torch.cuda, "device", lambda _device: contextlib.nullcontext())
    launch.warmup(torch.device("cpu"), (1, 5, 32, 33472), 384, 14336, "fast", operators=("fc1",))
    gemms = ["gemm_sm90_swiglu_128x160_fast", "gemm_sm90_swiglu_128x32_fast"]
    assert sorted(names(launched)) == [*gemms, "norm_quant_i32", "norm_quant_i64", "norm_quant_plain"]
    launched.clear()
    launch.warmup(torch.device("cpu"), (1, 33472), 384, 14336, "fast", modulation="eager", operators=("fc1",))
    assert sorted(names(launched)) == [*gemms, "norm_quant_eager_i32", "norm_quant_eager_i64", "norm_quant_plain"]


@pytest.mark.parametrize("rows", [3, 556, 700])
def test_warmup_of_the_mlp_launches_what_its_calls_do(launched, monkeypatch, rows):
    from h3mlp.backends.cute import blocks, launch

    monkeypatch.setattr(torch.cuda, "device", lambda _device: contextlib.nullcontext())
    monkeypatch.setattr(blocks, "rows_of_a_block", lambda *_: 256)
    launch.warmup(torch.device("cpu"), (rows,), 384, 128, "fp32", operators=("mlp",))
    warmed, count = set(names(launched)), len(launched)
    inputs = make_mlp_inputs(rows)
    launch.mlp(inputs, 1e-5, contract.MLPBuffers(torch.empty_like(inputs.x)), "fp32")
    assert set(names(launched[count:])) <= warmed
    assert count == len(warmed), "each once"


def test_what_each_mode_launches(launched):
    """Without AdaLN the kernel gets neither tables nor index."""
    from h3mlp.backends.cute import launch

    inputs, buffers = make_inputs(3), nan_buffers(3)
    launch.fc1_swiglu(inputs, 1e-5, buffers, "fp32")
    launch.fc1_swiglu(inputs._replace(adaln_index=inputs.adaln_index.int()), 1e-5, buffers, "fp32", "eager")
    plain = without_adaln(inputs)
    launch.fc1_swiglu(plain, 1e-5, buffers, "fp32", "eager")
    launch.fc1_swiglu(plain._replace(x=shifted(inputs.x)), 1e-5, buffers, "fp32")
    stage1 = ["norm_quant_i64", "norm_quant_eager_i32", "norm_quant_plain", "norm_quant_plain_scalar"]
    assert names(launched)[::2] == stage1
    assert [len(arguments) for _, _, arguments in launched[::2]] == [8, 8, 5, 5]


@pytest.mark.parametrize(("arch", "loads"), [("sm_120a", ""), ("sm_121a", ""), ("sm_89", "_async")])
def test_mma_sync_kernels_of_small_and_large_calls(launched, monkeypatch, arch, loads):
    from h3mlp.backends.cute import choice, launch, variants

    monkeypatch.setattr(launch, "_gpu", lambda _device: variants.KNOWN[arch]._replace(multiprocessors=4))
    chosen = choice.Choice("plain", "256x128")
    monkeypatch.setattr(choice, "current", lambda _device, found: (chosen, "told") if found == arch else None)
    for rows in (1, 33, 5000):
        launch.fc1_swiglu(make_inputs(rows), 1e-5, nan_buffers(rows), "fp32")
    tiles = ["16x128", "64x128", "256x128"]
    assert names(launched)[1::2] == [f"gemm_sm120_swiglu_{tile}_plain{loads}" for tile in tiles]
    assert {found for _, found, _ in launched} == {arch}


class TestMLP:
    def test_four_kernels_a_block(self, launched, monkeypatch):
        """Blocks of 256 and 44 rows."""
        from h3mlp.backends.cute import blocks, launch

        monkeypatch.setattr(blocks, "rows_of_a_block", lambda *_: 256)
        inputs, buffers = make_mlp_inputs(300), nan_mlp_buffers(300)
        launch.mlp(inputs, 1e-5, buffers, "fast")
        gemm = "gemm_sm90_{}_128x{}_fast"
        assert names(launched) == [
            *("norm_quant_i64", gemm.format("swiglu", 128), "quantize_rows", gemm.format("gated", 128)),
            *("norm_quant_i64", gemm.format("swiglu", 64), "quantize_rows", gemm.format("gated", 64)),
        ]
        assert all((buffer.float() == 1).all() for buffer in buffers)
        y_q, s_y, w_q, w_scale, gate, index, residual, out, multiprocessors = launched[-1][2]
        given = *buffers[4:], inputs.residual, buffers.out
        assert places((y_q, s_y, residual, out)) == places(b[256:] for b in given)
        assert (w_q, w_scale, gate) == (inputs.fc2_weight_q, inputs.fc2_weight_scale, inputs.gate)
        assert torch.equal(index.view(torch.int64), inputs.adaln_index[256:]), "as words of 32 bits, the lower first"
        assert multiprocessors == 132

    def test_indices_of_32_bits_and_none(self, launched):
        from h3mlp.backends.cute import launch

        inputs, buffers = make_mlp_inputs(3), nan_mlp_buffers(3)
        narrow = inputs._replace(adaln_index=inputs.adaln_index.int())
        for given in (narrow, without_adaln(inputs)):
            launch.mlp(given, 1e-5, buffers, "fp32")
        index, (gate, none) = launched[3][2][5], launched[7][2][4:6]
        assert torch.equal(index, narrow.adaln_index)
        assert torch.equal(gate, torch.ones(1, 384, dtype=torch.bfloat16))
        assert len(none) == 0

    def test_the_form_reaches_both_gemms(self, launched, monkeypatch):
        from h3mlp.backends.cute import choice, launch, variants

        monkeypatch.setattr(launch, "_gpu", lambda _device: variants.KNOWN["sm_120a"])
        monkeypatch.setattr(choice, "current", lambda *_: (choice.Choice("unit_scale", "128x256"), "told"))
        for form, name in ((-1, "unit"), (0, "plain"), (2, "unit")):
            launched.clear()
            launch.mlp(make_mlp_inputs(3), 1e-5, nan_mlp_buffers(3), "fp32", "fused", form)
            assert names(launched)[1::2] == [f"gemm_sm120_{end}_16x128_{name}" for end in ("swiglu", "gated")]

    @pytest.mark.parametrize(
        "name",
        ["out", "workspace_a_q", "workspace_y", "workspace_y_q", "fc1_weight_q", "fc2_weight_q", "gate", "residual"],
    )
    def test_where_a_kernel_cannot_go_a_copy_does(self, launched, name):
        from h3mlp.backends.cute import launch

        inputs, buffers = make_mlp_inputs(5), nan_mlp_buffers(5)
        if name in inputs._fields:
            inputs = inputs._replace(**{name: shifted(getattr(inputs, name))})
        else:
            buffers = buffers._replace(**{name: shifted(getattr(buffers, name))})
        launch.mlp(inputs, 1e-5, buffers, "fp32")
        (_, _, stage2), (_, _, quantize), (_, _, stage3) = launched[1:]
        assert stage2[4] is quantize[0]
        used = {"workspace_a_q": stage2[0], "fc1_weight_q": stage2[2], "workspace_y": stage2[4]}
        used |= {"workspace_y_q": stage3[0], "fc2_weight_q": stage3[2], "gate": stage3[4]}
        used |= {"residual": stage3[6], "out": stage3[7]}
        assert all(t.data_ptr() % 16 == 0 for t in used.values())
        given = {**inputs._asdict(), **buffers._asdict()}
        copied = [other for other in used if used[other].data_ptr() != given[other].data_ptr()]
        assert copied == [name], "no other tensor is copied"
        assert all((buffer.float() == 1).all() for buffer in buffers)

    @pytest.mark.parametrize("name", ["gate", "residual"])
    def test_rows_with_odd_gaps_are_copied(self, launched, name):
        from h3mlp.backends.cute import launch

        inputs = make_mlp_inputs(5)
        gaps = getattr(inputs, name).new_zeros((len(getattr(inputs, name)), 388))[:, :384]
        launch.mlp(inputs._replace(**{name: gaps}), 1e-5, nan_mlp_buffers(5), "fp32")
        assert launched[3][2][{"gate": 4, "residual": 6}[name]].is_contiguous()


@pytest.mark.parametrize("measured", [False, True])
def test_warmup_measures_unless_it_was_measured_or_is_told(launched, monkeypatch, measured):
    from h3mlp.backends.cute import choice, launch, measure, variants

    device = torch.device("cpu")  # whose index is None
    monkeypatch.setattr(torch.cuda, "device", lambda _device: contextlib.nullcontext())
    monkeypatch.setattr(launch, "_gpu", lambda _device: variants.KNOWN["sm_120a"]._replace(multiprocessors=4))
    first, last = choice.candidates("sm_120a")[0], choice.candidates("sm_120a")[-1]
    sources = {"measured"} if measured else set()
    monkeypatch.setattr(choice, "_read", lambda *_: last if sources else None)
    monkeypatch.setattr(choice, "_file", lambda *_: None)
    monkeypatch.setattr(choice, "_told", {})
    monkeypatch.setattr(choice, "keep", lambda *_: sources.add("measured"))
    monkeypatch.setattr(measure, "run", lambda *_: sources.add("ran"))
    monkeypatch.delenv(choice.ENVIRONMENT, raising=False)
    launch.warmup(device, (5000,), 384, 128, "fp32", operators=("fc1",))
    assert sources == ({"measured"} if measured else {"measured", "ran"})
    assert names(launched)[-1] == f"gemm_sm120_swiglu_{last.tile}_plain"
    launch.warmup(device, (5000,), 384, 128, "fp32", str(first), operators=("fc1",))
    assert names(launched)[-1] == f"gemm_sm120_swiglu_{first.tile}_unit"


def test_without_the_memory_to_measure_the_default_serves(launched, monkeypatch, caplog, tmp_path):
    from h3mlp.backends.cute import choice, launch, measure, variants

    def fail(*_):
        raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr(torch.cuda, "device", lambda _device: contextlib.nullcontext())
    monkeypatch.setattr(launch, "_gpu", lambda _device: variants.KNOWN["sm_89"]._replace(multiprocessors=4))
    monkeypatch.setattr(choice, "_file", lambda *_: tmp_path / "none")
    monkeypatch.setattr(measure, "run", fail)
    monkeypatch.delenv(choice.ENVIRONMENT, raising=False)
    launch.warmup(torch.device("cpu"), (5000,), 384, 128, "fp32", operators=("fc1",))
    assert names(launched)[-1] == "gemm_sm120_swiglu_128x256_plain_async"
    assert "are not measured, plain:128x256 is used: CUDA out of memory" in caplog.text


def test_a_failed_launch_says_what_was_attempted():
    pytest.importorskip("cutlass")
    from h3mlp.backends.cute import launch

    def fail(*_arguments):
        raise RuntimeError("CUDA Error Code: 1")

    kernel = launch._Kernel("gemm_sm90_swiglu_128x160_fp32", fail)
    message = "kernel gemm_sm90_swiglu_128x160_fp32 was not launched on cpu for 77 rows: CUDA Error Code: 1"
    with pytest.raises(RuntimeError, match=message):
        kernel.launch(77, torch.zeros(1))
