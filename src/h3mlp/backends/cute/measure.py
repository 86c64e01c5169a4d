"""Time the candidates of ``choice`` side by side on a device, 0.1 s once they are compiled."""

import statistics

import torch

from ... import contract
from . import choice, jit, variants
from .choice import Choice
from .product import fc1

ROWS = 4096
"""Long enough to fill any GPU with several waves of every tile; a_q, weights and y take 0.3 GB."""

ROUNDS = 7


def run(device: int, gpu: variants.Gpu) -> dict[Choice, float]:
    """Microseconds of FC1's GEMM with the model's dimensions. All forms are tried with the default tile, all tiles with
    the form that is then the fastest. The device is the current one, and is waited for."""
    times = {}
    options = choice.candidates(gpu.arch)
    times |= _side_by_side(device, gpu, [option for option in options if option.tile == options[0].tile])
    form = min(times, key=times.get).form
    return times | _side_by_side(device, gpu, [option for option in options if option.form == form])


def _side_by_side(device: int, gpu: variants.Gpu, options: list[Choice]) -> dict[Choice, float]:
    hidden, ffn = contract.HIDDEN, contract.FFN
    generator = torch.Generator(f"cuda:{device}").manual_seed(0)

    def codes(rows: int) -> torch.Tensor:
        """Random ones but NaN: power, and with it the clock, depends on the data."""
        size = (rows, hidden)
        random = torch.randint(0, 0x7F, size, dtype=torch.uint8, device=generator.device, generator=generator)
        return random.view(contract.QUANTIZED)

    a_q, w_q = codes(ROWS), codes(2 * ffn)
    s_row, w_scale = a_q.new_ones(ROWS, dtype=contract.SCALE), a_q.new_ones(2 * ffn, dtype=contract.SCALE)
    out = a_q.new_empty((ROWS, ffn), dtype=contract.ACTIVATION)
    kernels = {}
    for option in options:
        tile = variants.LARGE_TILES[option.tile]
        kernels[option] = jit.load(variants.gemm_sm120(gpu, fc1(hidden, ffn), tile, option.form), gpu.arch)
    events = {option: [] for option in options}
    for _ in range(ROUNDS + 1):  # the first warms up
        for option, kernel in kernels.items():
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            begin.record()
            kernel(a_q, s_row, w_q, w_scale, out, gpu.multiprocessors)
            end.record()
            events[option].append((begin, end))
    torch.cuda.synchronize()
    return {
        option: 1e3 * statistics.median(begin.elapsed_time(end) for begin, end in pairs[1:])
        for option, pairs in events.items()
    }
