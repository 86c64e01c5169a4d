"""convert, inspect and verify as a user calls them."""

import json
import os
import shutil
import subprocess
import sys

import pytest
import torch
from checkpoints import checkpoint, converted, save
from safetensors import safe_open
from safetensors.torch import load_file

from h3mlp.tools import cli


def call(capsys, *arguments):
    """Exit code, stdout and stderr."""
    with pytest.raises(SystemExit) as stop:
        cli.main([str(argument) for argument in arguments])
    shown = capsys.readouterr()
    return stop.value.code or 0, shown.out, shown.err


@pytest.fixture
def source(tmp_path):
    return save(checkpoint("diffusers"), tmp_path / "source.safetensors")


def test_the_whole_way(source, tmp_path, capsys):
    prepared, plot = tmp_path / "prepared.safetensors", tmp_path / "snr.png"
    code, out, err = call(capsys, "convert", source, prepared, "--all")
    assert (code, err) == (0, "")
    assert "blocks.1" in out
    assert "3 layers; 7 tensors copied, 0 left out" in out
    code, out, err = call(capsys, "inspect", prepared)
    assert (code, err) == (0, "")
    assert "a prepared checkpoint of h3mlp" in out
    code, out, err = call(capsys, "verify", prepared, "--against", source, "--rows", "8", "--plot", plot)
    assert (code, err) == (0, "")
    assert f"OK: 3 layers are those of {source}" in out
    assert plot.read_bytes().startswith(b"\x89PNG")


def test_json(source, tmp_path, capsys):
    prepared = tmp_path / "prepared.safetensors"
    code, out, _ = call(capsys, "convert", source, prepared, "--json")
    report = json.loads(out)
    assert code == 0
    assert report["destination"] == str(prepared)
    assert report["bytes_read"] == 3 * 256 * 256 * 2
    assert report["description"]["layers"]["blocks.0"]["action"] == "quantized"
    assert json.loads(call(capsys, "inspect", prepared, "--json")[1])["prepared"] is True
    verified = json.loads(call(capsys, "verify", prepared, "--against", source, "--json")[1])
    assert verified["ok"] is True
    assert [layer["layer"] for layer in verified["layers"]] == ["blocks.0", "blocks.1", "token_refiner.blocks.0"]


def test_a_layer_that_is_off_is_exit_code_1(source, tmp_path, capsys):
    prepared, plot = tmp_path / "prepared.safetensors", tmp_path / "snr.svg"
    call(capsys, "convert", source, prepared, "--gate-order", "gate_up")
    code, out, err = call(capsys, "verify", prepared, "--against", source, "--plot", plot)
    assert (code, err) == (1, "")
    assert "FAILED: 3 of 3 layers are off" in out
    assert "blocks.0: its halves are exchanged" in out
    assert plot.read_text().startswith("<?xml")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("convert", "{none}", "{new}"), "No such file or directory"),
        (("convert", "{bad}", "{new}"), "is 3 bytes, cut off or something else"),
        (("convert", "{source}", "{source}"), "must be another file or folder than the source"),
        (("convert", "{source}", "{new}", "--gate-order", "gate"), "Invalid value for '--gate-order'"),
        (
            ("convert", "{source}", "{new}", "--lora-scale", "1"),
            "--lora-scale must be given for each --lora or for none",
        ),
        (("convert", "{source}", "{new}", "--lora", "{none}"), "No such file or directory"),
        (("convert", "{source}", "{new}", "--lora", "{source}"), "is on FC1, and puts another weight in its place"),
        (
            ("convert", "{source}", "{new}", "--lora", "{source}", "--lora-alpha", "8", "--lora-alpha", "4"),
            "--lora-alpha must be given for each --lora or for none; 2 for 1.",
        ),
        (
            ("verify", "{new}", "--against", "{source}", "--lora-gate-order", "gate_up"),
            "--lora-gate-order must be given for each --lora or for none; 1 for 0.",
        ),
        (("convert", "{source}", "{new}", "--lora", "{source}", "--lora-scale", "nan"), "nan is not a finite number"),
        (("convert", "{source}", "{new}", "--lora", "{source}", "--lora-alpha", "inf"), "inf is not a finite number"),
        (("convert", "{source}", ""), "Invalid value for 'DST': it is empty"),
        (("convert", "", "{new}"), "Invalid value for 'SRC': it is empty"),
        (("convert", "Some/Model", "{new}"), "Some/Model is no file or folder here, and Hugging Face's cache in"),
        (("inspect", "{bad}"), "is 3 bytes, cut off or something else"),
        (("inspect", "{folder}/x"), "No such file or directory"),
        (("verify", "{source}", "--against", "{source}"), "must be a prepared checkpoint; it is not"),
        (("verify", "{source}"), "Missing option '--against'"),
    ],
)
def test_refusals_are_one_line_and_exit_code_2(source, tmp_path, capsys, arguments, message):
    bad = tmp_path / "bad.safetensors"
    bad.write_bytes(b"bad")
    names = {"none": tmp_path / "none.safetensors", "bad": bad, "source": source, "folder": tmp_path}
    names["new"] = tmp_path / "new.safetensors"
    code, out, err = call(capsys, *(argument.format(**names) for argument in arguments))
    assert (code, out) == (2, "")
    assert err.startswith("h3mlp: error: ")
    assert message in err
    assert err.count("\n") == 1
    assert sorted(path.name for path in tmp_path.iterdir()) == ["bad.safetensors", "source.safetensors"]


def test_a_full_disk_is_exit_code_2(source, tmp_path, capsys, monkeypatch):
    """What is finished stays for --resume."""
    from h3mlp.checkpoint.writer import Writer

    def full(*_arguments, **_options):
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patched:
        patched.setattr(Writer, "finish", full)
        code, _, err = call(capsys, "convert", source, tmp_path / "prepared")
    assert code == 2
    assert err == "h3mlp: error: [Errno 28] No space left on device; --resume goes on with what was finished\n"
    assert not (tmp_path / "prepared").exists()
    assert call(capsys, "convert", source, tmp_path / "prepared", "--resume")[0] == 0


def test_two_adapters_with_a_scale_each(source, tmp_path, capsys):
    content = {
        f"blocks.0.mlp.fc1.lora_{name}.weight": torch.zeros(shape) for name, shape in (("A", (4, 256)), ("B", (256, 4)))
    }
    loras = [save(content, tmp_path / f"{i}.safetensors") for i in range(2)]
    given = ("--lora", loras[0], "--lora-scale", "0.5", "--lora", loras[1], "--lora-scale", "-2")
    code, out, _ = call(capsys, "convert", source, tmp_path / "prepared.safetensors", *given, "--json")
    assert code == 0
    assert [lora["scale"] for lora in json.loads(out)["description"]["loras"]] == [0.5, -2.0]
    assert call(capsys, "verify", tmp_path / "prepared.safetensors", "--against", source, *given)[0] == 0
    assert "0.safetensors merged, scale 0.5" in call(capsys, "inspect", tmp_path / "prepared.safetensors")[1]


def test_what_decides_about_an_adapter_can_be_given(source, tmp_path, capsys):
    """Its alpha and its order, and both are told."""
    content = {
        f"blocks.0.mlp.fc1.lora_{name}.weight": torch.ones(shape) for name, shape in (("A", (4, 256)), ("B", (256, 4)))
    }
    lora = save(content, tmp_path / "lora.safetensors")
    given = ("--lora", lora, "--lora-alpha", "0.5", "--lora-gate-order", "up_gate")
    code, out, err = call(capsys, "convert", source, tmp_path / "prepared.safetensors", *given)
    assert (code, err) == (0, "")
    assert "lora.safetensors merged, scale 1, rank 4, alpha 0.5 as given, rows up_gate" in out
    assert "alpha 0.5 as given, rows up_gate" in call(capsys, "inspect", tmp_path / "prepared.safetensors")[1]
    assert call(capsys, "verify", tmp_path / "prepared.safetensors", "--against", source, *given)[0] == 0
    code, _, err = call(capsys, "verify", tmp_path / "prepared.safetensors", "--against", source, *given[:2])
    assert code == 2
    assert "alpha 4 ASSUMED" in err


@pytest.mark.parametrize("value", ["nan", "inf"])
def test_json_is_json_whatever_the_numbers(source, tmp_path, capsys, value):
    """With NaN or infinity in a scale of a prepared checkpoint."""
    path = tmp_path / "prepared.safetensors"
    call(capsys, "convert", source, path)
    with safe_open(path, "pt") as file:
        metadata = file.metadata()
    tensors = load_file(path)
    tensors["blocks.0.fc1_swiglu.weight_scale"][3] = float(value)
    save(tensors, path, **metadata)
    for arguments in (("inspect", path), ("verify", path, "--against", source)):
        out = call(capsys, *arguments, "--json")[1]
        json.loads(out, parse_constant=lambda constant: pytest.fail(f"{constant} is no JSON"))


SEVERAL = """
import sys
from h3mlp.tools import cli
for line in sys.argv[1:]:
    try:
        cli.main(line.split("|"))
    except SystemExit as stop:
        print("exit code", stop.code or 0)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="file names of any bytes")
def test_a_path_that_the_output_cannot_show(source, tmp_path):
    """Output in ASCII, an umlaut and a byte that is no UTF-8: results and refusals come all the same, and a plot."""
    name = os.fsdecode("Prüfst".encode() + b"\xfcck")
    folder, named = tmp_path / name, tmp_path / f"{name}.safetensors"
    folder.mkdir()
    shutil.copy(source, folder / "source.safetensors")
    lines = [
        f"convert|{folder}/source.safetensors|{folder}/new.safetensors",
        f"convert|{folder}/source.safetensors|{named}|--json",
        f"inspect|{folder}/new.safetensors",
        f"verify|{named}|--against|{source}|--rows|2|--plot|{folder}/plot.svg",
        f"inspect|{folder}/none.safetensors",
    ]
    ascii_only = {"PYTHONIOENCODING": "ascii", "PYTHONUTF8": "0", "LC_ALL": "C", "PYTHONCOERCECLOCALE": "0"}
    command = [sys.executable, "-c", SEVERAL, *lines]
    done = subprocess.run(command, capture_output=True, check=True, env={**os.environ, **ascii_only}, timeout=120)
    out, err = done.stdout.decode("ascii"), done.stderr.decode("ascii")
    assert [line for line in out.splitlines() if line.startswith("exit code")] == ["exit code 0"] * 4 + ["exit code 2"]
    assert "\\" in out
    assert err.startswith("h3mlp: error: ")
    assert err.count("\n") == 1
    assert (folder / "plot.svg").read_text().startswith("<?xml")


def test_progress_is_shown_on_a_terminal(tmp_path):
    """The layer, the speed and the time that is left, on stderr alone."""
    pty = pytest.importorskip("pty")
    source = save(checkpoint(layers=8), tmp_path / "source.safetensors")
    pid, terminal = pty.fork()
    if not pid:
        os.environ |= {"TERM": "xterm", "COLUMNS": "120"}
        os.execv(
            sys.executable, [sys.executable, "-m", "h3mlp", "convert", str(source), str(tmp_path / "p.safetensors")]
        )
    shown = b""
    try:
        while part := os.read(terminal, 4096):
            shown += part
    except OSError:  # the other end was closed
        pass
    assert os.waitpid(pid, 0)[1] == 0
    assert b"B/s" in shown
    assert b"blocks." in shown


def test_converted_helper_and_command_agree(source, tmp_path, capsys):
    call(capsys, "convert", source, tmp_path / "prepared.safetensors")
    want = converted(checkpoint("diffusers"), tmp_path / "other")
    assert (tmp_path / "prepared.safetensors").read_bytes() == want.read_bytes()
