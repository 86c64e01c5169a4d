"""The kernels against the reference, at the model's dimensions and at small ones that leave remainders everywhere."""

import shutil

import helpers
import pytest
import torch
from helpers import bits, shifted
from on_gpu import (
    CUDA,
    agree_in_threads,
    agree_in_two_processes,
    around_2_to_the_31,
    close,
    first,
    make,
    outside,
    sanitize,
    with_edges,
    y_of,
)

import h3mlp
from h3mlp import accuracy, contract, reference, synthetic
from h3mlp.operators import dispatch

pytestmark = pytest.mark.skipif(
    not torch.cuda.is_available() or dispatch.select(CUDA).NAME != "cute", reason="needs a GPU that backend cute serves"
)


@pytest.fixture(scope="module")
def model() -> contract.FC1Inputs:
    """The model's layer with 4097 rows."""
    return make(4097)


def nan_buffers(inputs: contract.FC1Inputs, spare: int = 3) -> contract.FC1Buffers:
    """NaN everywhere, and rows past the last that nobody may write."""
    rows, hidden = inputs.x.shape
    return helpers.nan_buffers(rows + spare, hidden, inputs.fc1_weight_q.shape[0] // 2, CUDA)


def call(inputs: contract.FC1Inputs, accumulate: str = "fp32") -> contract.FC1Buffers:
    buffers = nan_buffers(inputs)
    h3mlp.fc1_swiglu_fp8(*inputs, **buffers._asdict(), accumulate=accumulate)
    rows = inputs.x.shape[0]
    assert buffers.out[rows:].isnan().all()
    assert buffers.workspace_scale[rows:].isnan().all()
    assert (bits(buffers.workspace_q[rows:]) == 0x7F).all()
    return contract.FC1Buffers(*(buffer[:rows] for buffer in buffers))


def check(inputs: contract.FC1Inputs, got: contract.FC1Buffers, chosen: torch.Tensor) -> None:
    """These rows against the reference on the CPU (stage 1) and in FP64 on the GPU (stage 2, on those codes)."""
    rows = inputs._replace(x=inputs.x[chosen], adaln_index=inputs.adaln_index[chosen])
    want = reference.norm_quant(*(t.cpu() for t in rows[:5]))
    a_q, s_row = got.workspace_q[chosen], got.workspace_scale[chosen]
    wrong = (bits(a_q.cpu()) != bits(want.a_q)).sum().item()
    assert wrong == 0, f"{wrong} codes differ"
    assert torch.equal(bits(s_row.cpu()), bits(want.s_row))
    close(got.out[chosen], y_of(a_q, s_row, inputs.fc1_weight_q, inputs.fc1_weight_scale))


@pytest.mark.parametrize("rows", [1, 2, 31, 32, 33, 63, 64, 65, 127, 128, 129, 160, 161, 255, 257, 1000, 4097])
def test_against_the_reference(model, rows):
    inputs = first(model, rows)
    check(inputs, call(inputs), accuracy.spread(rows, 160).to(CUDA))


def test_33473_rows():
    inputs = make(33473)
    chosen = torch.cat([accuracy.spread(33473, 200), torch.tensor([33471, 33472])]).unique().to(CUDA)
    check(inputs, call(inputs), chosen)


@pytest.mark.parametrize("rows", [149_800, 400_000])
def test_offsets_past_2_to_the_31(rows):
    """out has 2^31 elements at M = 149,797, a_q and x at 399,458; these rows lie on both sides of it."""
    inputs, chosen = make(rows), around_2_to_the_31(rows)
    got = call(inputs)
    check(inputs, got, chosen)
    assert not got.out.isnan().any()


@pytest.mark.parametrize(("hidden", "ffn"), [(128, 64), (384, 128), (640, 192), (1152, 1344)])
@pytest.mark.parametrize("rows", [1, 33, 100, 300])
def test_other_dimensions(hidden, ffn, rows):
    """2F of one to 21 tiles of 128 rows, odd ones among them; K of one stage, and of intervals with a remainder."""
    inputs = make(rows, hidden, ffn)
    check(inputs, call(inputs), torch.arange(rows, device=CUDA))


def test_edge_rows(model):
    inputs = with_edges(first(model, 200))
    got = call(inputs)
    check(inputs, got, torch.arange(200, device=CUDA))
    assert (got.out[:4] == 0).all()
    assert not got.out[:4].signbit().any()
    assert got.out[4].isnan().all()
    assert not got.out[10:].isnan().any()


def test_unaligned_arguments(model):
    """Views that begin at odd addresses, rows with gaps, and buffers where TMA cannot write."""
    inputs = first(model, 130)
    plain = call(inputs)

    def moved(t: torch.Tensor) -> torch.Tensor:
        """The same values one element further on, with a gap behind each row."""
        shape = (*t.shape[:-1], t.shape[-1] + 3)
        return torch.empty(shape, dtype=t.dtype, device=CUDA)[..., 1 : 1 + t.shape[-1]].copy_(t)

    x, weight, scale, shift, index, w_q, w_scale = inputs
    odd = contract.FC1Inputs(
        moved(x), shifted(weight), moved(scale), moved(shift), shifted(index), shifted(w_q), shifted(w_scale)
    )
    buffers = contract.FC1Buffers(*(shifted(b) for b in nan_buffers(inputs, spare=0)))
    h3mlp.fc1_swiglu_fp8(*odd, **buffers._asdict())
    for got, want in zip(buffers, plain, strict=True):
        assert torch.equal(bits(got), bits(want))


def test_int32_and_int64_indices(model):
    inputs = first(model, 700)
    narrow = call(inputs._replace(adaln_index=inputs.adaln_index.int()))
    for got, want in zip(narrow, call(inputs), strict=True):
        assert torch.equal(bits(got), bits(want))


def test_a_row_does_not_depend_on_the_others_nor_on_the_run(model):
    """The same row in calls of 1 to 4097 rows, at other places, in company of NaN, twice: always the same bits, though
    other tiles serve them."""
    whole = call(model).out
    assert torch.equal(bits(call(model).out), bits(whole))
    order = torch.randperm(4097, device=CUDA, generator=torch.Generator(CUDA).manual_seed(1))
    for rows in (1, 2, 40, 64, 100, 129, 700, 4097):
        chosen = order[:rows]
        some = model._replace(x=model.x[chosen], adaln_index=model.adaln_index[chosen])
        assert torch.equal(bits(call(some).out), bits(whole[chosen])), rows
    x = model.x.clone()
    x[1::2] = torch.nan
    assert torch.equal(bits(call(model._replace(x=x)).out[::2]), bits(whole[::2]))


def accumulated(positive: bool, accumulate: str, rows: int = 256) -> tuple[torch.Tensor, torch.Tensor, float]:
    """(h as the kernel has it, exact h, RMS of a plain sum), for stage 2 on chosen codes.

    The gate is 32 for every output, from one product: y = 32 * h_up. The sums are of random signs, with a second half
    that takes the first one back, in another order: so they are exactly 0, and the error is not hidden by BF16. Or all
    products are positive: then the mean over all outputs shows what is lost.
    """
    hidden, ffn = contract.HIDDEN, contract.FFN
    generator = torch.Generator(CUDA).manual_seed(3)
    a = torch.randn(rows, hidden, device=CUDA, generator=generator)
    up = torch.randn(ffn, hidden, device=CUDA, generator=generator)
    half = hidden // 2
    if positive:
        a, up = a.abs(), up.abs()
    else:
        order = 1 + torch.randperm(half - 1, device=CUDA, generator=generator)
        a[:, half + 1 :], up[:, half + 1 :] = a[:, order], -up[:, order]
    a[:, 0] = a[:, half] = 4.5
    up[:, 0] = up[:, half] = 0
    a_q, up_q = ((t * 448 / 6).clamp(-448, 448).to(contract.QUANTIZED) for t in (a, up))
    w_q = torch.zeros(2, ffn, hidden, dtype=contract.QUANTIZED, device=CUDA)
    w_q[0, :, 0], w_q[1] = 448, up_q
    w_scale = torch.empty(2, ffn, device=CUDA)
    gate = a_q[0, 0].item() * 448
    w_scale[0], w_scale[1] = 32 / gate * 2**8, 2**-10
    packed = h3mlp.pack_fc1_rows(w_q.view(2 * ffn, hidden)), h3mlp.pack_fc1_rows(w_scale.view(-1))
    y = torch.full((rows, ffn), torch.nan, dtype=torch.bfloat16, device=CUDA)
    from h3mlp.backends.cute import launch

    launch.stage2(a_q, torch.full((rows,), 2.0**-8, device=CUDA), *packed, y, accumulate)
    exact = (a_q.double() @ up_q.double().T) * 2.0**-18
    plain = a_q.double().pow(2).mean().sqrt() * up_q.double().pow(2).mean().sqrt() * hidden**0.5 * 2.0**-18
    return y.double() / 32, exact, plain.item()


def test_fp32_accumulation_is_accurate():
    """Relative RMS error of h at most 3e-4; all-positive data low by at most 0.25%, over 3.7 million outputs whose BF16
    roundings are unbiased (0.2% / sqrt(3.7e6) = 1e-6)."""
    got, exact, plain = accumulated(False, "fp32")
    assert exact.abs().max() == 0
    assert got.pow(2).mean().sqrt() / plain <= 3e-4
    got, exact, _ = accumulated(True, "fp32")
    assert abs(1 - (got / exact).mean().item()) <= 0.0025


def test_fast_accumulation_costs_what_its_docstring_says():
    """On Hopper; elsewhere the two modes are the same."""
    got, exact, _ = accumulated(True, "fast")
    if torch.cuda.get_device_capability(CUDA) == (9, 0):
        assert 0.07 <= 1 - (got / exact).mean().item() <= 0.11
    else:
        assert torch.equal(got, accumulated(True, "fp32")[0])


@pytest.mark.parametrize(("accumulate", "on_hopper"), [("fp32", 240), ("fast", 16_000)])
def test_the_specified_operators_own_inputs(accumulate, on_hopper):
    """Outputs further than 1e-2 + 1.6% from exact products, of 58.7 million. That operator's test allows 12, which a
    GPU whose tensor cores accumulate in FP32 has to meet. Hopper's do not: measured on an H200 were 120 and 134 with
    promotion every 256 of K, 7,925 without any, on other seeds; twice that is allowed here."""
    layer = synthetic.as_specified(4097, CUDA, seed=7)
    inputs = contract.FC1Inputs(*layer.activations, *h3mlp.prepare_fc1_weight_fp8(layer.weight))
    got = call(inputs, accumulate)
    assert not got.out.isnan().any()
    found = 0
    for y, a_q, s_row in zip(*(buffer.split(1024) for buffer in got), strict=True):
        found += outside(y, y_of(a_q, s_row, *inputs[5:])).sum().item()
    assert found <= (on_hopper if torch.cuda.get_device_capability(CUDA) == (9, 0) else 12)


def test_memory_beyond_inputs_and_output(model):
    """a_q and s_row, each rounded up to the allocator's 512 bytes (2 MB for the large one)."""
    call(model)
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    y = h3mlp.fc1_swiglu_fp8(*model)
    extra = torch.cuda.max_memory_allocated() - before - y.nbytes
    assert extra <= model.x.shape[0] * (contract.HIDDEN + 4) + 2 * 2**21


@pytest.mark.filterwarnings("ignore:Synchronization debug mode is a prototype")
def test_no_host_synchronization(model):
    call(model)
    torch.cuda.set_sync_debug_mode("error")
    try:
        h3mlp.fc1_swiglu_fp8(*model)
    finally:
        torch.cuda.set_sync_debug_mode("default")


@pytest.mark.parametrize("rows", [1, 100, 4097])
def test_cuda_graph(model, rows):
    inputs = first(model, rows)
    want = call(inputs).out
    h3mlp.warmup(CUDA, rows=[rows])
    buffers = nan_buffers(inputs)
    x = torch.zeros_like(inputs.x)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        h3mlp.fc1_swiglu_fp8(*inputs._replace(x=x), **buffers._asdict())
    x.copy_(inputs.x)
    graph.replay()
    assert torch.equal(bits(buffers.out[:rows]), bits(want))


@pytest.mark.filterwarnings("ignore:The CUDA Graph is empty")  # torch captures one itself, for its memory pool
def test_torch_compile_with_cuda_graphs(model):
    inputs = first(model, 300)
    want = call(inputs).out

    @torch.compile(fullgraph=True, mode="reduce-overhead")
    def step(*tensors):
        return h3mlp.fc1_swiglu_fp8(*tensors) * 2

    for _ in range(4):
        torch.compiler.cudagraph_mark_step_begin()
        got = step(*inputs).clone()
    assert torch.equal(bits(got), bits(want * 2))


def test_side_stream(model):
    """On the stream that is current, behind what is on it: 50 ms of waiting, then x itself."""
    inputs = first(model, 300)
    want = call(inputs).out
    buffers, x = nan_buffers(inputs), torch.zeros_like(inputs.x)
    stream = torch.cuda.Stream()
    torch.cuda.synchronize()
    with torch.cuda.stream(stream):
        torch.cuda._sleep(100_000_000)
        x.copy_(inputs.x)
        h3mlp.fc1_swiglu_fp8(*inputs._replace(x=x), **buffers._asdict())
    assert not stream.query()  # or nothing was shown
    stream.synchronize()
    assert torch.equal(bits(buffers.out[:300]), bits(want))


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
def test_second_device(model):
    inputs = first(model, 300)
    there = contract.FC1Inputs(*(t.to("cuda:1") for t in inputs))
    assert torch.cuda.current_device() == 0
    got = h3mlp.fc1_swiglu_fp8(*there)
    assert torch.equal(bits(got.cpu()), bits(call(inputs).out.cpu()))


def test_threads():
    """Eight at once, on a kernel that none of them has compiled yet."""
    inputs = make(50, hidden=256, ffn=128)
    agree_in_threads(lambda: h3mlp.fc1_swiglu_fp8(*inputs))


SCRIPT = """
import torch, h3mlp
from h3mlp import contract, synthetic, reference
from h3mlp.backends.cute import jit, launch
from h3mlp.backends.cute.norm_quant import NormQuant
layer = synthetic.layer(70, hidden=256, ffn=192)
inputs = (*layer.activations, *h3mlp.prepare_fc1_weight_fp8(layer.weight))
want = reference.fc1_swiglu_fp8(*inputs)
got = h3mlp.fc1_swiglu_fp8(*(t.cuda() for t in inputs)).cpu()
assert ((got.float() - want.float()).abs() <= 1e-2 + 1.6e-2 * want.float().abs()).all()

# Stage 1 again on three CTAs of five warps and more, so that each has many rows.
layer = synthetic.layer(41, hidden=1152, ffn=64)
want = reference.norm_quant(*layer.activations)
a_q = torch.empty(41, 1152, dtype=contract.QUANTIZED, device="cuda")
s_row = torch.empty(41, device="cuda")
norm_quant = jit.load(NormQuant(1152, 64, sms=3), launch._gpu(0)[0])
norm_quant(*(t.cuda() for t in layer.activations), a_q, s_row, contract.EPS)
assert torch.equal(a_q.cpu().view(torch.uint8), want.a_q.view(torch.uint8))
assert torch.equal(s_row.cpu(), want.s_row)
print("agrees")
"""


def test_two_processes_with_a_cold_cache(tmp_path):
    agree_in_two_processes(SCRIPT, str(tmp_path / "cache"))


@pytest.mark.parametrize("tool", ["memcheck", "racecheck"])
@pytest.mark.skipif(shutil.which("compute-sanitizer") is None, reason="needs compute-sanitizer")
def test_compute_sanitizer(tmp_path, tool):
    sanitize(tool, SCRIPT, H3MLP_CACHE_DIR=str(tmp_path / "cache"))


def test_out_of_memory_says_so(model):
    """out of 2^24 rows would take 481 GB. Then all is as before."""
    rows = contract.MAX_ROWS
    index = torch.zeros(rows, dtype=torch.int32, device=CUDA)
    with pytest.raises(torch.OutOfMemoryError):
        h3mlp.fc1_swiglu_fp8(*model._replace(x=model.x[:1].expand(rows, -1), adaln_index=index))
    h3mlp.fc1_swiglu_fp8(*model)
