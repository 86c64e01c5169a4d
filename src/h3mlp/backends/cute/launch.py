"""The kernels on torch's current stream. The host never waits for the device.

A denoising step makes 50 calls of the same shape, so what a shape needs is looked up once and kept.
"""

import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import lru_cache
from typing import NamedTuple, TypeVar

import torch

from ... import contract
from .. import ALIGNMENT, aligned, in_vectors, is_aligned, mlp_blocks
from . import _ARCHITECTURE_OF, blocks, choice, jit, product, variants

_log = logging.getLogger("h3mlp")
_Buffers = TypeVar("_Buffers", contract.FC1Buffers, contract.MLPBuffers)


class _Kernel(NamedTuple):
    name: str
    function: Callable

    def launch(self, rows: int, *arguments) -> None:
        try:
            self.function(*arguments)
        except RuntimeError as error:
            device = arguments[0].device
            raise RuntimeError(f"kernel {self.name} was not launched on {device} for {rows} rows: {error}") from error


def fc1_swiglu(
    inputs: contract.FC1Inputs,
    eps: float,
    buffers: contract.FC1Buffers,
    accumulate: str,
    modulation: str = "fused",
    fp8_mma_form: int = -1,
) -> None:
    """Both stages."""
    device = inputs.x.device
    if device.index != torch.cuda.current_device():
        with torch.cuda.device(device):
            return fc1_swiglu(inputs, eps, buffers, accumulate, modulation, fp8_mma_form)
    out, a_q, s_row = buffers
    w_q, w_scale = inputs.fc1_weight_q, inputs.fc1_weight_scale
    if (out.data_ptr() | a_q.data_ptr() | w_q.data_ptr()) % ALIGNMENT:
        return _fc1_elsewhere(inputs, eps, buffers, accumulate, modulation, fp8_mma_form)
    stage1(inputs, eps, a_q, s_row, modulation)
    stage2(a_q, s_row, w_q, w_scale, out, accumulate, fp8_mma_form)
    return None


def _fc1_elsewhere(inputs: contract.FC1Inputs, eps: float, buffers: contract.FC1Buffers, *options) -> None:
    """Where a tensor does not begin where TMA can read and write it: by way of a copy of that one."""
    with _aligned_matrices(buffers) as others:
        fc1_swiglu(inputs._replace(fc1_weight_q=aligned(inputs.fc1_weight_q)), eps, others, *options)


@contextmanager
def _aligned_matrices(buffers: _Buffers) -> Iterator[_Buffers]:
    """These buffers to write, but others in place of matrices that are not aligned, which get their content then."""
    others = type(buffers)(*(b if b.dim() == 1 or is_aligned(b) else torch.empty_like(b) for b in buffers))
    yield others
    for buffer, used in zip(buffers, others, strict=True):
        if used is not buffer:
            buffer.copy_(used)


def mlp(
    inputs: contract.MLPInputs,
    eps: float,
    buffers: contract.MLPBuffers,
    accumulate: str,
    modulation: str = "fused",
    fp8_mma_form: int = -1,
) -> None:
    """Both stages of FC1, the quantization of y and FC2, block by block."""
    device = inputs.x.device
    if device.index != torch.cuda.current_device():
        with torch.cuda.device(device):
            return mlp(inputs, eps, buffers, accumulate, modulation, fp8_mma_form)
    (hidden, ffn), rows = inputs.fc2_weight_q.shape, inputs.x.shape[0]
    # Without a table the gate is one, which leaves the sums as they are.
    inputs = inputs._replace(
        gate=inputs.x.new_ones((1, hidden)) if inputs.gate is None else in_vectors(inputs.gate),
        fc1_weight_q=aligned(inputs.fc1_weight_q),
        fc2_weight_q=aligned(inputs.fc2_weight_q),
    )
    step = blocks.rows_of_a_block(_gpu(device.index), hidden, ffn, rows, _chosen(device.index))
    for block, given in mlp_blocks(inputs, buffers, step):
        with _aligned_matrices(given) as used:
            fc1_swiglu(block.fc1, eps, used.fc1, accumulate, modulation, fp8_mma_form)
            quantize_rows(used.workspace_y, used.workspace_y_q, used.workspace_y_scale)
            stage3(used.workspace_y_q, used.workspace_y_scale, block, used.out, accumulate, fp8_mma_form)
    return None


def stage1(
    inputs: contract.FC1Inputs, eps: float, a_q: torch.Tensor, s_row: torch.Tensor, modulation: str = "fused"
) -> None:
    """x [M, H] to codes a_q [M, H] and scales s_row [M]. a_q begins at a multiple of 16 bytes."""
    x, weight, scale, shift, index = inputs[:5]
    rows, hidden = x.shape
    # stride()[0] takes 0.2 us less than stride(0).
    addresses, strides = x.data_ptr() | weight.data_ptr(), x.stride()[0]
    if index is None:
        tables, index_bits, modulation = (), 0, None
    else:
        addresses |= scale.data_ptr() | shift.data_ptr()
        strides |= scale.stride()[0] | shift.stride()[0]
        tables, index_bits = (scale, shift, index), 64 if index.dtype is torch.int64 else 32
    vectors = not (addresses % ALIGNMENT or strides % contract.VECTOR)
    kernel = _norm_quant(x.get_device(), hidden, index_bits, vectors, modulation)
    kernel.launch(rows, x, weight, *tables, a_q, s_row, eps)


def stage2(
    a_q: torch.Tensor,
    s_row: torch.Tensor,
    w_q: torch.Tensor,
    w_scale: torch.Tensor,
    out: torch.Tensor,
    accumulate: str,
    fp8_mma_form: int = -1,
) -> None:
    """Codes and scales to y [M, F]. a_q, w_q and out begin at a multiple of 16 bytes.

    It may begin while the kernel before it on the stream runs, reads w_q at once and the rest when that kernel is done.
    Behind stage 1 that is safe: stage 1 itself has waited for whatever wrote w_q.
    """
    rows, ffn = out.shape
    fc1 = out.get_device(), product.fc1, a_q.shape[1], ffn
    kernel, multiprocessors = _gemm(*fc1, rows, accumulate, fp8_mma_form)
    kernel.launch(rows, a_q, s_row, w_q, w_scale, out, multiprocessors)


def quantize_rows(y: torch.Tensor, y_q: torch.Tensor, s_y: torch.Tensor) -> None:
    """y [M, F] to codes y_q [M, F] and scales s_y [M]. y and y_q begin at a multiple of 16 bytes."""
    rows, columns = y.shape
    _quantize_rows(y.get_device(), columns).launch(rows, y, y_q, s_y)


def stage3(
    y_q: torch.Tensor,
    s_y: torch.Tensor,
    inputs: contract.MLPInputs,
    out: torch.Tensor,
    accumulate: str,
    fp8_mma_form: int = -1,
) -> None:
    """Codes and scales of y to out [M, H]. y_q, FC2's weight, out and each row of the gate's table begin at a multiple
    of 16 bytes; without an index all tokens have the table's first row.

    It may begin while the kernel before it runs, as ``stage2``.
    """
    rows, hidden = out.shape
    w_q, w_scale, residual = inputs.fc2_weight_q, inputs.fc2_weight_scale, in_vectors(inputs.residual)
    index = inputs.adaln_index
    words = out.new_empty(0, dtype=torch.int32) if index is None else index.view(torch.int32)
    fc2 = out.get_device(), product.fc2, hidden, y_q.shape[1]
    kernel, multiprocessors = _gemm(*fc2, rows, accumulate, fp8_mma_form)
    kernel.launch(rows, y_q, s_y, w_q, w_scale, inputs.gate, words, residual, out, multiprocessors)


def warmup(
    device: torch.device,
    rows: tuple[int, ...],
    hidden: int,
    ffn: int,
    accumulate: str,
    gemm: str | None = None,
    modulation: str = "fused",
    operators: tuple[str, ...] = contract.OPERATORS,
) -> None:
    """Load what calls with so many rows launch, and launch it once, on one row: only then is it on the device."""
    with torch.cuda.device(device):
        _choose(device.index, gemm)
        x, weight = torch.zeros((2, 1, hidden), dtype=contract.ACTIVATION, device=device)
        w_q = torch.empty((2 * ffn, hidden), dtype=contract.QUANTIZED, device=device)
        w_scale = torch.empty(2 * ffn, dtype=contract.SCALE, device=device)
        kinds = contract.mlp_buffer_rows(hidden, ffn).values()
        one = contract.MLPBuffers(*(torch.zeros((1, *row), dtype=dtype, device=device) for dtype, row in kinds))
        codes = one.workspace_a_q, one.workspace_a_scale
        stage1(contract.FC1Inputs(x, weight[0], None, None, None, w_q, w_scale), contract.EPS, *codes)
        for dtype in contract.INDEX:
            inputs = contract.FC1Inputs(x, weight[0], x, x, torch.zeros(1, dtype=dtype, device=device), w_q, w_scale)
            stage1(inputs, contract.EPS, *codes, modulation)

        def load(product_of: Callable, counts: set[int], arguments: tuple) -> None:
            for kernel, multiprocessors in {
                _gemm(device.index, product_of, hidden, ffn, n, accumulate) for n in counts
            }:
                kernel.launch(1, *arguments, multiprocessors)

        sizes = set(rows) if "fc1" in operators else set()
        if "mlp" in operators:
            gpu, chosen = _gpu(device.index), _chosen(device.index)
            of_blocks = {size for count in rows for size in blocks.sizes(gpu, hidden, ffn, count, chosen)}
            sizes |= of_blocks
            fc2 = w_q.view(-1, ffn)[:hidden], w_scale[:hidden], x, torch.zeros(1, dtype=torch.int32, device=device), x
            quantize_rows(*one[3:])
            load(product.fc2, of_blocks, (*one[4:], *fc2, one.out))
        load(product.fc1, sizes, (*codes, w_q, w_scale, one.workspace_y))


@lru_cache(maxsize=256)
def _norm_quant(device: int, hidden: int, index_bits: int, vectors: bool, modulation: str | None) -> _Kernel:
    gpu = _gpu(device)
    return _load(variants.norm_quant(gpu, hidden, index_bits, vectors, modulation), gpu.arch)


@lru_cache(maxsize=16)
def _quantize_rows(device: int, columns: int) -> _Kernel:
    return _load(variants.QuantizeRows(columns), _gpu(device).arch)


@lru_cache(maxsize=4096)
def _gemm(
    device: int,
    product_of: Callable[[int, int], product.Product],
    hidden: int,
    ffn: int,
    rows: int,
    accumulate: str,
    fp8_mma_form: int = -1,
) -> tuple[_Kernel, int]:
    gpu = _gpu(device)
    chosen = choice.with_form(_chosen(device), fp8_mma_form, gpu.arch)
    kernel = variants.gemm(gpu, product_of(hidden, ffn), rows, accumulate, chosen)
    return _load(kernel, gpu.arch), gpu.multiprocessors


@lru_cache(maxsize=64)
def _chosen(device: int) -> choice.Choice | None:
    """Looking it up on disk takes 1 ms: once, not for each number of rows."""
    found = choice.current(device, _gpu(device).arch)
    return found and found[0]


def _choose(device: int, gemm: str | None) -> None:
    """Settle which GEMM the device gets, where there is a choice."""
    gpu = _gpu(device)
    if gemm is not None:
        choice.tell(device, choice.parse("gemm", gemm, gpu.arch))
    else:
        chosen = choice.current(device, gpu.arch)
        if chosen is None or chosen[1] != choice.NOT_MEASURED:
            return
        from . import measure

        try:
            choice.keep(device, gpu.arch, measure.run(device, gpu))
        except torch.OutOfMemoryError as error:
            _log.warning("the GEMMs of cuda:%s are not measured, %s is used: %s", device, chosen[0], error)
    forget_choice()


def forget_choice() -> None:
    """Ask for it anew from now on."""
    _chosen.cache_clear()
    _gemm.cache_clear()


@lru_cache(maxsize=64)
def _gpu(device: int) -> variants.Gpu:
    found = torch.cuda.get_device_properties(device)
    return variants.Gpu(_ARCHITECTURE_OF[found.major, found.minor], found.multi_processor_count, found.L2_cache_size)


def _load(kernel: jit.Kernel, arch: str) -> _Kernel:
    return _Kernel(kernel.name, jit.load(kernel, arch))
