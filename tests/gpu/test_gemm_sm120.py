"""The mma.sync GEMM, every tile and way of loading, in every form that this GPU has; on Hopper the plain form."""

import shutil

import pytest
import torch
from helpers import bits
from on_gpu import (
    CUDA,
    FORMS_HERE,
    LOADS_HERE,
    around_2_to_the_31,
    close,
    first,
    make,
    sanitize,
    with_edges,
    y_of,
)

import h3mlp
from h3mlp import accuracy, contract
from h3mlp.backends.cute import choice, forms

pytest.importorskip("cutlass")

from h3mlp.backends.cute import jit, launch, measure, variants
from h3mlp.backends.cute.gemm_sm120 import Tile
from h3mlp.backends.cute.product import fc1

pytestmark = pytest.mark.skipif(not FORMS_HERE, reason="needs a GPU with mma.sync of E4M3, or one that emulates it")

TILES = {tile.name: tile for tile in (*variants.SMALL_TILES, *variants.LARGE_TILES.values(), variants.EMULATED_TILE)}


def kernel(tile: Tile, form: str = FORMS_HERE[0] if FORMS_HERE else "", loads: str = LOADS_HERE[0], **sizes: int):
    gpu = launch._gpu(0)
    product = fc1(**{"hidden": contract.HIDDEN, "ffn": contract.FFN} | sizes)
    built = variants.gemm_sm120(gpu, product, tile, form, loads == "tma")
    function = jit.load(built, gpu.arch)
    return lambda *arguments: function(*arguments, gpu.multiprocessors)


def quantized(inputs: contract.FC1Inputs) -> tuple[torch.Tensor, torch.Tensor]:
    """The operator's own codes and scales."""
    rows, hidden = inputs.x.shape
    a_q = torch.full((rows, hidden), torch.nan, device=CUDA).to(contract.QUANTIZED)
    s_row = torch.full((rows,), torch.nan, device=CUDA)
    launch.stage1(inputs, contract.EPS, a_q, s_row)
    return a_q, s_row


def multiply(gemm, inputs: contract.FC1Inputs, a_q: torch.Tensor, s_row: torch.Tensor) -> torch.Tensor:
    """y, into a buffer of NaN with rows past the last that nobody may write."""
    rows = a_q.shape[0]
    out = torch.full((rows + 3, inputs.fc1_weight_q.shape[0] // 2), torch.nan, dtype=torch.bfloat16, device=CUDA)
    gemm(a_q, s_row, inputs.fc1_weight_q, inputs.fc1_weight_scale, out[:rows])
    assert out[rows:].isnan().all()
    return out[:rows]


def assert_exact(y: torch.Tensor, want: torch.Tensor) -> None:
    """Equal bits in 99.98%, and 4 standard deviations of so rare an event more where y is small. FP32 sums of 5376
    products are off by 1e-6 of h, which moves a BF16 rounding in 1 of 4000 h, and y with it in half of the cases."""
    close(y, want)
    different = ((bits(y) != bits(want)) & ~(y.isnan() & want.isnan())).sum().item()
    expected = 2e-4 * y.numel()
    assert different <= expected + 4 * expected**0.5, f"{different} of {y.numel()} differ"


@pytest.fixture(scope="module")
def model() -> contract.FC1Inputs:
    """The model's layer with 4097 rows."""
    return make(4097)


@pytest.fixture(scope="module")
def codes(model) -> tuple[torch.Tensor, torch.Tensor]:
    return quantized(model)


@pytest.mark.parametrize("rows", [1, 2, 31, 33, 64, 65, 127, 129, 255, 1000, 4097])
@pytest.mark.parametrize("form", FORMS_HERE)
def test_against_fp64(model, codes, rows, form):
    """And all tiles and ways of loading have the same bits: each adds in the order of K."""
    a_q, s_row = (t[:rows] for t in codes)
    chosen = accuracy.spread(rows, 160).to(CUDA)
    want = y_of(a_q[chosen], s_row[chosen], model.fc1_weight_q, model.fc1_weight_scale)
    before = None
    for loads in LOADS_HERE:
        for tile in TILES.values():
            y = multiply(kernel(tile, form, loads), model, a_q, s_row)
            assert before is None or torch.equal(bits(y), bits(before)), f"{tile.name} {loads}"
            before = y
    assert_exact(before[chosen], want)


@pytest.mark.skipif(len(FORMS_HERE) < 2, reason="this GPU has one form")
def test_both_forms_have_the_same_bits(model, codes):
    tile = variants.LARGE_TILES["128x256"]
    y = [multiply(kernel(tile, form), model, *codes) for form in FORMS_HERE]
    assert torch.equal(bits(y[0]), bits(y[1]))


@pytest.mark.parametrize("loads", LOADS_HERE)
@pytest.mark.parametrize("rows", [33_473, 149_800, 400_000])
def test_offsets_past_2_to_the_31(rows, loads):
    """out has 2^31 elements at M = 149,797, a_q at 399,458."""
    gemm = kernel(variants.LARGE_TILES["128x256"], loads=loads)
    inputs, chosen = make(rows), around_2_to_the_31(rows)
    a_q, s_row = quantized(inputs)
    y = multiply(gemm, inputs, a_q, s_row)
    assert_exact(y[chosen], y_of(a_q[chosen], s_row[chosen], inputs.fc1_weight_q, inputs.fc1_weight_scale))
    assert not y.isnan().any()


@pytest.mark.parametrize("loads", LOADS_HERE)
@pytest.mark.parametrize("tile", ["16x128", "128x256", "128x128"])
@pytest.mark.parametrize(("hidden", "ffn"), [(128, 64), (384, 128), (1152, 1344)])
def test_other_dimensions(hidden, ffn, tile, loads):
    """2F of half a tile to 21 tiles of 128 rows; K of fewer stages than the ring has."""
    inputs = make(300, hidden, ffn)
    a_q, s_row = quantized(inputs)
    gemm = kernel(TILES[tile], loads=loads, hidden=hidden, ffn=ffn)
    for rows in (1, 33, 300):
        y = multiply(gemm, inputs, a_q[:rows], s_row[:rows])
        assert_exact(y, y_of(a_q[:rows], s_row[:rows], inputs.fc1_weight_q, inputs.fc1_weight_scale))


@pytest.mark.parametrize("loads", LOADS_HERE)
@pytest.mark.parametrize("tile", ["64x128", "256x128"])
def test_edge_rows(model, tile, loads):
    inputs = with_edges(first(model, 200))
    a_q, s_row = quantized(inputs)
    y = multiply(kernel(TILES[tile], loads=loads), inputs, a_q, s_row)
    assert_exact(y, y_of(a_q, s_row, inputs.fc1_weight_q, inputs.fc1_weight_scale))
    assert (bits(y[:4]) == 0).all()
    assert y[4].isnan().all()
    assert not y[10:].isnan().any()


@pytest.fixture
def operator(monkeypatch, tmp_path):
    """This GPU as one that has a choice of mma.sync GEMMs: the operator launches them."""
    monkeypatch.setenv("H3MLP_CACHE_DIR", str(tmp_path))
    monkeypatch.delenv(choice.ENVIRONMENT, raising=False)
    arch, choose = launch._gpu(0).arch, variants.gemm
    monkeypatch.setitem(forms.OF, arch, FORMS_HERE)

    def gemm(gpu, *arguments):
        built = choose(gpu._replace(arch="sm_120a" if arch == "sm_90a" else arch), *arguments)
        return variants.gemm_sm120(gpu, built.product, built.tile, built.form)

    monkeypatch.setattr(variants, "gemm", gemm)
    launch.forget_choice()
    yield arch
    choice.tell(0, None)
    launch.forget_choice()


@pytest.mark.usefixtures("operator")
def test_the_operator(model):
    """Behind stage 1, whose end it does not wait for to begin; over and over, in a CUDA graph too."""
    for rows in (1, 40, 300, 4097):
        inputs = first(model, rows)
        h3mlp.warmup(CUDA, [rows])
        a_q, s_row = quantized(inputs)
        y = h3mlp.fc1_swiglu_fp8(*inputs)
        assert_exact(y, y_of(a_q, s_row, inputs.fc1_weight_q, inputs.fc1_weight_scale))
        x, out = torch.zeros_like(inputs.x), torch.full_like(y, torch.nan)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            h3mlp.fc1_swiglu_fp8(*inputs._replace(x=x), out=out)
        for _ in range(3):
            x.copy_(inputs.x)
            graph.replay()
            assert torch.equal(bits(out), bits(y))
            x.zero_()
    assert torch.equal(bits(h3mlp.fc1_swiglu_fp8(*model, accumulate="fast")), bits(y))


def test_warmup_measures_once_and_may_be_told(operator, monkeypatch):
    runs, run = [], measure.run
    monkeypatch.setattr(measure, "run", lambda *arguments: runs.append(run(*arguments)) or runs[-1])
    assert choice.current(0, operator)[1] == choice.NOT_MEASURED
    for _ in range(2):
        h3mlp.warmup(CUDA, [64])
    (times,) = runs
    assert {found.form for found in times} == set(FORMS_HERE)
    assert {found.tile for found in times} == set(choice.TILES)
    assert all(100 < us < 1e6 for us in times.values())
    assert choice.current(0, operator) == (min(times, key=times.get), "measured")
    slowest = max(times, key=times.get)
    h3mlp.warmup(CUDA, [4097], gemm=str(slowest))
    assert choice.current(0, operator) == (slowest, "told by warmup")
    assert launch._gemm(0, fc1, contract.HIDDEN, contract.FFN, 4097, "fp32")[0].name.startswith(
        f"gemm_sm120_swiglu_{slowest.tile}_{slowest.form.partition('_')[0]}"
    )
    with pytest.raises(ValueError, match=r"gemm must be one of .*; it is 'plain:8x8'"):
        h3mlp.warmup(CUDA, gemm="plain:8x8")


SCRIPT = """
import torch, h3mlp
from h3mlp import synthetic, reference
from h3mlp.backends.cute import jit, launch, variants
from h3mlp.backends.cute.product import fc1
gpu, form, loads = launch._gpu(0), {form!r}, {loads!r}
layer = synthetic.layer(300, hidden=384, ffn=192)
inputs = (*layer.activations, *h3mlp.prepare_fc1_weight_fp8(layer.weight))
want = reference.fc1_swiglu_fp8(*inputs, return_intermediates=True)
a_q, s_row, w_q, w_scale = (t.cuda() for t in (want.a_q, want.s_row, *inputs[5:]))
for tile in (*variants.SMALL_TILES, *variants.LARGE_TILES.values()):
    gemm = jit.load(variants.gemm_sm120(gpu, fc1(384, 192), tile, form, loads == "tma"), gpu.arch)
    out = torch.full((300, 192), torch.nan, dtype=torch.bfloat16, device="cuda")
    gemm(a_q, s_row, w_q, w_scale, out, 2)  # two CTAs, so that each has many tiles
    assert ((out.cpu().float() - want.y.float()).abs() <= 1e-2 + 1.6e-2 * want.y.float().abs()).all()
print("agrees")
"""


@pytest.mark.parametrize("loads", LOADS_HERE)
@pytest.mark.parametrize("tool", ["memcheck", "racecheck"])
@pytest.mark.skipif(shutil.which("compute-sanitizer") is None, reason="needs compute-sanitizer")
def test_compute_sanitizer(tool, loads):
    """Without torch's pool, so that behind each tensor is nothing that may be read."""
    sanitize(tool, SCRIPT.format(form=FORMS_HERE[0], loads=loads), PYTORCH_NO_CUDA_MEMORY_CACHING="1")
