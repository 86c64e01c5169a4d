"""The programs in docs/integration.md print what stands below them."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

PAGE = Path(__file__).parent.parent / "docs" / "integration.md"
PROGRAM = re.compile(r"```python\n(.*?)```\n(?:(?!```).)*?```text\n(.*?)```", re.DOTALL)
PROGRAMS = PROGRAM.findall(PAGE.read_text(encoding="utf-8"))


def title(program: str) -> str:
    return re.findall(r"from (?:torch|diffusers|h3mlp)\S* import .*", program)[-1]


@pytest.mark.parametrize(("program", "printed"), PROGRAMS, ids=[title(program) for program, _ in PROGRAMS])
def test_integration(program, printed, tmp_path):
    if "diffusers" in program:
        pytest.importorskip("diffusers")
    file = tmp_path / "split.py"
    file.write_text(program, encoding="utf-8")
    launcher = (
        ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
        if "torch.distributed" in program
        else []
    )
    command = [sys.executable, *launcher, str(file)]
    environment = {**os.environ, "CUDA_VISIBLE_DEVICES": ""}
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=300, env=environment)
    assert done.returncode == 0, done.stderr
    assert done.stdout == printed


def test_every_program_is_run():
    text = PAGE.read_text(encoding="utf-8")
    assert len(PROGRAMS) == text.count("```python") == text.count("```text") == 5
