"""What README.md shows is what happens."""

import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from helpers import bits

import h3mlp
from h3mlp.checkpoint.container import open_checkpoint

README = Path(__file__).parent.parent / "README.md"

MEASURED = """
import sys
from h3mlp.tools.cli import main

def peak():
    return next(int(line.split()[1]) for line in open("/proc/self/status") if line.startswith("VmHWM"))

imported = peak()
try:
    main(sys.argv[1:])
finally:
    print(peak() - imported, file=sys.stderr)
"""

MEMORY = {"convert": 0.35e9, "inspect": 0.35e9, "verify": 0.95e9}
"""In bytes, beyond what importing takes, which is 0.25 GB with a torch for the CPU and more with one that brings CUDA.
The rows in work take 0.1 GB; a layer has 0.31 GB in BF16. Verifying keeps one, and its prepared half."""


def section(title: str) -> str:
    return README.read_text(encoding="utf-8").split(f"## {title}\n")[1].split("\n## ")[0]


def test_the_example_runs():
    """At the real size, as printed."""
    (example,) = re.findall(r"```python\n(.*?)```", section("Use"), re.DOTALL)
    names: dict = {}
    exec(example, names)
    assert (names["y"].shape, names["y"].dtype) == ((64, 14336), torch.bfloat16)
    assert names["y"].isfinite().all()


def without_figures(text: str) -> list[list[str]]:
    """Words; the weights and the machine are others."""
    return [re.sub(r"\d[\d.e-]*", "#", line).split() for line in text.strip().splitlines()]


@pytest.mark.skipif(sys.platform != "linux", reason="memory is measured by /proc")
def test_the_way_from_a_checkpoint(tmp_path):
    """Two layers of real size, from making them to the module: every command prints what stands there, in bounded
    memory, and the prepared weight has the bits of ``prepare_fc1_weight_fp8``."""
    make, use = re.findall(r"```python\n(.*?)```", section("From a checkpoint"), re.DOTALL)
    subprocess.run([sys.executable, "-c", make], check=True, cwd=tmp_path)
    (shown,) = re.findall(r"```\n(\$ .*?)```", section("From a checkpoint"), re.DOTALL)
    commands = re.findall(r"\$ h3mlp (.*)\n([^$]*)", shown)
    assert [command.split()[0] for command, _ in commands] == list(MEMORY)
    for command, printed in commands:
        words = command.split()
        arguments = [sys.executable, "-c", MEASURED, *words]
        done = subprocess.run(arguments, capture_output=True, text=True, check=False, cwd=tmp_path, timeout=300)
        assert done.returncode == 0, done.stderr
        assert without_figures(done.stdout) == without_figures(printed)
        assert 1024 * int(done.stderr) < MEMORY[words[0]]
    done = subprocess.run([sys.executable, "-c", use], capture_output=True, text=True, check=True, cwd=tmp_path)
    assert done.stdout == "torch.Size([1, 64, 14336])\n"
    source = open_checkpoint(tmp_path / "two-layers.safetensors")
    weight = source.tensors["transformer_blocks.1.ff.net.0.proj.weight"].read()
    want = h3mlp.PackedFC1.from_bf16(weight, gate_order="up_gate")
    got = h3mlp.load_fc1(tmp_path / "two-layers-fp8.safetensors", 1)
    assert torch.equal(bits(got.weight), bits(want.weight))
    assert torch.equal(got.scale, want.scale)


def test_its_links_lead_somewhere():
    for page in (README, *README.parent.glob("docs/*.md")):
        for target in re.findall(r"\]\((?!http)([^)#]+)\)", page.read_text(encoding="utf-8")):
            assert (page.parent / target).exists(), f"{page.name} links to {target}"
