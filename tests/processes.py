"""Several processes of torch.distributed, and what they do in the tests of ``h3mlp.distributed``."""

import tempfile
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from helpers import make_inputs, make_mlp_inputs, nan_buffers, nan_mlp_buffers, without_adaln
from torch.distributed.tensor import Replicate, Shard, distribute_tensor, init_device_mesh

from h3mlp import FC1SwiGLU, PackedFC1, contract, fc1_swiglu_fp8, mlp_fp8
from h3mlp.distributed import shard


def run(work: Callable, world: int, backend: str = "gloo", devices: tuple[str, ...] = ("cpu",), *arguments) -> None:
    """``work(rank, world, device, *arguments)`` in so many processes, dealt to the devices. Raises what any raises."""
    with tempfile.TemporaryDirectory() as folder:
        store = (Path(folder, "store").as_uri(), backend, devices)
        torch.multiprocessing.spawn(_start, (work, world, *store, *arguments), world)


def _start(
    rank: int, work: Callable, world: int, store: str, backend: str, devices: tuple[str, ...], *arguments
) -> None:
    device = torch.device(devices[rank % len(devices)])
    if device.type == "cuda":
        torch.cuda.set_device(device)
    torch.set_num_threads(1)
    dist.init_process_group(backend, init_method=store, rank=rank, world_size=world)
    try:
        work(rank, world, device, *arguments)
        dist.barrier()
    finally:
        dist.destroy_process_group()


def problem(rows: int, hidden: int, ffn: int, device: torch.device) -> contract.FC1Inputs:
    """The same on every process."""
    return contract.FC1Inputs(*(t.to(device) for t in make_inputs(rows, hidden, ffn)))


def gathered(part: torch.Tensor, world: int, dim: int) -> torch.Tensor:
    parts = [torch.full_like(part, torch.nan) for _ in range(world)]
    dist.all_gather(parts, part.contiguous())
    return torch.cat(parts, dim)


def split_rows(rank: int, world: int, device: torch.device, rows: int, hidden: int, ffn: int) -> None:
    """Sequence parallel: each process has some rows of x and the whole weight."""
    inputs = problem(rows, hidden, ffn, device)
    mine = inputs._replace(x=inputs.x.chunk(world)[rank], adaln_index=inputs.adaln_index.chunk(world)[rank])
    buffers = nan_buffers(rows // world, hidden, ffn, device)
    assert torch.equal(gathered(fc1_swiglu_fp8(*mine, **buffers._asdict()), world, 0), fc1_swiglu_fp8(*inputs)), (
        "split rows differ from the whole"
    )


def split_columns(rank: int, world: int, device: torch.device, rows: int, hidden: int, ffn: int) -> None:
    """Tensor parallel: each process has all rows of x and some columns of the FFN."""
    inputs = problem(rows, hidden, ffn, device)
    packed = PackedFC1(inputs.fc1_weight_q, inputs.fc1_weight_scale)
    buffers = nan_buffers(rows, hidden, ffn // world, device)
    mine = fc1_swiglu_fp8(*inputs[:5], *shard(packed, rank, world), **buffers._asdict())
    whole = fc1_swiglu_fp8(*inputs)
    assert torch.equal(mine, whole.chunk(world, dim=1)[rank])
    assert torch.equal(gathered(mine, world, 1), whole), "split columns differ from the whole"
    module = FC1SwiGLU.from_packed(shard(packed, rank, world), inputs.x_norm_weight)
    assert torch.equal(module(inputs.x, *inputs[2:5]), mine)


def distributed_tensors(
    _rank: int, world: int, device: torch.device, rows: int, hidden: int, ffn: int, mesh_shape: tuple[int, ...]
) -> None:
    """DTensors in every way of splitting that the mesh allows, and the result's placement."""
    mesh = init_device_mesh(device.type, mesh_shape)
    assert mesh.size() == world
    inputs = problem(rows, hidden, ffn, device)
    plain = without_adaln(inputs)
    same, split = Replicate(), Shard(0)
    ways = {
        "whole": (same, same, same),
        "rows": (split, same, Shard(0)),
        "columns": (same, split, Shard(1)),
    }
    chosen = [(way,) for way in ways] if len(mesh_shape) == 1 else [("rows", "columns"), ("columns", "rows")]
    for given in (inputs, plain):
        want = fc1_swiglu_fp8(*given)
        for names in chosen:
            of_rows, of_weight, of_out = zip(*(ways[name] for name in names), strict=True)
            placed = {"x": of_rows, "adaln_index": of_rows, "fc1_weight_q": of_weight, "fc1_weight_scale": of_weight}
            placed = {name: placed.get(name, [same] * len(names)) for name in given._fields}
            # Every process has the whole tensor, so nothing is sent, which gloo cannot do with FP8.
            tensors = [
                value if value is None else distribute_tensor(value, mesh, placed[name], src_data_rank=None)
                for name, value in given._asdict().items()
            ]
            for call in (lambda *t: torch.ops.h3mlp.fc1_swiglu_fp8(*t, contract.EPS, "fp32", "fused"), fc1_swiglu_fp8):
                y = call(*tensors)
                assert y.placements == of_out, (names, y.placements)
                expected = distribute_tensor(want, mesh, of_out, src_data_rank=None)
                assert torch.equal(y.to_local(), expected.to_local()), names
            with pytest.raises(ValueError, match="out must be None, since there are DTensors among the arguments"):
                fc1_swiglu_fp8(*tensors, out=distribute_tensor(torch.empty_like(want), mesh, of_out))


def mlp_rows(rank: int, world: int, device: torch.device, rows: int, hidden: int, ffn: int) -> None:
    """The whole MLP, rows split by hand and as DTensors."""
    inputs = contract.MLPInputs(*(t.to(device) for t in make_mlp_inputs(rows, hidden, ffn)))
    own = slice(rank * rows // world, (rank + 1) * rows // world)
    buffers = nan_mlp_buffers(rows // world, hidden, ffn, device)
    assert torch.equal(mlp_fp8(*inputs.rows(own), **buffers._asdict()), mlp_fp8(*inputs)[own])
    mesh = init_device_mesh(device.type, (world,))
    for given in (inputs, without_adaln(inputs)):
        want = mlp_fp8(*given)
        split = ("x", "adaln_index", "residual")
        tensors = [
            t
            if t is None
            else distribute_tensor(t, mesh, [Shard(0) if name in split else Replicate()], src_data_rank=None)
            for name, t in given._asdict().items()
        ]
        got = mlp_fp8(*tensors)
        assert got.placements == (Shard(0),)
        assert torch.equal(got.to_local(), want[own])
        with pytest.raises(ValueError, match="out must be None, since there are DTensors among the arguments"):
            mlp_fp8(*tensors, out=distribute_tensor(torch.empty_like(want), mesh, [Shard(0)]))


def distributed_module(rank: int, world: int, device: torch.device, rows: int, hidden: int, ffn: int) -> None:
    """FC1SwiGLU whose weight is a DTensor, on [2, rows / 2, H]."""
    mesh = init_device_mesh(device.type, (world,))
    inputs = problem(rows, hidden, ffn, device)
    packed = PackedFC1(inputs.fc1_weight_q, inputs.fc1_weight_scale)
    module = FC1SwiGLU.from_packed(packed, inputs.x_norm_weight)
    given = (inputs.x.view(2, -1, hidden), *inputs[2:4], inputs.adaln_index.view(2, -1))
    want = module(*given)
    for name, weight in list(module.named_parameters()):
        placement = Replicate() if name == "norm_weight" else Shard(0)
        split = distribute_tensor(weight.data, mesh, [placement], src_data_rank=None)
        setattr(module, name, torch.nn.Parameter(split, requires_grad=False))
    got = module(*(distribute_tensor(t, mesh, [Replicate()], src_data_rank=None) for t in given))
    assert got.placements == (Shard(2),)
    assert torch.equal(got.to_local(), want.chunk(world, dim=2)[rank])
