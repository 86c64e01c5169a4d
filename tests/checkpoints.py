"""Small checkpoints in every naming and form, and what must become of them, computed another way."""

import json
from pathlib import Path

import numpy as np
import numpy_contract as oracle
import torch
from safetensors.torch import save_file

from h3mlp.checkpoint import convert

HIDDEN, FFN = 256, 128
LAYERS, REFINERS = 2, 1

FORMS = (
    "BF16",
    "FP16",
    "FP32",
    "E4M3 per channel",
    "E4M3 per tensor",
    "E4M3 per 128x128 block",
    "E5M2 per channel",
    "E5M2 per tensor",
    "E5M2 per 128x128 block",
)
REPACKED = ("E4M3 per channel", "E4M3 per tensor")

FC1 = {"native": "mlp.fc1", "diffusers": "ff.net.0.proj"}
FC2 = {"native": "mlp.fc2", "diffusers": "ff.net.2"}
STACKS = {
    "native": {"blocks": "blocks", "token_refiner.blocks": "token_refiner.blocks"},
    "diffusers": {"blocks": "transformer_blocks", "token_refiner.blocks": "token_refiner.refiner_blocks"},
}

_DTYPES = {
    "BF16": torch.bfloat16,
    "FP16": torch.float16,
    "FP32": torch.float32,
    "E4M3": torch.float8_e4m3fn,
    "E5M2": torch.float8_e5m2,
}


def block_names(naming: str, layers: int = LAYERS, refiners: int = REFINERS) -> dict[str, str]:
    """What the naming calls each layer, by what h3mlp calls it."""
    of = STACKS[naming]
    names = {f"blocks.{i}": f"{of['blocks']}.{i}" for i in range(layers)}
    return names | {f"token_refiner.blocks.{i}": f"{of['token_refiner.blocks']}.{i}" for i in range(refiners)}


def stored_as(weight: torch.Tensor, form: str, scale_name: str = "weight_scale") -> dict[str, torch.Tensor]:
    """An FP32 weight in a form, by the last part of the name."""
    dtype, _, granularity = form.partition(" per ")
    if not granularity:
        return {"weight": weight.to(_DTYPES[dtype])}
    largest = torch.finfo(_DTYPES[dtype]).max
    if granularity == "channel":
        scale = weight.abs().amax(1, keepdim=True) / largest
        spread = scale
    elif granularity == "tensor":
        scale = spread = weight.abs().amax() / largest
    else:
        blocks = weight.unflatten(0, (-1, 128)).unflatten(2, (-1, 128))
        scale = blocks.abs().amax((1, 3)) / largest
        spread = scale.repeat_interleave(128, 0).repeat_interleave(128, 1)
    return {"weight": (weight / spread).to(_DTYPES[dtype]), scale_name: scale}


def values_of(stored: dict[str, torch.Tensor]) -> torch.Tensor:
    """The FP32 weight that a form stands for."""
    weight = stored["weight"].float()
    scale = next((tensor for name, tensor in stored.items() if name != "weight"), torch.tensor(1.0))
    if scale.dim() == 2 and scale.shape[1] > 1:
        scale = scale.repeat_interleave(128, 0).repeat_interleave(128, 1)
    return weight * (scale if scale.dim() != 1 or scale.numel() == 1 else scale[:, None])


def checkpoint(
    naming: str = "native",
    form: str = "BF16",
    prefix: str = "",
    layers: int = LAYERS,
    refiners: int = REFINERS,
    seed: int = 0,
    **of_form: str,
) -> dict[str, torch.Tensor]:
    """All tensors. For one seed, namings and forms are of the same weights."""
    generator = torch.Generator().manual_seed(seed)
    tensors = {}
    for name in block_names(naming, layers, refiners).values():
        gate, up = torch.randn(2, FFN, HIDDEN, generator=generator).mul_(HIDDEN**-0.5)
        weight = torch.cat([gate, up] if naming == "native" else [up, gate])
        for tail, tensor in stored_as(weight.bfloat16().float(), form, **of_form).items():
            tensors[f"{prefix}{name}.{FC1[naming]}.{tail}"] = tensor
        tensors[f"{prefix}{name}.norm2.weight"] = (1 + torch.randn(HIDDEN, generator=generator) / 10).bfloat16()
        tensors[f"{prefix}{name}.{FC2[naming]}.weight"] = torch.randn(HIDDEN, FFN, generator=generator).bfloat16()
    tensors[f"{prefix}proj_out.weight"] = torch.randn(8, HIDDEN, generator=generator)
    return tensors


def fc1_of(tensors: dict[str, torch.Tensor], naming: str, layer: str, prefix: str = "") -> dict[str, torch.Tensor]:
    """The stored FC1 of a layer, by the last part of the name."""
    start = f"{prefix}{block_names(naming)[layer]}.{FC1[naming]}."
    return {name.removeprefix(start): tensor for name, tensor in tensors.items() if name.startswith(start)}


def gate_first(weight: torch.Tensor, naming: str) -> torch.Tensor:
    return weight if naming == "native" else torch.cat(weight.chunk(2)[::-1])


def expected(stored: dict[str, torch.Tensor], naming: str, form: str) -> tuple[np.ndarray, np.ndarray]:
    """Packed codes and scales, with nothing of h3mlp."""
    if form not in REPACKED:
        return oracle.prepare(gate_first(values_of(stored), naming).numpy())
    scale = next(tensor for name, tensor in stored.items() if name != "weight")
    codes = oracle.from_torch(gate_first(stored["weight"], naming))
    scales = gate_first(scale.flatten().expand(2 * FFN), naming).numpy()
    rows = np.arange(2 * FFN)
    target = oracle.packed_row(rows % FFN, rows // FFN)
    packed, of_packed = np.empty_like(codes), np.empty_like(scales)
    packed[target], of_packed[target] = codes, scales
    return packed, of_packed


def save(tensors: dict[str, torch.Tensor], path: Path, **metadata: str) -> Path:
    """A safetensors file."""
    path.parent.mkdir(parents=True, exist_ok=True)
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, path, metadata or None)
    return path


def save_sharded(tensors: dict[str, torch.Tensor], folder: Path, shards: int = 3) -> Path:
    """A folder of several files with an index, dealt out as the names come."""
    folder.mkdir(parents=True, exist_ok=True)
    names = [f"model-{i + 1:05d}-of-{shards:05d}.safetensors" for i in range(shards)]
    weight_map = {name: names[i % shards] for i, name in enumerate(tensors)}
    for file in names:
        save({name: tensors[name] for name, of in weight_map.items() if of == file}, folder / file)
    total = sum(tensor.nbytes for tensor in tensors.values())
    index = {"metadata": {"total_size": total}, "weight_map": weight_map}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    return folder


def converted(tensors: dict[str, torch.Tensor], folder: Path, **options) -> Path:
    """A prepared file made of these."""
    source = save(tensors, folder / "source.safetensors")
    destination = folder / "prepared.safetensors"
    convert.run(source, destination, **options)
    return destination
