"""FC1SwiGLU on a GPU: its modes, and what models do with several layers there."""

import gc

import pytest
import torch
from helpers import bits, nan_buffers, without_adaln
from on_gpu import CUDA, close, make, y_of

import h3mlp
from h3mlp import FC1SwiGLU, PackedFC1, contract, reference


@pytest.fixture(scope="module")
def inputs() -> contract.FC1Inputs:
    return make(1000)


@pytest.fixture
def module(inputs) -> FC1SwiGLU:
    return FC1SwiGLU.from_packed(PackedFC1(inputs.fc1_weight_q, inputs.fc1_weight_scale), inputs.x_norm_weight)


@pytest.mark.parametrize("modulation", ["fused", "eager", None])
def test_modes_of_the_operator(inputs, modulation):
    """Stage 1 has the bits of the reference on the CPU, stage 2 is close to it on those codes."""
    given = inputs if modulation else without_adaln(inputs)
    buffers = nan_buffers(1000, contract.HIDDEN, contract.FFN, CUDA)
    out, codes, scales = buffers
    options = {"modulation": modulation} if modulation else {}
    h3mlp.fc1_swiglu_fp8(*given, **buffers._asdict(), **options)
    want = reference.norm_quant(*(t if t is None else t.cpu() for t in given[:5]), **options)
    assert torch.equal(bits(codes.cpu()), bits(want.a_q))
    assert torch.equal(scales.cpu(), want.s_row)
    close(out, y_of(codes, scales, *given[5:]))


def test_a_batch_and_strided_tables(module, inputs):
    projection = torch.randn(9, 6 * contract.HIDDEN, device=CUDA).bfloat16() / 10
    shift, scale = projection.chunk(6, dim=-1)[3:5]
    got = module(inputs.x.view(2, 500, -1), scale, shift, inputs.adaln_index[:500])
    want = h3mlp.fc1_swiglu_fp8(
        inputs.x[500:], inputs.x_norm_weight, scale.clone(), shift.clone(), inputs.adaln_index[:500], *inputs[5:]
    )
    assert torch.equal(got[1], want)


def test_offloaded_to_pinned_memory_and_back(module, inputs):
    want = module(inputs.x, *inputs[2:5])
    pinned = module.to("cpu")._apply(lambda t: t.pin_memory())
    assert all(weight.is_pinned() for weight in pinned.parameters())
    back = pinned.to(CUDA, non_blocking=True)
    assert [weight.dtype for weight in back.parameters()] == [torch.float8_e4m3fn, torch.float32, torch.bfloat16]
    assert torch.equal(back(inputs.x, *inputs[2:5]), want)


def test_layers_share_their_workspace(inputs):
    """On one stream the codes and scales of each layer lie where those of the layer before did: 8 layers take no more
    than one, 5.4 MB beside the output."""
    packed = PackedFC1(inputs.fc1_weight_q, inputs.fc1_weight_scale)
    layers = [FC1SwiGLU.from_packed(packed, inputs.x_norm_weight) for _ in range(8)]

    def peak(count: int) -> int:
        gc.collect()
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        for layer in layers[:count]:
            layer(inputs.x, *inputs[2:5])
        return torch.cuda.max_memory_allocated() - before

    peak(8)
    one = peak(1)
    assert one <= 1000 * (2 * contract.FFN + contract.HIDDEN + 4) + 2**21
    assert peak(8) == one


def test_two_streams_at_once(module, inputs):
    """Each has a workspace of its own: calls that overlap in time give what they give alone."""
    x = [inputs.x, inputs.x * 2, inputs.x - 1, inputs.x.flip(0)]
    want = [module(part, *inputs[2:5]) for part in x]
    streams = [torch.cuda.Stream() for _ in x]
    torch.cuda.synchronize()
    for _ in range(5):
        got = []
        for stream, part in zip(streams, x, strict=True):
            with torch.cuda.stream(stream):
                got.append(module(part, *inputs[2:5]))
        torch.cuda.synchronize()
        for y, expected in zip(got, want, strict=True):
            assert torch.equal(y, expected)


def test_layers_in_a_cuda_graph(module, inputs):
    """Two layers and eager calls between replays: the graph's workspace is its own."""
    x, calls = inputs.x.clone(), 2
    h3mlp.warmup(CUDA, [1000])
    want = module(x, *inputs[2:5])
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        outputs = [module(x, *inputs[2:5]) for _ in range(calls)]
    for scale in (1, 2):
        x.copy_(inputs.x * scale)
        for y in outputs:
            y.fill_(torch.nan)
        graph.replay()
        eager = module(inputs.x.flip(0), *inputs[2:5])
        for y in outputs:
            assert torch.equal(y, want if scale == 1 else module(x, *inputs[2:5]))
        assert torch.equal(eager, module(inputs.x.flip(0), *inputs[2:5]))


@pytest.mark.filterwarnings("ignore:The CUDA Graph is empty")  # torch captures one itself, for its memory pool
def test_compiled_with_cuda_graphs(module, inputs):
    torch.compiler.reset()
    want = module(inputs.x[None], *inputs[2:5])
    compiled = torch.compile(module, fullgraph=True, mode="reduce-overhead")
    for _ in range(4):
        torch.compiler.cudagraph_mark_step_begin()
        assert torch.equal(compiled(inputs.x[None], *inputs[2:5]), want)
