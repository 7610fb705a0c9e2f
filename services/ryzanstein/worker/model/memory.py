"""Memory for weights, and how much of it a model may take here."""

from __future__ import annotations

import math
import mmap
from pathlib import Path

import torch
from torch import Tensor

_CGROUP = Path("/sys/fs/cgroup")
_MEMINFO = Path("/proc/meminfo")
_MAPPED_BYTES = 2**20


def zeros(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    """Zeros that take no time and no memory before they are written, and go back to the system with the tensor.

    torch would write large ones, which costs about as much as reading them from the page cache; and what malloc is given back
    it may keep. Small ones, and those on a GPU, are torch's own.
    """
    num_bytes = math.prod(shape) * dtype.itemsize
    if device.type != "cpu" or num_bytes < _MAPPED_BYTES:
        return torch.zeros(shape, dtype=dtype, device=device)
    return torch.frombuffer(mmap.mmap(-1, num_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS), dtype=dtype).view(shape)


def available_bytes(device: torch.device) -> int:
    """Bytes that can be allocated on `device` without swapping, inside the container's limit where there is one."""
    if device.type == "cuda":
        free, _ = torch.cuda.mem_get_info(device)
        return int(free)
    return min([_meminfo("MemAvailable"), *_cgroup_room()])


def _cgroup_room() -> list[int]:
    """What is left of the limit of control group v2; page cache counts as used there although it can be given back."""
    try:
        limit = int((_CGROUP / "memory.max").read_text())
        used = int((_CGROUP / "memory.current").read_text())
        stat = dict(line.split() for line in (_CGROUP / "memory.stat").read_text().splitlines())
    except (OSError, ValueError):
        return []
    return [limit - used + int(stat.get("inactive_file", 0)) + int(stat.get("active_file", 0))]


def _meminfo(field: str) -> int:
    """Bytes, of proc_meminfo(5)."""
    lines = _MEMINFO.read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(f"{field}:"))
