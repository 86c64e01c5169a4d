"""What each way of offloading diffusers' MiniMax-H3 leaves on the GPU and takes of the host's memory, with h3mlp.

A model of real size with some blocks and random weights runs twice for each way, in a process of its own, all side by
side; the second run is shown. *On the GPU* is the most that is allocated after any block, *peak* within the run. Host
memory is the process's own (anonymous, pinned included) and that of mapped files, which the system takes back when it
needs it.
"""

import datetime
import json
import multiprocessing
import tempfile
from pathlib import Path

import click
import torch
from accelerate import cpu_offload, cpu_offload_with_hook
from diffusers.models.transformers.transformer_minimax_h3 import MiniMaxH3Transformer3DModel
from rich.console import Console
from rich.progress import track
from rich.table import Table

from h3mlp import contract
from h3mlp.checkpoint import convert
from h3mlp.integrations import diffusers as integration
from h3mlp.tools.bench import harness

CUDA, CPU = torch.device("cuda", 0), torch.device("cpu")


def group(**options):
    return lambda model: model.enable_group_offload(onload_device=CUDA, offload_device=CPU, **options)


WAYS = {
    "none": lambda model: model.to(CUDA),
    "model": lambda model: cpu_offload_with_hook(model, CUDA),
    "group, blocks": group(offload_type="block_level", num_blocks_per_group=1),
    "group, blocks, stream": group(offload_type="block_level", num_blocks_per_group=1, use_stream=True),
    "group, leaves": group(offload_type="leaf_level"),
    "group, leaves, stream": group(offload_type="leaf_level", use_stream=True),
    "sequential": lambda model: cpu_offload(model, CUDA),
}


def make(blocks: int, folder: Path) -> None:
    """The model as diffusers saves it, and what is converted of it."""
    torch.manual_seed(0)
    with torch.device(CUDA):
        model = MiniMaxH3Transformer3DModel(num_layers=blocks, num_refiner_layers=1)
    model.to(CPU, torch.bfloat16).save_pretrained(folder / "bf16")
    convert.run(folder / "bf16", folder / "fp8", copy_others=True)


def host_gb() -> tuple[float, float]:
    """Resident memory of this process: its own, and of files."""
    lines = (line.split() for line in Path("/proc/self/status").read_text().splitlines())
    gb = {words[0]: int(words[1]) * 1024 / 1e9 for words in lines if words[0].startswith("Rss")}
    return gb["RssAnon:"] + gb["RssShmem:"], gb["RssFile:"]


@torch.no_grad()
def measure(task: tuple[str, str, Path, int]) -> dict:
    """One way of offloading, for a model with FC1 quantized in memory or taken of a converted checkpoint."""
    way, origin, folder, rows = task
    model = MiniMaxH3Transformer3DModel.from_pretrained(folder / "bf16", torch_dtype=torch.bfloat16).eval()
    integration.apply(model, **({"checkpoint": folder / "fp8"} if origin == "checkpoint" else {}))
    fc1 = sum(block.ff.net[0].weight.nbytes for block in model.transformer_blocks)
    WAYS[way](model)
    after = []
    for block in model.transformer_blocks:
        block.register_forward_hook(lambda *_: after.append(torch.cuda.memory_allocated()))
    text, video, audio = torch.arange(rows, device=CUDA).split([rows // 8, rows - 2 * (rows // 8), rows // 8])
    config = model.config
    given = {
        "hidden_states": torch.randn(1, len(video), 4 * config.in_channels, device=CUDA),
        "audio_hidden_states": torch.randn(1, len(audio), config.audio_in_channels, device=CUDA),
        "encoder_hidden_states": torch.randn(1, len(text), config.text_dim, device=CUDA).bfloat16(),
        "timestep": torch.tensor([0.3, 0.7, 0.0], device=CUDA),
        "timestep_indices": torch.randint(3, (rows,), device=CUDA),
        "token_tags": torch.cat([torch.full_like(part, tag) for part, tag in ((text, 1), (video, 0), (audio, 2))]),
        "position_ids": torch.randint(20, (rows, 3), device=CUDA),
        "video_indices": video,
        "audio_indices": audio,
        "text_indices": text,
    }
    for _ in range(2):
        after.clear()
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        model(**given, return_dict=False)
    own, files = host_gb()
    return {
        "way": way,
        "fc1": origin,
        "fc1_gb": fc1 / 1e9,
        "gpu_gb": max(after) / 1e9,
        "peak_gb": torch.cuda.max_memory_allocated() / 1e9,
        "host_gb": own,
        "host_files_gb": files,
    }


@click.command(help=__doc__)
@click.option("--blocks", default=8, show_default=True, help="Blocks of the model.")
@click.option("--rows", default=1024, show_default=True, help="Rows of the packed sequence.")
@click.option("--json-out", type=click.Path(dir_okay=False, path_type=Path), help="Write the result into FILE.")
def main(blocks: int, rows: int, json_out: Path | None) -> None:
    context = multiprocessing.get_context("spawn")
    with tempfile.TemporaryDirectory() as folder, context.Pool(len(WAYS), maxtasksperchild=1) as pool:
        pool.apply(make, (blocks, Path(folder)))
        tasks = [(way, origin, Path(folder), rows) for way in WAYS for origin in ("memory", "checkpoint")]
        found = list(track(pool.imap(measure, tasks, chunksize=1), "measuring", len(tasks)))
    table = Table(title=f"{blocks} blocks of {contract.HIDDEN}, FC1 {found[0]['fc1_gb']:.2f} GB, {rows} rows; GB")
    names = ("offloading", "FC1 from", "on the GPU", "peak", "host, own", "host, files")
    for name in names:
        table.add_column(name, justify="left" if name in names[:2] else "right")
    for row in found:
        numbers = (f"{row[key]:.2f}" for key in ("gpu_gb", "peak_gb", "host_gb", "host_files_gb"))
        table.add_row(row["way"], row["fc1"], *numbers)
    Console().print(table)
    if json_out:
        origin = {"date": datetime.date.today().isoformat(), "gpu": harness.gpu(torch.device("cuda", 0))}
        json_out.write_text(json.dumps({**origin, "blocks": blocks, "rows": rows, "results": found}, indent=2) + "\n")


if __name__ == "__main__":
    main()
