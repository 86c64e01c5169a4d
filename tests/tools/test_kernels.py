"""The command ``h3mlp kernels``, on kernels that compile in 0.03 s."""

import io
import json
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import pytest
from rich.console import Console

from h3mlp.backends import cute
from h3mlp.backends.cute import jit, sass
from h3mlp.tools import cli, kernels


@pytest.fixture
def tiny(monkeypatch):
    """The architecture sm_90a with one small kernel, and the kernel's class."""
    pytest.importorskip("cutlass", reason="the CuTe DSL is not installed")
    from backends.cute.tiny_kernel import Tiny

    variants = [Tiny()]
    monkeypatch.setattr(cute, "ARCHITECTURES", ("sm_90a", "sm_120a"), raising=False)
    monkeypatch.setattr(cute, "kernels", lambda arch: variants if arch == "sm_90a" else [], raising=False)
    return variants


@pytest.fixture
def threads(monkeypatch):
    """In place of processes, which take seconds to start."""
    monkeypatch.setattr(kernels, "ProcessPoolExecutor", lambda processes, _context: ThreadPoolExecutor(processes))


def call(capsys, *arguments: str) -> tuple[int, str, str]:
    with pytest.raises(SystemExit) as stop:
        cli.main(["kernels", *arguments])
    shown = capsys.readouterr()
    return stop.value.code, shown.out, shown.err


@pytest.mark.usefixtures("tiny", "threads")
def test_table(capsys):
    code, out, err = call(capsys, "--arch", "sm_90a")
    assert (code, err) == (0, "")
    heading, _, row = out.splitlines()
    columns = ["Kernels for sm_90a", "Regs", "Local", "Shared"]  # it multiplies with no tensor core
    assert [cell.strip() for cell in heading.split("┃")] == columns
    name, registers, *others = (cell.strip() for cell in row.split("│"))
    assert (name, others) == ("tiny_128", ["0", "512"])
    assert 0 < int(registers) < 64
    assert max(map(len, out.splitlines())) <= 80


def test_a_long_name_leaves_room_for_the_numbers():
    name = "gemm_sm90_128x128_cluster1x2_fp32_i384_s6x128_g16_u14_p2"
    report = sass.Report(name, "sm_90a", 168, 0, 231424, dict.fromkeys(sass.TENSOR_CORE, 1234))
    console = Console(file=io.StringIO(), width=80)
    console.print(kernels.render([report, replace(report, arch="sm_120a")]))
    lines = console.file.getvalue().splitlines()
    assert sum("168" in line and "231,424" in line and line.count("1,234") == 4 for line in lines) == 2
    assert "".join(line.split("│")[0].strip() for line in lines if "│" in line) == 2 * name
    assert max(map(len, lines)) <= 80


@pytest.mark.usefixtures("tiny")
def test_json_of_all_architectures(capsys):
    code, out, err = call(capsys, "--json")
    assert (code, err) == (0, "")
    found = json.loads(out)
    assert found["ok"] is True
    assert [(row["kernel"], row["arch"], row["local_bytes"], row["shared_bytes"]) for row in found["kernels"]] == [
        ("tiny_128", "sm_90a", 0, 512)
    ]
    assert found["kernels"][0]["instructions"] == {"QGMMA": 0, "QMMA": 0, "QMMA.SF": 0, "HMMA": 0}


@pytest.mark.usefixtures("threads")
@pytest.mark.parametrize("as_json", [True, False])
def test_a_spilling_kernel_is_exit_code_1(as_json, tiny, capsys):
    tiny.append(type(tiny[0])(1024, registers=100))
    code, out, err = call(capsys, *(["--json"] if as_json else []))
    assert code == 1
    assert err.startswith("h3mlp: error: tiny_1024 for sm_90a spills ")
    assert err.count("\n") == 1
    assert "tiny_128" in out
    assert "tiny_1024" in out
    if as_json:
        assert json.loads(out)["ok"] is False


def test_a_kernel_that_waits_behind_every_wgmma_is_a_fault():
    instructions = {**dict.fromkeys(sass.TENSOR_CORE, 0), "QGMMA": 40}
    good, bad = (sass.Report("gemm", "sm_90a", 168, 0, 0, instructions, waits) for waits in (10, 40))
    assert kernels.faults([good, bad]) == ["gemm for sm_90a waits behind every wgmma"]


@pytest.mark.parametrize(("arch", "limit"), [("sm_90a", 232_448), ("sm_120a", 101_376), ("sm_89", 101_376)])
def test_too_much_shared_memory_is_a_fault(arch, limit):
    good, bad = (sass.Report("gemm", arch, 255, 0, n, dict.fromkeys(sass.TENSOR_CORE, 0)) for n in (limit, limit + 1))
    assert kernels.faults([good, bad]) == [f"gemm for {arch} needs {limit + 1} bytes of shared memory"]


@pytest.mark.parametrize("found", [{}, {"QMMA": 64}, {"QMMA": 1, "QMMA.SF": 64}])
def test_other_tensor_core_instructions_than_wanted_are_a_fault(found):
    def report(found):
        return sass.Report("gemm", "sm_120a", 255, 0, 0, dict.fromkeys(sass.TENSOR_CORE, 0) | found, 0, "QMMA.SF")

    assert kernels.faults([report({"QMMA.SF": 64})]) == []
    assert kernels.faults([report(found)]) == ["gemm for sm_120a does not multiply with QMMA.SF alone"]


def test_a_kernel_that_does_not_compile_is_exit_code_1(tiny, capsys):
    tiny.append(type(tiny[0])(broken=True))
    code, out, err = call(capsys)
    assert (code, out) == (1, "")
    assert err.startswith("h3mlp: error: kernel tiny_128 does not compile for sm_90a: ")
    assert err.count("\n") == 1


def test_an_unknown_architecture_is_exit_code_2(capsys, monkeypatch):
    monkeypatch.setattr(cute, "ARCHITECTURES", ("sm_90a", "sm_120a"), raising=False)
    code, out, err = call(capsys, "--arch", "sm_12")
    assert (code, out) == (2, "")
    message = "no kernels for 'sm_12'; there are some for sm_90a, sm_120a"
    assert err == f"h3mlp: error: Invalid value for '--arch': {message}\n"


def test_without_the_dsl_it_is_one_line_and_exit_code_1(capsys, monkeypatch):
    def refuse(_arch):
        raise ImportError(f"GPU kernels need the CuTe DSL: {jit.install_hint()}")

    monkeypatch.setattr(cute, "ARCHITECTURES", ("sm_90a",), raising=False)
    monkeypatch.setattr(cute, "kernels", refuse, raising=False)
    code, out, err = call(capsys)
    assert (code, out) == (1, "")
    assert "pip install 'h3mlp[cu1" in err
    assert err.count("\n") == 1
