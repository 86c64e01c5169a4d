"""Checkpoints by the name they have on Hugging Face, where a snapshot is in the local cache. Nothing is downloaded."""

import re
from pathlib import Path

_NAME = re.compile(r"(?P<repository>[\w-][\w.-]*/[\w-][\w.-]*)(?P<inside>(?:/[\w.-]+)*)")


def find(path: Path | str) -> Path:
    """The path, if something is there or it is no name of Hugging Face's, "Organization/Name" and perhaps a folder or
    file inside; else the place of that snapshot.

    Raises:
        FileNotFoundError: there is neither.
    """
    path = Path(path)
    match = _NAME.fullmatch(path.as_posix())
    if match is None or path.exists():
        return path
    if path.suffix in (".safetensors", ".json") and (not match["inside"] or path.parent.exists()):
        return path  # a file that is not here
    try:
        from huggingface_hub import constants, errors, snapshot_download
    except ImportError:
        advice = "to look for it in Hugging Face's cache, pip install huggingface_hub"
    else:
        try:
            snapshot = snapshot_download(match["repository"], local_files_only=True)
            return Path(snapshot, *match["inside"].split("/"))
        except errors.LocalEntryNotFoundError:
            advice = (
                f"Hugging Face's cache in {constants.HF_HUB_CACHE} has none of that name: "
                f"`hf download {match['repository']}` first"
            )
    raise FileNotFoundError(f"{path} is no file or folder here, and {advice}")
