"""What runs the operator on a device."""

import torch


def no_nvidia_gpu(device: torch.device) -> str | None:
    """Why a backend for NVIDIA GPUs does not serve this device; None where it may."""
    if device.type != "cuda":
        return "serves CUDA devices only"
    if torch.version.hip:
        return "needs an NVIDIA GPU; this torch is built for ROCm"
    if not torch.cuda.is_available():
        return "torch finds no CUDA device"
    return None
