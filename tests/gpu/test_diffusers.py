"""diffusers' MiniMax-H3 on a GPU: a block of real size, and offloading."""

import copy

import pytest
import torch

pytest.importorskip("diffusers", reason="diffusers is not installed")

import minimax_h3
from diffusers.models.transformers.transformer_minimax_h3 import MiniMaxH3Transformer3DModel
from on_gpu import CUDA

from h3mlp import accuracy, contract
from h3mlp.integrations import diffusers as integration


def run(model) -> torch.Tensor:
    return minimax_h3.run(model, CUDA)


def test_a_small_model_has_the_cpus_outputs():
    """Up to roundings to BF16, which attention and FC2 make elsewhere."""
    model = minimax_h3.transformer()
    integration.apply(model)
    want = minimax_h3.run(model)
    assert accuracy.compare(run(model.to(CUDA)), want).snr_db > 35


@torch.no_grad()
def test_a_block_of_real_size():
    """The feed-forward half is off by the 5.4% that FP8 costs; FC1 takes half the memory, which is free again."""
    torch.manual_seed(0)
    with torch.device(CUDA):
        model = MiniMaxH3Transformer3DModel(num_layers=1, num_refiner_layers=0).to(torch.bfloat16).eval()
    block = model.transformer_blocks[0]
    for parameter in block.ff.parameters():
        torch.nn.init.normal_(parameter, std=parameter.shape[1] ** -0.5)
    x = torch.randn(1, 1000, contract.HIDDEN, device=CUDA).bfloat16()
    tables = [torch.randn(9, contract.HIDDEN, device=CUDA).bfloat16() / 10 for _ in range(3)]
    index = torch.randint(9, (1000,), device=CUDA)
    shift, scale, _ = (table.index_select(0, index) for table in tables)
    want = block.ff(block.norm2(x) * (1.0 + scale) + shift)
    before = torch.cuda.memory_allocated()
    report = integration.apply(model)
    assert report.bytes_saved == pytest.approx(154e6, rel=0.01)
    assert before - torch.cuda.memory_allocated() == pytest.approx(report.bytes_saved, rel=0.02)
    ones = torch.ones_like(tables[0])
    got = block.feed_forward(x, tables[0], tables[1], ones, index) - x
    assert 0.04 < accuracy.compare(got, want).relative_rms < 0.07


@pytest.mark.parametrize("applied_first", [True, False])
def test_model_offload(applied_first):
    """``enable_model_cpu_offload`` of a pipeline: the model comes for its forward and goes again."""
    from accelerate import cpu_offload_with_hook

    model = minimax_h3.transformer()
    want = copy.deepcopy(model)
    integration.apply(want)
    want = run(want.to(CUDA))
    if applied_first:
        integration.apply(model)
    _, hook = cpu_offload_with_hook(model, CUDA)
    if not applied_first:
        integration.apply(model)
    for _ in range(2):
        assert torch.equal(run(model), want)
        hook.offload()
        assert {weight.device.type for weight in model.parameters()} == {"cpu"}


@pytest.mark.parametrize(
    "options",
    [
        {"offload_type": "leaf_level"},
        {"offload_type": "leaf_level", "use_stream": True},
        {"offload_type": "block_level", "num_blocks_per_group": 1},
        {"offload_type": "block_level", "num_blocks_per_group": 1, "use_stream": True},
    ],
)
def test_group_offload(options):
    """By layers and by blocks, also with copies from pinned memory on a stream of their own."""
    model = minimax_h3.transformer()
    integration.apply(model)
    want = run(copy.deepcopy(model).to(CUDA))
    model.enable_group_offload(onload_device=CUDA, offload_device=torch.device("cpu"), **options)
    for _ in range(2):
        assert torch.equal(run(model), want)
    weights = [weight for fc1 in minimax_h3.fc1s(model).values() for weight in fc1.parameters()]
    left = [weight for weight in weights if weight.device.type != "cpu"]
    assert len(left) <= 3, "all but what is fetched ahead, of one block, is on the CPU again"


def test_sequential_offload():
    from accelerate import cpu_offload

    model = minimax_h3.transformer()
    integration.apply(model)
    want = run(copy.deepcopy(model).to(CUDA))
    cpu_offload(model, CUDA)
    assert torch.equal(run(model), want)
    assert all(weight.is_meta for fc1 in minimax_h3.fc1s(model).values() for weight in fc1.parameters())


def test_compiled_blocks():
    model = minimax_h3.transformer()
    integration.apply(model)
    model.to(CUDA)
    want = run(model)
    torch.compiler.reset()
    model.compile_repeated_blocks(fullgraph=True)
    assert accuracy.compare(run(model), want).snr_db > 35
