"""The energy that a GPU has used, as NVML counts it."""

import torch


def joules(device: torch.device) -> float | None:
    """Since the driver was loaded; its counter moves some ten to fifty times a second. None where nobody tells: no
    nvidia-ml-py, no permission, or a GPU that does not count."""
    try:
        import pynvml
    except ImportError:
        return None
    try:
        pynvml.nvmlInit()
        handle = pynvml.nvmlDeviceGetHandleByUUID(f"GPU-{uuid_of(device)}")
        return pynvml.nvmlDeviceGetTotalEnergyConsumption(handle) / 1e3
    except pynvml.NVMLError:
        return None


def uuid_of(device: torch.device) -> str:
    """By which NVML and nvidia-smi know the device, whatever ``CUDA_VISIBLE_DEVICES`` hides."""
    return str(torch.cuda.get_device_properties(device).uuid).removeprefix("GPU-")
