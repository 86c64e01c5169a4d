"""Both kernels on torch's current stream. The host never waits for the device."""

from collections.abc import Callable
from functools import lru_cache
from typing import NamedTuple

import torch

from ... import contract
from . import _ARCHITECTURE_OF, jit, variants
from .norm_quant import vectors_fit

TMA_ALIGNMENT = 16
"""Bytes: where a tensor that TMA reads or writes may begin."""


class _Gpu(NamedTuple):
    arch: str
    multiprocessors: int


@lru_cache(maxsize=64)
def _gpu(device: torch.device) -> _Gpu:
    arch = _ARCHITECTURE_OF[torch.cuda.get_device_capability(device)]
    return _Gpu(arch, torch.cuda.get_device_properties(device).multi_processor_count)


def run(inputs: contract.Inputs, eps: float, buffers: contract.Buffers, accumulate: str) -> None:
    """Both stages."""
    device = inputs.x.device
    if device.index != torch.cuda.current_device():
        with torch.cuda.device(device):
            return run(inputs, eps, buffers, accumulate)
    out, a_q, s_row = (_placed(buffer) for buffer in buffers)
    stage1(inputs, eps, a_q, s_row)
    stage2(a_q, s_row, _placed_input(inputs.fc1_weight_q), inputs.fc1_weight_scale, out, accumulate)
    for mine, given in zip((out, a_q, s_row), buffers, strict=True):
        if mine is not given:
            given.copy_(mine)
    return None


def stage1(inputs: contract.Inputs, eps: float, a_q: torch.Tensor, s_row: torch.Tensor) -> None:
    """x [M, H] to codes a_q [M, H] and scales s_row [M]."""
    x, weight, scale, shift, index = inputs[:5]
    rows, hidden = x.shape
    bits = 64 if index.dtype is torch.int64 else 32
    vectors = vectors_fit(x, weight, scale, shift, a_q)
    kernel = _norm_quant(x.device, hidden, bits, vectors)
    _launch(kernel, rows, x, weight, scale, shift, index, a_q, s_row, eps)


def stage2(
    a_q: torch.Tensor, s_row: torch.Tensor, w_q: torch.Tensor, w_scale: torch.Tensor, out: torch.Tensor, accumulate: str
) -> None:
    """Codes and scales to y [M, F]. a_q, w_q and out begin at a multiple of 16 bytes."""
    rows, ffn = out.shape
    gpu = _gpu(out.device)
    tokens = variants.tile_tokens(ffn, rows, gpu.multiprocessors)
    kernel = _gemm(out.device, a_q.shape[1], ffn, tokens, accumulate)
    _launch(kernel, rows, a_q, s_row, w_q, w_scale, out, gpu.multiprocessors)


def warmup(device: torch.device, rows: tuple[int, ...], hidden: int, ffn: int, accumulate: str) -> None:
    """Load what calls with so many rows launch, and launch it once, on one row: only then is it on the device."""
    gpu = _gpu(device)
    with torch.cuda.device(device):
        x, weight = torch.zeros((2, 1, hidden), dtype=contract.ACTIVATION, device=device)
        w_q = torch.empty((2 * ffn, hidden), dtype=contract.QUANTIZED, device=device)
        w_scale = torch.empty(2 * ffn, dtype=contract.SCALE, device=device)
        out, a_q, s_row = x.new_empty((1, ffn)), w_q.new_empty((1, hidden)), w_scale.new_empty(1)
        for bits, dtype in ((32, torch.int32), (64, torch.int64)):
            index = torch.zeros(1, dtype=dtype, device=device)
            kernel = _norm_quant(device, hidden, bits, True)
            _launch(kernel, 1, x, weight[0], x, x, index, a_q, s_row, contract.EPS)
        for tokens in {variants.tile_tokens(ffn, count, gpu.multiprocessors) for count in rows}:
            kernel = _gemm(device, hidden, ffn, tokens, accumulate)
            _launch(kernel, 1, a_q, s_row, w_q, w_scale, out, gpu.multiprocessors)


class _Compiled(NamedTuple):
    name: str
    function: Callable


def _launch(kernel: _Compiled, rows: int, *arguments) -> None:
    try:
        kernel.function(*arguments)
    except RuntimeError as error:
        device = arguments[0].device
        raise RuntimeError(f"kernel {kernel.name} was not launched on {device} for {rows} rows: {error}") from error


@lru_cache(maxsize=256)
def _norm_quant(device: torch.device, hidden: int, index_bits: int, vectors: bool) -> _Compiled:
    gpu = _gpu(device)
    return _load(variants.norm_quant(hidden, index_bits, vectors, gpu.multiprocessors), gpu.arch)


@lru_cache(maxsize=256)
def _gemm(device: torch.device, hidden: int, ffn: int, tokens: int, accumulate: str) -> _Compiled:
    gpu = _gpu(device)
    return _load(variants.gemm_sm90(hidden, ffn, tokens, accumulate), gpu.arch)


def _load(kernel: jit.Kernel, arch: str) -> _Compiled:
    return _Compiled(kernel.name, jit.load(kernel, arch))


def _placed(buffer: torch.Tensor) -> torch.Tensor:
    """The buffer, or one in its stead that begins where TMA can write."""
    return buffer if buffer.data_ptr() % TMA_ALIGNMENT == 0 else torch.empty_like(buffer)


def _placed_input(tensor: torch.Tensor) -> torch.Tensor:
    return tensor if tensor.data_ptr() % TMA_ALIGNMENT == 0 else tensor.clone()
