"""Compiling and loading ahead of the first call."""

from collections.abc import Iterable

import torch

from .. import check, contract
from ..operators import dispatch


def warmup(
    device: torch.device | str | int | None = None,
    rows: Iterable[int] = (1, 64, 128, 4096, 32768),
    *,
    hidden: int = contract.HIDDEN,
    ffn: int = contract.FFN,
    accumulate: str = "fp32",
    gemm: str | None = None,
    modulation: str = "fused",
    operators: Iterable[str] = contract.OPERATORS,
) -> None:
    """Compile and load the kernels for calls with so many rows, so that no call waits for it, nor a CUDA graph capture.

    A kernel is compiled in seconds and then kept on disk (``$H3MLP_CACHE_DIR``, else the user's cache folder). On the
    CPU there is nothing to do. Needs 2F * H bytes of device memory for the moment (154 MB).

    GPUs of compute capability 8.9, 12.0 and 12.1 have several GEMMs that give the same bits. The first warm-up on such
    a GPU measures which is the fastest (some seconds to compile them, 0.3 GB of memory for the moment) and keeps that
    on disk too; ``h3mlp doctor`` shows it.

    Args:
        device: which one; the fastest of this machine unless given.
        rows: the numbers of rows M that calls will have; the kernel for one M serves many others.
        hidden: H of the calls.
        ffn: F of the calls.
        accumulate: as in ``fc1_swiglu_fp8``.
        gemm: use this GEMM on the device from now on, in this process: form and tile such as ``unit_scale:128x256``.
            Unless given, ``$H3MLP_GEMM``, or else the one measured as the fastest.
        modulation: as in ``fc1_swiglu_fp8``. The kernel without AdaLN is always among those that are loaded.
        operators: "fc1" for ``fc1_swiglu_fp8``, "mlp" for ``mlp_fp8``; both unless given. The MLP needs about as many
            kernels more.

    Raises:
        ValueError: an argument out of range, or a ``gemm`` that the device does not have.
        NotImplementedError: no backend serves the device.
        RuntimeError: a kernel does not compile or cannot be launched.
    """
    device = dispatch.best()[0] if device is None else torch.device(device)
    if device.type == "cuda" and device.index is None:
        device = torch.device("cuda", torch.cuda.current_device())
    rows, operators = tuple(rows), tuple(operators)
    for count in rows:
        check.positive_int("rows", count)
    check.dimensions(hidden, ffn)
    check.accumulate(accumulate)
    check.modulation(modulation)
    if not operators or not set(operators) <= set(contract.OPERATORS):
        check.refuse("operators", f"some of {', '.join(map(repr, contract.OPERATORS))}", operators)
    prepare = getattr(dispatch.select(device), "warmup", None)
    if prepare is not None:
        prepare(device, rows, hidden, ffn, accumulate, gemm, modulation, operators)
    elif gemm is not None:
        check.refuse("gemm", f"None on {device}, where there is no choice", gemm)
