"""What the tests of the GPU kernels share: layers on the GPU, and what their outputs must be."""

import itertools
import os
import subprocess
import sys
import threading
from collections.abc import Callable

import torch
from helpers import bits

import h3mlp
from h3mlp import contract, reference
from h3mlp.backends.cute import forms

CUDA = torch.device("cuda", 0)
CAPABILITY = torch.cuda.get_device_capability(CUDA) if torch.cuda.is_available() else None
FORMS = {(8, 9): forms.OF["sm_89"], (9, 0): (forms.PLAIN,), (12, 0): forms.OF["sm_120a"], (12, 1): forms.OF["sm_121a"]}
FORMS_HERE = FORMS.get(CAPABILITY, ())
"""Of mma.sync of E4M3 on this GPU; Hopper emulates the plain one."""

LOADS_HERE = ("async",) if CAPABILITY == (8, 9) else ("tma", "async")
ATOL, RTOL = 1e-2, 1.6e-2
"""Two BF16 roundings of h, one of the SiLU and one of y, each half a step of 2^-8, make 0.8%; a rounding that flips
because of the accumulator's error doubles its share."""


def make(rows: int, hidden: int = contract.HIDDEN, ffn: int = contract.FFN, seed: int = 0) -> contract.FC1Inputs:
    """As synthetic.layer, on the GPU."""
    generator = torch.Generator(CUDA).manual_seed(seed)

    def normal(*shape, std=1.0, mean=0.0):
        return torch.empty(shape, dtype=torch.bfloat16, device=CUDA).normal_(mean, std, generator=generator)

    weight = h3mlp.prepare_fc1_weight_fp8(normal(2 * ffn, hidden, std=hidden**-0.5))
    index = torch.randint(9, (rows,), generator=generator, device=CUDA)
    return contract.FC1Inputs(
        normal(rows, hidden), normal(hidden, std=0.1, mean=1.0), *normal(2, 9, hidden, std=0.1), index, *weight
    )


def first(inputs: contract.FC1Inputs, rows: int) -> contract.FC1Inputs:
    return inputs._replace(x=inputs.x[:rows], adaln_index=inputs.adaln_index[:rows])


def with_edges(inputs: contract.FC1Inputs) -> contract.FC1Inputs:
    """Zero row, indices outside, NaN, Inf, an overflowing sum of squares, the smallest and largest BF16 in the first
    ten rows. y is +0 in rows 0 to 3 and NaN in row 4."""
    x, index, shift = inputs.x.clone(), inputs.adaln_index.clone(), inputs.adaln_shift.clone()
    shift[7] = 0
    x[0] = 0
    index[0] = 7  # with no shift: a = 0
    index[1], index[2], index[3] = -1, 9, 2**40
    x[2] = torch.nan
    x[4, 5] = torch.nan
    x[5, 6] = torch.inf
    x[6] = 1e30
    x[7] = torch.finfo(torch.bfloat16).smallest_normal / 4
    x[8] = torch.finfo(torch.bfloat16).max
    x[9] = -0.0
    return inputs._replace(x=x, adaln_index=index, adaln_shift=shift)


def y_of(a_q: torch.Tensor, s_row: torch.Tensor, w_q: torch.Tensor, w_scale: torch.Tensor) -> torch.Tensor:
    """y of these codes, accumulated in FP64 on the GPU."""
    h = reference.dequantize(reference.accumulate(a_q, w_q), s_row, w_scale)
    return reference.swiglu(*reference.gate_and_up(h))


def outside(y: torch.Tensor, want: torch.Tensor) -> torch.Tensor:
    """Where y is out of tolerance; a NaN where only one has it is."""
    y, want = y.float(), want.float()
    return ~((y - want).abs() <= ATOL + RTOL * want.abs()) & ~(y.isnan() & want.isnan())


def close(y: torch.Tensor, want: torch.Tensor) -> None:
    off = outside(y, want)
    assert off.sum() <= max(4, 2e-7 * off.numel()), f"{off.sum()} of {off.numel()}, first {off.nonzero()[0].tolist()}"


def around_2_to_the_31(rows: int) -> torch.Tensor:
    """Rows on both sides of where out and a_q have 2^31 elements, and some more."""
    near = [2**31 // n + k for n in (contract.FFN, contract.HIDDEN) for k in (-1, 0, 1) if 2**31 // n + k < rows]
    return torch.tensor([0, 1, rows // 2, rows - 2, rows - 1, *near]).unique().to(CUDA)


def start(script: str, *tool: str, **environment: str) -> subprocess.Popen:
    """A script in another Python, under a tool if given; both outputs are one text."""
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), **environment}
    command = [*tool, sys.executable, "-c", script]
    return subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)


def agree_in_threads(call: Callable[[], torch.Tensor]) -> None:
    """Eight calls at once, each on a stream of its own, have the same bits."""
    outputs, errors = [None] * 8, []

    def work(i):
        try:
            with torch.cuda.stream(torch.cuda.Stream()):
                outputs[i] = call()
                torch.cuda.current_stream().synchronize()
        except Exception as error:
            errors.append(error)

    torch.cuda.synchronize()
    threads = [threading.Thread(target=work, args=(i,)) for i in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not errors
    assert all(torch.equal(bits(a), bits(b)) for a, b in itertools.pairwise(outputs))


def agree_in_two_processes(script: str, cache: str) -> None:
    """A script that ends by printing "agrees", twice at once, with this folder as the cache of kernels."""
    for process in [start(script, H3MLP_CACHE_DIR=cache) for _ in range(2)]:
        output, _ = process.communicate(timeout=120)
        assert process.returncode == 0, output
        assert "agrees" in output


def sanitize(tool: str, script: str, **environment: str) -> None:
    """A script that ends by printing "agrees" has nothing to be reproached by this tool of compute-sanitizer."""
    tool = ("compute-sanitizer", "--tool", tool, "--report-api-errors", "no", "--error-exitcode", "99")
    process = start(script, *tool, **environment)
    output, _ = process.communicate(timeout=300)
    assert process.returncode == 0, output[-3000:]
    assert "agrees" in output
    assert "0 errors" in output or "0 hazards" in output
