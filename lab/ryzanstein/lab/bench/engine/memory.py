"""The most memory that processes have held, and their processor time, from proc(5).

A process that has ended counts nothing.
"""

from __future__ import annotations

import ctypes
import time
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path

import psutil

_LIBC = ctypes.CDLL(None)


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


def cpu_s(pids: Iterable[int]) -> float:
    """Returns the processor time of the processes, all threads together: clock_getcpuclockid(3)."""
    total_s, clock = 0.0, ctypes.c_int()
    for pid in pids:
        if _LIBC.clock_getcpuclockid(pid, ctypes.byref(clock)) == 0:
            with suppress(OSError):
                total_s += time.clock_gettime(clock.value)
    return total_s
