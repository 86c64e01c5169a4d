"""Files that appear whole or not at all, and what JSON can hold."""

import math
import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


@contextmanager
def whole(path: Path) -> Iterator[Path]:
    """A file of the same name to write, near ``path``, which takes its place at the end, or is removed if the writing
    fails. Another process may be looking for ``path``, or writing it too. A symlink is followed.

    Raises:
        OSError: something else than a file is there.
    """
    path = Path(os.path.realpath(path))
    if path.exists() and not path.is_file():
        raise OSError(f"{path} must be a file; there is something else")
    with tempfile.TemporaryDirectory(dir=path.parent, prefix=".") as folder:
        partial = Path(folder, path.name)
        yield partial
        partial.replace(path)


def finite(content: object) -> object:
    """The same without the numbers that JSON does not have: None for NaN and infinity."""
    if isinstance(content, dict):
        return {key: finite(value) for key, value in content.items()}
    if isinstance(content, (list, tuple)):
        return [finite(value) for value in content]
    return None if isinstance(content, float) and not math.isfinite(content) else content
