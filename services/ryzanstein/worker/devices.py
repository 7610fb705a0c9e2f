"""The memory of this machine and of its GPUs, without torch.

GPUs are asked through NVIDIA's management library, which comes with the driver
(https://docs.nvidia.com/deploy/nvml-api).
"""

from __future__ import annotations

import ctypes
import os
from collections.abc import Iterator
from contextlib import contextmanager

from ryzanstein import allotment, errors

SHARE = 0.9
"""The share of the memory that models may take: the rest is for the system and the agent."""
_NVML = "libnvidia-ml.so.1"
_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3  # of malloc.h
_KEPT_BYTES = 16 * 2**20


class _DeviceMemory(ctypes.Structure):
    """nvmlMemory_t."""

    _fields_ = (("total", ctypes.c_ulonglong), ("free", ctypes.c_ulonglong), ("used", ctypes.c_ulonglong))


def machine_memory_bytes() -> int:
    """Returns nine tenths of the memory, or of the control group's limit if that is less."""
    return int(allotment.memory_bytes() * SHARE)


def keep_freed_memory() -> None:
    """Lets the allocator of this process keep what messages free, up to some megabytes, for the next ones.

    By default glibc returns each larger piece to the system when it is freed, and each message of a
    megabyte pays for 256 pages of memory that are taken and zeroed again. Does nothing elsewhere.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:
        mallopt(_M_MMAP_THRESHOLD, _KEPT_BYTES // 4)
        mallopt(_M_TRIM_THRESHOLD, _KEPT_BYTES)


def num_gpus() -> int:
    """Returns the number of GPUs that ranks may use; 0 without a driver."""
    with _nvml() as nvml:
        return 0 if nvml is None else len(_handles(nvml))


def gpu_memory_bytes(num_ranks: int) -> int:
    """Returns nine tenths of the memory of the GPUs of so many ranks, one each.

    Raises FAILED_PRECONDITION when the driver does not tell.
    """
    with _nvml() as nvml:
        sizes = [] if nvml is None else [_total(nvml, handle) for handle in _handles(nvml)[:num_ranks]]
    if not sizes:
        raise errors.failed_precondition("NO_GPU", f"device cuda: {_NVML} finds no GPU; the memory for models must be set")
    return int(sum(sizes) * SHARE)


@contextmanager
def _nvml() -> Iterator[ctypes.CDLL | None]:
    """Opens the library for a moment; None if there is none or it does not work."""
    try:
        nvml = ctypes.CDLL(_NVML)
    except OSError:
        yield None
        return
    if nvml.nvmlInit_v2() != 0:
        yield None
        return
    try:
        yield nvml
    finally:
        nvml.nvmlShutdown()


def _handles(nvml: ctypes.CDLL) -> list[ctypes.c_void_p]:
    """Returns the GPUs that CUDA_VISIBLE_DEVICES leaves to this process."""
    count = ctypes.c_uint()
    if nvml.nvmlDeviceGetCount_v2(ctypes.byref(count)) != 0:
        return []
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    names = [str(number) for number in range(count.value)] if visible is None else visible.split(",")
    found = []
    for name in names:
        handle = ctypes.c_void_p()
        if name.strip().isdigit():
            result = nvml.nvmlDeviceGetHandleByIndex_v2(ctypes.c_uint(int(name)), ctypes.byref(handle))
        else:
            result = nvml.nvmlDeviceGetHandleByUUID(name.strip().encode(), ctypes.byref(handle))
        if result != 0:
            break  # as CUDA does: what follows an invalid name is not visible
        found.append(handle)
    return found


def _total(nvml: ctypes.CDLL, handle: ctypes.c_void_p) -> int:
    memory = _DeviceMemory()
    result = nvml.nvmlDeviceGetMemoryInfo(handle, ctypes.byref(memory))
    return int(memory.total) if result == 0 else 0
