"""No name that torch keeps to itself is used but where a kernel has to, and by a module that is one."""

import ast
from pathlib import Path

import h3mlp

ROOT = Path(h3mlp.__file__).parent
SOURCES = [file for file in sorted(ROOT.rglob("*.py")) if "cute" not in file.relative_to(ROOT).parts]

OF_MODULES = frozenset(
    (
        *("_apply", "_load_from_state_dict"),  # what subclasses of torch.nn.Module override
        *("_forward_hooks", "_forward_pre_hooks", "_compiled_call_impl"),  # nothing public tells of hooks
    )
)
OF_NAMEDTUPLES = frozenset(("_asdict", "_fields", "_replace"))
OF_OTHERS = frozenset(("_keep_in_fp32_modules",))  # diffusers', in its integration


def private(source: str):
    """Line and text of each name with one underscore before it that is taken of anything but self and cls."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Attribute) and node.attr.startswith("_") and not node.attr.startswith("__"):
            if ast.unparse(node.value) not in ("self", "cls"):
                yield node.lineno, node.attr
        elif isinstance(node, ast.ImportFrom) and not node.level and node.module.startswith("torch"):
            parts = [*node.module.split("."), *(alias.name for alias in node.names)]
            yield from ((node.lineno, part) for part in parts if part.startswith("_"))


def test_no_private_name_of_torch():
    allowed = OF_MODULES | OF_NAMEDTUPLES | OF_OTHERS
    for file in SOURCES:
        found = [entry for entry in private(file.read_text(encoding="utf-8")) if entry[1] not in allowed]
        assert not found, f"{file}: {found}"


def test_private_names_are_found():
    source = "import torch\nfrom torch._C import x\ntorch._scaled_mm(a)\nself._b\ntorch.autograd._profiler_enabled()"
    assert [name for _, name in private(source)] == ["_C", "_scaled_mm", "_profiler_enabled"]
