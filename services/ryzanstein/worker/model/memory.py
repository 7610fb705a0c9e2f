"""How much memory a model may take here."""

from __future__ import annotations

from pathlib import Path

import psutil
import torch

_CGROUP = Path("/sys/fs/cgroup")


def available_bytes(device: torch.device) -> int:
    """Bytes that can be allocated on `device` without swapping, inside the container's limit where there is one."""
    if device.type == "cuda":
        free, _ = torch.cuda.mem_get_info(device)
        return int(free)
    return min(psutil.virtual_memory().available, *_cgroup_room())


def _cgroup_room() -> list[int]:
    """What is left of the limit of control group v2; page cache counts as used there although it can be given back."""
    try:
        limit = int((_CGROUP / "memory.max").read_text())
        used = int((_CGROUP / "memory.current").read_text())
        stat = dict(line.split() for line in (_CGROUP / "memory.stat").read_text().splitlines())
    except (OSError, ValueError):
        return [psutil.virtual_memory().total]
    return [limit - used + int(stat.get("inactive_file", 0)) + int(stat.get("active_file", 0))]
