"""The command as a user calls it: another process, its output and its exit code."""

import io
import json
import os
import subprocess
import sys

import pytest
from rich.console import Console

import h3mlp
from h3mlp.tools import cli, doctor


def call(*arguments: str, **options) -> subprocess.CompletedProcess:
    command = [sys.executable, "-m", "h3mlp", *arguments]
    return subprocess.run(command, capture_output=True, text=True, check=False, timeout=300, **options)


def test_version():
    done = call("--version")
    assert (done.returncode, done.stdout.strip()) == (0, f"h3mlp, version {h3mlp.__version__}")


@pytest.mark.parametrize("arguments", [(), ("demo", "--help")])
def test_help(arguments):
    done = call(*arguments)
    assert done.returncode == 0
    assert done.stdout.startswith("Usage: h3mlp")
    assert done.stderr == ""


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("demo", "--rows", "0"), "Invalid value for '--rows': 0 is not in the range 1<=x<=16777216."),
        (("demo", "--rows", "many"), "Invalid value for '--rows': 'many' is not a valid integer range."),
        (("demo", "--seed", "-1"), "Invalid value for '--seed': -1 is not in the range"),
        (("demo", "--seed"), "Option '--seed' requires an argument."),
        (("demo", "extra"), "Got unexpected extra argument (extra)"),
        (("demo", "--plot", "x.gif"), "Invalid value for '--plot': must end in .pdf, .png, .svg; it is 'x.gif'"),
        (("demo", "--plot", "/no/such/x.png"), "folder '/no/such' does not exist or is not writable"),
        (("demo", "--fast"), "No such option '--fast'."),
        (("run",), "No such command 'run'."),
        (("doctor", "--yaml"), "No such option '--yaml'."),
        (("bench", "--seconds", "nan"), "Invalid value for '--seconds': nan is not a finite number of at least 0."),
        (("bench", "--seconds", "inf"), "Invalid value for '--seconds': inf is not a finite number of at least 0."),
        (("bench", "--seconds", "-1"), "Invalid value for '--seconds': -1 is not a finite number of at least 0."),
        (("bench", "--seconds", "long"), "Invalid value for '--seconds': 'long' is not a valid float."),
        (("kernels", "--arch"), "Option '--arch' requires an argument."),
    ],
)
def test_bad_arguments_are_one_line_and_exit_code_2(arguments, message, capsys):
    with pytest.raises(SystemExit) as stop:
        cli.main(list(arguments))
    shown = capsys.readouterr()
    assert stop.value.code == 2
    assert shown.out == ""
    assert shown.err.startswith("h3mlp: error: ")
    assert message in shown.err
    assert shown.err.count("\n") == 1


def test_bad_arguments_of_a_process():
    done = call("demo", "--rows", "0")
    assert done.returncode == 2
    assert done.stdout == ""
    assert done.stderr == "h3mlp: error: Invalid value for '--rows': 0 is not in the range 1<=x<=16777216.\n"


def test_doctor():
    done = call("doctor")
    assert done.returncode == 0
    for part in ("h3mlp", h3mlp.__version__, "torch", "threads", "Backend", "cpu", "yes", "Best: backend"):
        assert part in done.stdout


def test_doctor_json(tmp_path):
    (tmp_path / "kernel.o").write_bytes(bytes(1000))
    found = json.loads(call("doctor", "--json", env={**os.environ, "H3MLP_CACHE_DIR": str(tmp_path)}).stdout)
    assert found["environment"]["h3mlp"] == h3mlp.__version__
    assert {"cute_dsl", "cute_dsl_cuda", "tvm_ffi"} <= found["environment"].keys()
    assert found["kernel_cache"] == {"folder": str(tmp_path), "files": 1, "bytes": 1000}
    assert {"device", "backend", "serves", "reason"} <= found["backends"][0].keys()
    assert any(row["device"] == "cpu" and row["backend"] == "cpu" and row["serves"] for row in found["backends"])


def test_doctor_names_what_is_missing():
    found = doctor.report()
    for name in ("cute_dsl", "cute_dsl_cuda", "tvm_ffi"):
        found["environment"][name] = None
    console = Console(file=io.StringIO(), width=200, markup=False)
    console.print(doctor.render(found))
    rows = [line for line in console.file.getvalue().splitlines() if "none: pip install 'h3mlp[cu" in line]
    assert [row.split()[0] for row in rows] == ["cute_dsl", "cute_dsl_cuda", "tvm_ffi"]


def test_demo_prints_its_tables(tmp_path):
    """At the real size, with a plot."""
    plot = tmp_path / "error.png"
    done = call("demo", "--rows", "8", "--seed", "3", "--plot", str(plot))
    assert done.returncode == 0, done.stderr
    assert done.stderr == "", "progress belongs on a terminal"
    for part in (
        "8 rows, hidden 5376, FFN 14336, seed 3",
        "Backend",
        "462.4 MB",
        "231.3 MB",
        "prepare weights",
        "of what the half adds, to BF16",
        "the same with FC2 in BF16",
        "of the output, to FP64",
        "of x and of y: bit-identical to the reference",
        "OK: needs",
        str(plot),
    ):
        assert part in done.stdout
    assert max(map(len, done.stdout.splitlines()[:-1])) <= 80
    assert plot.read_bytes().startswith(b"\x89PNG")
    assert list(tmp_path.iterdir()) == [plot], "no partial file is left"


@pytest.mark.skipif(sys.platform == "win32", reason="needs a pseudo-terminal")
def test_demo_json_with_progress_on_a_terminal():
    import pty

    terminal, stderr = pty.openpty()
    command = [sys.executable, "-m", "h3mlp", "demo", "--rows", "3", "--json"]
    environment = {**os.environ, "TERM": "xterm", "COLUMNS": "80"}
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=stderr, text=True, env=environment) as process:
        os.close(stderr)
        shown = b""
        while True:
            try:
                part = os.read(terminal, 4096)
            except OSError:  # the other end was closed
                part = b""
            if not part:
                break
            shown += part
        result = json.loads(process.stdout.read())
    os.close(terminal)
    assert process.returncode == 0
    assert b"prepare weights" in shown
    assert result["ok"] is True
    assert result["rows"] == 3
    assert result["codes_identical"] is True
    assert result["weight_bytes_bf16"] == 3 * 28672 * 5376
    assert result["weight_bytes_fp8"] == 28672 * (5376 + 4) + 5376 * (14336 + 4)
    assert result["against_fp64"]["equal_share"] >= 0.999
    assert 22 < result["against_bf16"]["snr_db"] < result["fc1_against_bf16"]["snr_db"]
    assert result["fc1_against_bf16"]["snr_db"] > 24
    assert all(seconds > 0 for seconds in result["seconds"].values())


def test_a_folder_in_place_of_the_plot(tmp_path, capsys):
    with pytest.raises(SystemExit) as stop:
        cli.main(["demo", "--plot", str(tmp_path)])
    assert stop.value.code == 2
    assert capsys.readouterr().err.count("\n") == 1


def test_a_failed_run_is_one_line_and_exit_code_1():
    """x of 2^24 rows takes 180 GB, more than the address space that this process is given."""
    resource = pytest.importorskip("resource")
    limit = 64 * 2**30
    done = call("demo", "--rows", str(2**24), preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_AS, (limit, limit)))
    assert done.returncode == 1
    assert done.stdout == ""
    assert done.stderr.startswith("h3mlp: error: ")
    assert "allocate" in done.stderr
    assert done.stderr.count("\n") == 1
