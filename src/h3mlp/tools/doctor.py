"""``h3mlp doctor``: the environment, and which backend serves which device, or why none does."""

import platform
import sys

import torch
from rich.console import Group, RenderableType
from rich.table import Table

from .._version import __version__
from ..backends.cute import jit
from ..operators import dispatch


def environment() -> dict:
    """Versions and hardware that decide about results and speed."""
    found = {
        "h3mlp": __version__,
        "python": platform.python_version(),
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
        "system": f"{platform.system()} {platform.machine()}",
        "cpu": _cpu_name(),
        "cpu_capability": torch.backends.cpu.get_cpu_capability(),
        "threads": torch.get_num_threads(),
        **jit.versions(),
        "gpus": [],
    }
    for i in range(torch.cuda.device_count()):
        gpu = torch.cuda.get_device_properties(i)
        found["gpus"].append(
            {"name": gpu.name, "capability": f"{gpu.major}.{gpu.minor}", "memory_bytes": gpu.total_memory}
        )
    return found


def report() -> dict:
    """The environment, the cache of compiled kernels, and every backend's answer for every device of this machine."""
    backends = [
        {"device": str(device), **verdict._asdict()}
        for device in dispatch.devices()
        for verdict in dispatch.survey(device)
    ]
    device, reason = dispatch.best()
    best = {"device": str(device), "backend": dispatch.select(device).NAME, "reason": reason}
    return {"environment": environment(), "kernel_cache": _kernel_cache(), "backends": backends, "best": best}


def render(found: dict) -> RenderableType:
    """The report as tables for a terminal."""
    environment_table = Table("Environment", "", show_edge=False, pad_edge=False)
    for name, value in found["environment"].items():
        if name != "gpus":
            environment_table.add_row(name, str(value) if value is not None else f"none: {_missing(name)}")
    for i, gpu in enumerate(found["environment"]["gpus"]):
        memory = f"{gpu['memory_bytes'] / 2**30:.0f} GiB"
        environment_table.add_row(f"gpu {i}", f"{gpu['name']}, compute capability {gpu['capability']}, {memory}")
    cache = found["kernel_cache"]
    environment_table.add_row("kernel_cache", f"{cache['folder']}: {cache['files']} files, {cache['bytes']:,} bytes")
    backends = Table("Device", "Backend", "Serves", "Why", show_edge=False, pad_edge=False)
    for row in found["backends"]:
        backends.add_row(row["device"], row["backend"], "yes" if row["serves"] else "no", row["reason"])
    best = found["best"]
    return Group(environment_table, "", backends, "", f"Best: backend {best['backend']} on {best['device']}.")


def _missing(name: str) -> str:
    return "a CPU build of torch" if name == "cuda" else jit.install_hint()


def _kernel_cache() -> dict:
    folder = jit.cache_folder()
    try:
        sizes = [file.stat().st_size for file in folder.glob("*.o")]
    except OSError:  # not readable, or another process is at work in it
        sizes = []
    return {"folder": str(folder), "files": len(sizes), "bytes": sum(sizes)}


def _cpu_name() -> str:
    if sys.platform == "linux":
        with open("/proc/cpuinfo", encoding="utf-8") as lines:
            for line in lines:
                if line.startswith("model name"):
                    return line.split(":", 1)[1].strip()
    return platform.processor() or platform.machine()
