"""Arrows point down: what computes imports nothing of what calls it, nor of what shows it."""

import ast
from pathlib import Path

import h3mlp

ROOT = Path(h3mlp.__file__).parent

LEVELS = (
    ("_version", "files", "contract"),
    ("check", "reference"),
    ("weights", "accuracy", "synthetic"),
    ("backends",),
    ("operators",),
    ("checkpoint", "distributed"),
    ("module",),
    ("integrations", "tools"),
)
"""From the bottom up. The names that the package itself has are of the lowest level."""

LEVEL_OF = {name: level for level, names in enumerate(LEVELS) for name in names}
OF_THE_PACKAGE = ("__version__",)


def imported(file: Path):
    """The names at the package's top level that a file imports, lazily or not."""
    package = ("h3mlp", *file.relative_to(ROOT).parts[:-1])
    for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
        if isinstance(node, ast.ImportFrom) and node.level:
            base = (*package[: len(package) - node.level + 1], *(node.module.split(".") if node.module else ()))
            yield from [base[1]] if len(base) > 1 else [alias.name for alias in node.names]


def test_arrows_point_down():
    for file in sorted(ROOT.rglob("*.py")):
        here = file.relative_to(ROOT).parts[0].removesuffix(".py")
        if here in ("__init__", "__main__"):
            continue
        for name in set(imported(file)) - {here, *OF_THE_PACKAGE}:
            assert LEVEL_OF[name] < LEVEL_OF[here], f"{file} imports {name}"


def test_every_place_has_a_level():
    names = {path.name.removesuffix(".py") for path in ROOT.iterdir() if path.suffix == ".py" or path.is_dir()}
    assert names - {"__pycache__"} == {*LEVEL_OF, "__init__", "__main__"}


def test_files_stay_short():
    for file in sorted(ROOT.rglob("*.py")):
        assert len(file.read_text(encoding="utf-8").splitlines()) < 500, file
