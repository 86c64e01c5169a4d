"""FC2 with the gated residual on the GPU: each GEMM, tile and way of loading on chosen codes, against FP64."""

import shutil

import pytest
import torch
from helpers import bits, mlp_outside
from on_gpu import CAPABILITY, CUDA, FORMS_HERE, LOADS_HERE, sanitize

from h3mlp import contract, reference

pytest.importorskip("cutlass")

from h3mlp.backends.cute import jit, launch, variants
from h3mlp.backends.cute.product import GATED_RESIDUAL, fc2

HIDDEN, FFN = contract.HIDDEN, contract.FFN
pytestmark = pytest.mark.skipif(not FORMS_HERE, reason="needs a GPU with a GEMM of ours")

SM120 = [
    ("sm120", tile, form, tma)
    for tile in (*variants.SMALL_TILES, *variants.LARGE_TILES.values(), variants.EMULATED_TILE)
    for form in FORMS_HERE
    for tma in (loads == "tma" for loads in LOADS_HERE)
]
SM90 = [("sm90", tokens) for tokens in variants.STAGES[GATED_RESIDUAL]] if CAPABILITY == (9, 0) else []
"""The GEMMs that run here. On Hopper the mma.sync one is emulated."""


def kernel(which: tuple, hidden: int = HIDDEN, ffn: int = FFN, accumulate: str = "fp32"):
    gpu, (kind, tile, *others), product = launch._gpu(0), which, fc2(hidden, ffn)
    if kind == "sm90":
        built = variants.gemm_sm90(product, tile, accumulate)
    else:
        built = variants.gemm_sm120(gpu, product, tile, *others)
    function = jit.load(built, gpu.arch)
    return lambda *arguments: function(*arguments, gpu.multiprocessors)


def make(rows: int, hidden: int = HIDDEN, ffn: int = FFN, positive: bool = False) -> tuple[torch.Tensor, ...]:
    """y_q, s_y and the MLP's inputs of which FC2 takes its part; o has about 1."""
    generator = torch.Generator(CUDA).manual_seed(rows)

    def normal(*shape: int) -> torch.Tensor:
        t = torch.randn(shape, generator=generator, device=CUDA)
        return t.abs() if positive else t

    y_q, w_q = (normal(n, ffn).mul_(448 / 6).clamp_(-448, 448).to(contract.QUANTIZED) for n in (rows, hidden))
    s_y, w_scale = normal(rows).abs_().add_(0.5), torch.full((hidden,), (6 / 448) ** 2 * ffn**-0.5, device=CUDA)
    wide = normal(9, 6 * hidden).bfloat16()
    index = torch.arange(rows, device=CUDA) * 9 // rows
    residual = normal(rows, hidden).bfloat16()
    none = (None,) * 4
    return y_q, s_y, contract.MLPInputs(*none, index, wide[:, 5 * hidden :], residual, None, None, w_q, w_scale)


def multiply(gemm, y_q: torch.Tensor, s_y: torch.Tensor, inputs: contract.MLPInputs) -> torch.Tensor:
    """out, into a buffer of NaN with rows past the last that nobody may write."""
    rows, hidden = inputs.residual.shape
    out = torch.full((rows + 3, hidden), torch.nan, dtype=torch.bfloat16, device=CUDA)
    words = inputs.adaln_index.view(torch.int32)
    weight = inputs.fc2_weight_q, inputs.fc2_weight_scale
    gemm(y_q, s_y, *weight, inputs.gate, words, inputs.residual, out[:rows])
    assert out[rows:].isnan().all()
    return out[:rows]


def exact(y_q: torch.Tensor, s_y: torch.Tensor, inputs: contract.MLPInputs) -> torch.Tensor:
    return reference.dequantize(reference.accumulate(y_q, inputs.fc2_weight_q), s_y, inputs.fc2_weight_scale)


def assert_right(out: torch.Tensor, y_q: torch.Tensor, s_y: torch.Tensor, inputs: contract.MLPInputs) -> None:
    off = mlp_outside(out, exact(y_q, s_y, inputs), inputs)
    assert off.sum() <= max(4, 2e-7 * off.numel()), f"{off.sum()}, first {off.nonzero()[0].tolist()}"


@pytest.mark.parametrize("family", [SM90, SM120], ids=["sm90", "sm120"])
@pytest.mark.parametrize("rows", [1, 31, 33, 64, 127, 129, 161, 1000, 4097])
def test_against_fp64(family, rows):
    """And all of a family have the same bits: each adds in the same order."""
    if not family:
        pytest.skip("runs on another GPU")
    given = make(rows)
    found = [multiply(kernel(which), *given) for which in family]
    for which, out in zip(family, found, strict=True):
        assert torch.equal(bits(out), bits(found[0])), which
    assert_right(found[0], *given)


@pytest.mark.parametrize("which", [*SM90[-2:], *SM120[-2:]], ids=str)
@pytest.mark.parametrize("rows", [149_800, 400_000])
def test_offsets_past_2_to_the_31(which, rows):
    """y_q has 2^31 elements at 149,797 rows, out and residual at 399,458. All rows but the last 1000 are alike."""
    y_q, s_y, few = make(1000)
    many = torch.arange(rows, device=CUDA) % 1000
    inputs = few._replace(residual=few.residual[many], adaln_index=few.adaln_index[many])
    out = multiply(kernel(which), y_q.view(torch.uint8)[many].view(contract.QUANTIZED), s_y[many], inputs)
    want = multiply(kernel(which), y_q, s_y, few)
    assert all(torch.equal(bits(part), bits(want)) for part in out.split(1000) if len(part) == 1000)
    assert torch.equal(bits(out[-(rows % 1000 or 1000) :]), bits(want[: rows % 1000 or 1000]))


@pytest.mark.parametrize("which", [*SM90, *SM120[:4], *SM120[-2:]], ids=str)
@pytest.mark.parametrize(("hidden", "ffn"), [(128, 64), (384, 192), (1152, 1344)])
def test_other_dimensions(which, hidden, ffn):
    """Half a stage of K to 21 of 64; one row tile of 128 to nine."""
    for rows in (1, 33, 300):
        given = make(rows, hidden, ffn)
        assert_right(multiply(kernel(which, hidden, ffn), *given), *given)


@pytest.mark.parametrize("which", [*SM90, *SM120[:2], *SM120[-2:]], ids=str)
def test_edge_rows(which):
    """Indices outside give the residual, bit for bit, whatever the row holds; so do rows of zeros, as a number. A NaN
    makes a row NaN."""
    y_q, s_y, inputs = make(300, 384, 192)
    codes = y_q.view(torch.uint8)
    codes[:5, 3] = 0x7F
    codes[5] = 0
    inputs.adaln_index[:4] = torch.tensor([-1, 9, 2**32 + 3, -(2**32)], device=CUDA)
    inputs.residual[0, ::2], inputs.residual[1, 5] = -0.0, torch.nan
    gemm = kernel(which, 384, 192)
    out = multiply(gemm, y_q, s_y, inputs)
    assert torch.equal(bits(out[:4]), bits(inputs.residual[:4]))
    assert out[4].isnan().all()
    assert torch.equal(out[5], inputs.residual[5])
    assert not out[6:].isnan().any()
    assert_right(out, y_q, s_y, inputs)
    narrow = multiply(gemm, y_q, s_y, inputs._replace(adaln_index=inputs.adaln_index.clamp(-1, 9).int()))
    assert torch.equal(bits(narrow[4:]), bits(out[4:]))
    none, ones = inputs.adaln_index[:0].int(), torch.ones((1, 384), dtype=torch.bfloat16, device=CUDA)
    plain = multiply(gemm, y_q, s_y, inputs._replace(adaln_index=none, gate=ones))
    assert_right(plain, y_q, s_y, inputs._replace(adaln_index=None, gate=None))


@pytest.mark.parametrize("which", [*SM90[-1:], *SM120[-1:]], ids=str)
def test_in_place(which):
    y_q, s_y, inputs = make(1000)
    want = multiply(kernel(which), y_q, s_y, inputs)
    target, words = inputs.residual, inputs.adaln_index.view(torch.int32)
    weight = inputs.fc2_weight_q, inputs.fc2_weight_scale
    kernel(which)(y_q, s_y, *weight, inputs.gate, words, target, target)
    assert torch.equal(bits(target), bits(want))


@pytest.mark.skipif(not SM90, reason="elsewhere sums are of FP32")
def test_accumulation_on_hopper():
    """Relative RMS of o at most 3e-4, of sums that are exactly 0: the second half of K takes the first one back, in
    another order. All-positive data low by at most 0.25%, over a million outputs."""
    gemm, half = kernel(SM90[-1]), FFN // 2
    y_q, s_y, inputs = make(1000)
    zeros = inputs._replace(residual=torch.zeros_like(inputs.residual), gate=torch.ones_like(inputs.gate))
    order = torch.randperm(half, device=CUDA)
    plain = exact(y_q, s_y, inputs).double().square().mean(1, keepdim=True).sqrt()
    codes, weight = y_q.view(torch.uint8), inputs.fc2_weight_q.view(torch.uint8)
    codes[:, half:], weight[:, half:] = codes[:, order], weight[:, order] ^ 0x80
    assert exact(y_q, s_y, inputs).abs().max() == 0
    error = multiply(gemm, y_q, s_y, zeros).double() / plain
    assert error.square().mean().sqrt() <= 3e-4
    y_q, s_y, inputs = make(1000, positive=True)
    zeros = zeros._replace(fc2_weight_q=inputs.fc2_weight_q)
    got, want = multiply(gemm, y_q, s_y, zeros).double(), exact(y_q, s_y, inputs).double()
    assert abs(1 - (got / want).mean()) <= 0.0025


SCRIPT = """
import torch
from h3mlp import contract, prepare_fc1_weight_fp8, prepare_fc2_weight_fp8, reference, synthetic
from h3mlp.backends.cute import jit, launch, variants
from h3mlp.backends.cute.product import GATED_RESIDUAL, fc2
gpu, hidden, ffn = launch._gpu(0), 384, 192
mlp = synthetic.mlp(300, hidden, ffn)
weights = *prepare_fc1_weight_fp8(mlp.fc1.weight), *prepare_fc2_weight_fp8(mlp.fc2_weight)
inputs = contract.MLPInputs(*mlp.activations, *weights)
want = reference.mlp_fp8(*inputs, return_intermediates=True)
y, y_q, s_y = want.y.cuda(), want.y_q.cuda(), want.s_y.cuda()
gate, residual, w_q, w_scale = (t.cuda() for t in (inputs.gate, inputs.residual, *weights[2:]))
index = inputs.adaln_index.cuda().view(torch.int32)
kernels = [variants.gemm_sm120(gpu, fc2(hidden, ffn), tile, {form!r}, tma) for tma in {loads} for tile in
           (*variants.SMALL_TILES, *variants.LARGE_TILES.values())]
if gpu.arch == "sm_90a":
    kernels = [variants.gemm_sm90(fc2(hidden, ffn), tokens, "fp32") for tokens in variants.STAGES[GATED_RESIDUAL]]
for kernel in kernels:
    out = torch.full((300, hidden), torch.nan, dtype=torch.bfloat16, device="cuda")
    # Two CTAs, so that each has many tiles.
    jit.load(kernel, gpu.arch)(y_q, s_y, w_q, w_scale, gate, index, residual, out, 2)
    assert ((out.cpu().float() - want.out.float()).abs() <= 2e-2 + 1.6e-2 * want.out.float().abs()).all(), kernel
codes, scales = torch.empty_like(y_q), torch.empty_like(s_y)
launch.quantize_rows(y, codes, scales)
assert torch.equal(codes.view(torch.uint8), y_q.view(torch.uint8)) and torch.equal(scales, s_y)
print("agrees")
"""


@pytest.mark.parametrize("arch", ["own", "sm120"])
@pytest.mark.parametrize("tool", ["memcheck", "racecheck"])
@pytest.mark.skipif(shutil.which("compute-sanitizer") is None, reason="needs compute-sanitizer")
def test_compute_sanitizer(tool, arch):
    """Without torch's pool, so that behind each tensor is nothing that may be read."""
    script = SCRIPT.format(form=FORMS_HERE[0], loads=tuple(loads == "tma" for loads in LOADS_HERE))
    if arch == "sm120":
        script = script.replace('if gpu.arch == "sm_90a":', "if False:")
    sanitize(tool, script, PYTORCH_NO_CUDA_MEMORY_CACHING="1")
