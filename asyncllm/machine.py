"""What the machine has: cores, memory, a GPU. Found without torch, which is imported on its own thread.

Loop thread, once at start. It never knows models.
"""

import ctypes
import importlib.util
import os
from pathlib import Path

from .config import MachineFacts
from .errors import ModelError


def num_cores() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def facts(device: str) -> MachineFacts:
    """What a model runs on where `device` is asked for: "auto", "cpu" or "cuda".

    Raises:
        ModelError: "cuda" without a GPU that can be used, and why there is none.
    """
    cores = num_cores()
    gpu = _find_gpu() if device != "cpu" else "not asked for"
    if isinstance(gpu, str):
        if device == "cuda":
            raise ModelError(f"no GPU can be used: {gpu}; use --device cpu")
        return MachineFacts(device="cpu", num_cores=cores, free_bytes=_free_memory_bytes())
    missing = [name for name in ("flashinfer", "triton") if importlib.util.find_spec(name) is None]
    return MachineFacts(
        device="cuda",
        num_cores=cores,
        free_bytes=0,  # known once the model is there
        compute_capability=gpu,
        no_flashinfer=f"{', '.join(missing)} is not installed: pip install 'asyncllm[cuda]'" if missing else None,
    )


def _find_gpu() -> tuple[int, int] | str:
    """The first GPU's compute capability, or why there is none. Asks the driver: torch is imported on its thread."""
    torch_spec = importlib.util.find_spec("torch")
    if torch_spec is None or torch_spec.origin is None:
        return "torch is not installed"
    if not (Path(torch_spec.origin).parent / "lib" / "libtorch_cuda.so").exists():
        return "this torch is built without CUDA"
    try:
        driver = ctypes.CDLL("libcuda.so.1")
    except OSError:
        return "there is no NVIDIA driver (libcuda.so.1)"
    count, device, major, minor = ctypes.c_int(), ctypes.c_int(), ctypes.c_int(), ctypes.c_int()
    if driver.cuInit(0) or driver.cuDeviceGetCount(ctypes.byref(count)) or not count.value:
        return "the NVIDIA driver finds no GPU"
    driver.cuDeviceGet(ctypes.byref(device), 0)
    driver.cuDeviceGetAttribute(ctypes.byref(major), 75, device)  # CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR
    driver.cuDeviceGetAttribute(ctypes.byref(minor), 76, device)
    return major.value, minor.value


def _free_memory_bytes() -> int:
    """What new processes could have, swap aside; 4 GiB where the system does not say."""
    try:
        lines = Path("/proc/meminfo").read_text().splitlines()
        return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable:"))
    except (OSError, StopIteration):
        return 4 << 30
