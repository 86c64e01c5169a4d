"""Stage 1 on the GPU has the codes and the scales of the CPU reference, bit for bit, on everything BF16 can hold."""

import pytest
import torch
from helpers import bits

from h3mlp import contract, reference, synthetic
from h3mlp.backends import cute

pytest.importorskip("cutlass")

from h3mlp.backends.cute import jit
from h3mlp.backends.cute.norm_quant import NormQuant

CUDA = torch.device("cuda")
TABLE_ROWS = 9

MAPPINGS = {
    "default": {},
    "ring of 4": {"stages": 4},
    "no ring": {"stages": 0},
    "2 vectors a thread": {"warps": 11, "stages": 4},
    "3 vectors a thread": {"warps": 7},
    "5 vectors a thread": {"warps": 5, "stages": 0},
    "scalars": {"vectors": False},
    "5 times 8 scalars a thread": {"vectors": False, "warps": 5},
}


def kernel(hidden: int, sms: int = 3, **fields):
    """The compiled kernel for this GPU, unless told with a grid of a few CTAs so that each strides over many rows."""
    capability = torch.cuda.get_device_capability()
    if capability not in cute._ARCHITECTURE_OF:
        pytest.skip(f"no architecture for compute capability {capability}")
    return jit.load(NormQuant(hidden, sms=sms, **fields), cute._ARCHITECTURE_OF[capability])


def patterns(*shape: int, seed: int) -> torch.Tensor:
    """BF16 of uniformly random bits: every exponent, subnormals, Inf and NaN."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(-(2**15), 2**15, shape, generator=generator).short().view(torch.bfloat16)


def batch(rows: int, hidden: int, seed: int = 0) -> list[torch.Tensor]:
    """x, norm weight, scale, shift, index; normal data, with runs of equal indices and rows outside the tables."""
    x, weight, scale, shift, index = synthetic.layer(rows, hidden, 64, TABLE_ROWS, seed).activations
    index = index.clone()
    index[rows // 3 : rows // 2] = 4
    index[::7] = -1
    index[3::11] = TABLE_ROWS
    return [x.clone(), weight.clone(), scale.clone(), shift.clone(), index]


def nasty(rows: int, hidden: int) -> list[torch.Tensor]:
    """Rows that meet every edge of the contract, in turn; what they hold is in the names of the list below."""
    x, weight, scale, shift, index = batch(rows, hidden, seed=1)
    random = patterns(rows, hidden, seed=2)
    finite = torch.where(random.isfinite(), random, 1.0)
    subnormal = (random.view(torch.int16) & -0x7F81).view(torch.bfloat16)  # the exponent's bits cleared
    one_nan, one_inf = x.clone(), x.clone()
    one_nan[:, hidden // 2] = torch.nan
    one_inf[:, 5] = -torch.inf
    kinds = [
        x,
        torch.zeros_like(x),
        -torch.zeros_like(x),
        torch.full_like(x, torch.nan),
        one_nan,
        one_inf,
        random,
        finite,  # the sum of squares overflows
        subnormal,
        x * 2.0**-70,  # squares below the smallest subnormal
        x * 2.0**60,
        torch.where(x > 2, x, -torch.zeros_like(x)),
    ]
    for k, kind in enumerate(kinds):
        x[k :: len(kinds)] = kind[k :: len(kinds)]
    # Tables that put the edges into a itself: amax of Inf, NaN, huge, below the floor, -0 everywhere.
    shift[1, 3], shift[2, 7] = torch.inf, torch.nan
    shift[3, :], scale[3, :] = 0.0, -1.0
    shift[3, ::2] = -0.0
    scale[5, :], shift[5, :] = patterns(hidden, seed=3), patterns(hidden, seed=4)
    shift[6, :] = 3e38
    shift[6, 1::2] = -1e-38
    scale[7, :], shift[7, :] = -1.0, 2.0**-120
    shift[7, ::3] = -(2.0**-133)
    return [x, weight, scale, shift, index]


def outputs(rows: int, hidden: int) -> tuple[torch.Tensor, torch.Tensor]:
    codes = torch.full((rows, hidden), 0x7F, dtype=torch.uint8, device=CUDA).view(contract.QUANTIZED)
    return codes, torch.full((rows,), torch.nan, device=CUDA)


def check(
    function,
    inputs: list[torch.Tensor],
    eps: float = contract.EPS,
    extra_rows: int = 3,
    on_gpu=None,
    modulation: str = "fused",
) -> None:
    want = reference.norm_quant(*inputs, eps=eps, modulation=modulation)
    on_gpu = on_gpu or [t.to(CUDA) for t in inputs]
    rows, hidden = inputs[0].shape
    codes, scales = outputs(rows + extra_rows, hidden)
    function(*on_gpu, codes, scales, eps)
    assert_equal("s_row", scales[:rows].cpu(), want.s_row)
    assert_equal("a_q", codes[:rows].cpu(), want.a_q)
    assert scales[rows:].isnan().all(), "scales past the last row were written"
    assert (bits(codes[rows:]) == 0x7F).all(), "codes past the last row were written"


def assert_equal(name: str, got: torch.Tensor, want: torch.Tensor) -> None:
    wrong = bits(got) != bits(want)
    if wrong.any():
        first = tuple(wrong.nonzero()[0].tolist())
        raise AssertionError(
            f"{name}: {wrong.sum()} of {wrong.numel()} differ, first at {first}: {got[first].item()!r} "
            f"(0x{bits(got)[first].item():x}), wanted {want[first].item()!r} (0x{bits(want)[first].item():x})"
        )


@pytest.mark.parametrize("mapping", MAPPINGS)
@pytest.mark.parametrize("hidden", [128, 384, contract.HIDDEN])
def test_edges(hidden, mapping):
    check(kernel(hidden, index_bits=64, **MAPPINGS[mapping]), nasty(301, hidden))


@pytest.mark.parametrize("mapping", MAPPINGS)
@pytest.mark.parametrize("hidden", [384, contract.HIDDEN])
def test_edges_of_eager_modulation(hidden, mapping):
    function = kernel(hidden, index_bits=64, modulation="eager", **MAPPINGS[mapping])
    check(function, nasty(301, hidden), modulation="eager")


@pytest.mark.parametrize("rows", [0, 1, 2, 5, 301])
@pytest.mark.parametrize("mapping", MAPPINGS)
def test_without_adaln(mapping, rows):
    x, weight = nasty(301, 384)[:2]
    check(kernel(384, index_bits=0, modulation=None, **MAPPINGS[mapping]), [x[:rows], weight])


def test_without_adaln_at_the_real_size():
    check(kernel(contract.HIDDEN, index_bits=0, modulation=None), nasty(301, contract.HIDDEN)[:2])


@pytest.mark.parametrize("rows", [1, 2, 3, 4, 5, 23, 64])
@pytest.mark.parametrize("mapping", MAPPINGS)
def test_few_rows(mapping, rows):
    check(kernel(384, index_bits=64, **MAPPINGS[mapping]), batch(rows, 384))


@pytest.mark.parametrize("hidden", [384, 640, 1152])
def test_ragged_vectors_of_one_warp(hidden):
    """2 to 5 vectors a thread, of which half the lanes lack the last."""
    check(kernel(hidden, index_bits=64, warps=1, stages=4), nasty(301, hidden))


@pytest.mark.parametrize("rows", [1, 3, 301])
def test_what_was_left_in_shared_memory(rows):
    """Before row 0 there is none (``Rows.has``): no number that another kernel left may be taken for its table row."""
    function = kernel(384, index_bits=64)
    other = kernel(contract.HIDDEN, index_bits=64, sms=512)  # more CTAs than SMs
    inputs = batch(512, contract.HIDDEN)
    inputs[0].fill_(2.0**100)  # two of them are 0x71807180, a table row of 2e9
    other(*(t.to(CUDA) for t in inputs), *outputs(512, contract.HIDDEN), contract.EPS)
    check(function, batch(rows, 384))


def test_no_rows():
    check(kernel(384, index_bits=64), [t[:0] if k in (0, 4) else t for k, t in enumerate(batch(8, 384))])


@pytest.mark.parametrize(
    ("dtype", "outside"),
    [
        (torch.int32, [-1, TABLE_ROWS, -(2**31), 2**31 - 1]),
        (torch.int64, [-1, TABLE_ROWS, -(2**63), 2**63 - 1, 2**32, 2**32 + 1, -(2**32) + 2]),
    ],
)
def test_indices_outside_the_tables(dtype, outside):
    inputs = batch(64, 384)
    inputs[4] = inputs[4].clamp(0, TABLE_ROWS - 1).to(dtype)
    inputs[4][5 : 5 + len(outside)] = torch.tensor(outside, dtype=dtype)
    inputs[0][5:9] = torch.nan
    check(kernel(384, index_bits=torch.iinfo(dtype).bits), inputs)


@pytest.mark.parametrize("every", [1, 2, 3, 50])
def test_runs_of_equal_indices(every):
    """Rows of a CTA with one index and with several."""
    inputs = batch(200, 384)
    inputs[4] = (torch.arange(200) // every) % TABLE_ROWS
    check(kernel(384, index_bits=64), inputs)


@pytest.mark.parametrize("eps", [1e-30, 1e-5, 1.0, 1e30])
def test_eps(eps):
    check(kernel(384, index_bits=64), nasty(60, 384), eps)


@pytest.mark.parametrize("offset", [0, 1, 3, 8])
@pytest.mark.parametrize("pad", [0, 1, 8])
def test_layouts(offset, pad):
    """Columns of wider tensors at any element offset, as engines cut the tables out of one projection."""
    hidden = 384
    inputs = nasty(100, hidden)

    def widen(t: torch.Tensor) -> torch.Tensor:
        wide = torch.full((t.shape[0], hidden + 8 + pad), torch.nan, dtype=t.dtype, device=CUDA)
        wide[:, offset : offset + hidden] = t.to(CUDA)
        return wide[:, offset : offset + hidden]

    weight = torch.empty(hidden + offset, dtype=torch.bfloat16, device=CUDA)[offset:].copy_(inputs[1])
    on_gpu = [widen(inputs[0]), weight, widen(inputs[2]), widen(inputs[3]), inputs[4].to(CUDA)]
    check(kernel(hidden, index_bits=64, vectors=False), inputs, on_gpu=on_gpu)
    if offset % 8 == 0 and pad % 8 == 0:
        check(kernel(hidden, index_bits=64), inputs, on_gpu=on_gpu)


def test_one_row_of_a_wide_tensor_and_one_table_row():
    """A dimension of size 1 may have any stride."""
    inputs = batch(1, 384)
    inputs[2], inputs[3], inputs[4] = inputs[2][:1], inputs[3][:1], torch.zeros(1, dtype=torch.int64)
    on_gpu = [t.to(CUDA) for t in inputs]
    for k in (0, 2, 3):
        on_gpu[k] = on_gpu[k].as_strided((1, 384), (8, 1))
    check(kernel(384, index_bits=64), inputs, on_gpu=on_gpu)


def test_every_bf16_scale_and_magnitude():
    """1 + scale of every BF16, and a of every BF16 against many amax."""
    hidden = 65536
    every = torch.arange(-(2**15), 2**15).short().view(torch.bfloat16)
    mantissas = torch.arange(128)
    exponents = torch.tensor([1, 40, 87, 100, 127, 140, 200, 254])
    amax = ((exponents[:, None] << 7) | mantissas).flatten().short().view(torch.bfloat16)
    rows = amax.numel()
    # With 1 + scale = 0 and x = 0, a is the shift: all numbers up to amax.
    shift = torch.where(every.abs() <= amax[:, None], every, 0.0)
    inputs = [
        torch.zeros(rows, hidden, dtype=torch.bfloat16),
        torch.ones(hidden, dtype=torch.bfloat16),
        torch.full((rows, hidden), -1.0, dtype=torch.bfloat16),
        shift,
        torch.arange(rows),
    ]
    function = kernel(hidden, index_bits=64, stages=0)
    for part in torch.arange(rows).split(128):
        check(function, [inputs[0][part], *inputs[1:4], inputs[4][part]])
    x = synthetic.layer(4, hidden, 64).x
    check(function, [x, inputs[1], every[None], torch.zeros(1, hidden, dtype=torch.bfloat16), torch.zeros(4).long()])


def test_row_offsets_past_2_to_the_31():
    """Row 399,458 of 5376 columns starts past 2^31 elements; 6.5 GB, of which only the last rows are compared."""
    hidden, rows = contract.HIDDEN, 399_500
    if torch.cuda.mem_get_info()[0] < 8e9:
        pytest.skip("needs 8 GB of free device memory")
    last = batch(64, hidden)
    x = torch.ones(rows, hidden, dtype=torch.bfloat16, device=CUDA)
    x[-64:] = last[0].to(CUDA)
    index = torch.zeros(rows, dtype=torch.int64, device=CUDA)
    index[-64:] = last[4].to(CUDA)
    codes, scales = outputs(rows, hidden)
    kernel(hidden, index_bits=64, sms=132)(x, *(t.to(CUDA) for t in last[1:4]), index, codes, scales, contract.EPS)
    want = reference.norm_quant(*last)
    assert_equal("s_row", scales[-64:].cpu(), want.s_row)
    assert_equal("a_q", codes[-64:].cpu(), want.a_q)
    assert not scales.isnan().any()


def test_current_stream():
    stream = torch.cuda.Stream()
    inputs = batch(64, 384)
    on_gpu = [t.to(CUDA) for t in inputs]
    function = kernel(384, index_bits=64)
    torch.cuda.synchronize()
    with torch.cuda.stream(stream):
        check(function, inputs, on_gpu=on_gpu)
