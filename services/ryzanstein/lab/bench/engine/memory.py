"""The most memory that processes have held, from proc(5).

A process that has ended counts nothing.
"""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path

import psutil


def tree(pid: int) -> list[int]:
    """Returns the process and all that it has started."""
    with suppress(psutil.NoSuchProcess):
        return [pid, *(child.pid for child in psutil.Process(pid).children(recursive=True))]
    return []


def reset_peak_rss(pid: int) -> None:
    with suppress(FileNotFoundError, ProcessLookupError):
        Path(f"/proc/{pid}/clear_refs").write_text("5")


def peak_rss_bytes(pid: int) -> int:
    """Returns VmHWM: the most since it was last reset."""
    with suppress(FileNotFoundError, ProcessLookupError):
        lines = Path(f"/proc/{pid}/status").read_text().splitlines()
        return next((int(line.split()[1]) * 1024 for line in lines if line.startswith("VmHWM:")), 0)
    return 0
