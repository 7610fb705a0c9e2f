"""Where a node's ranks compute, and the memory that it has there, without torch."""

from __future__ import annotations

import ctypes

from ryzanstein import errors
from ryzanstein.process import allotment, gpus

SHARE = 0.9
"""The share of the memory that models may take: the rest is for the system and the agent."""
_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3  # of malloc.h
_KEPT_BYTES = 16 * 2**20


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


def gpu_memory_bytes(num_ranks: int) -> int:
    """Returns nine tenths of the memory of the GPUs of so many ranks, one each.

    Raises FAILED_PRECONDITION when the driver does not tell.
    """
    found = gpus.memory_bytes(num_ranks)
    if not found:
        raise errors.failed_precondition("NO_GPU", "device cuda: the driver finds no GPU; the memory for models must be set")
    return int(found * SHARE)


def device_of_node(asked: gpus.Device, tp: int, num_models: int) -> gpus.DeviceChoice:
    """Chooses where the ranks of a node compute, those of all its models. Raises FAILED_PRECONDITION: see `choose_device`."""
    whose = f"tp {tp}" if num_models == 1 else f"tp {tp} of {num_models} models"
    return gpus.choose_device(asked, tp * num_models, whose, gpus.find_gpus())
