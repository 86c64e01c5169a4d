import re
from pathlib import Path

import torch

README = Path(__file__).parent.parent / "README.md"


def test_the_example_runs():
    """At the real size, as printed."""
    (example,) = re.findall(r"```python\n(.*?)```", README.read_text(encoding="utf-8"), re.DOTALL)
    names: dict = {}
    exec(example, names)
    assert (names["y"].shape, names["y"].dtype) == ((64, 14336), torch.bfloat16)
    assert names["y"].isfinite().all()


def test_its_links_lead_somewhere():
    for page in (README, *README.parent.glob("docs/*.md")):
        for target in re.findall(r"\]\((?!http)([^)#]+)\)", page.read_text(encoding="utf-8")):
            assert (page.parent / target).exists(), f"{page.name} links to {target}"
