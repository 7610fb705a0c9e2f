"""Keeps a process's memory near what it uses: few arenas, and back to the system what a peak of work has left behind.

glibc keeps what was freed between what is still in use. A router that held hundreds of large
prompts for a minute would show their size for ever, and count as full where a limit applies. It also
gives each thread an arena of its own, up to eight for each core, and each keeps what it was once
filled with: the memory of a router that is hit for hours crept up by 3 % an hour.
"""

from __future__ import annotations

import ctypes
import gc
import os
import threading
import time
from collections.abc import Callable
from pathlib import Path

LOOK_S = 10.0
LEAST_BYTES = 32 * 2**20
_STATM = Path("/proc/self/statm")
_ARENAS = 2
_M_ARENA_MAX = -8  # of malloc.h


def resident_bytes() -> int:
    """Returns the memory of this process that is resident; 0 where the system does not say."""
    try:
        return int(_STATM.read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    except (OSError, IndexError, ValueError):
        return 0


def limit_arenas() -> None:
    """Makes all threads share two arenas, unless MALLOC_ARENA_MAX is set. An allocator other than glibc's has none."""
    if "MALLOC_ARENA_MAX" not in os.environ and (mallopt := getattr(ctypes.CDLL(None), "mallopt", None)) is not None:
        mallopt(_M_ARENA_MAX, _ARENAS)


def trim() -> None:
    """Gives back what is free, also in cycles. An allocator other than glibc's keeps it."""
    gc.collect()
    if (give_back := getattr(ctypes.CDLL(None), "malloc_trim", None)) is not None:
        give_back(0)


class SpareMemory:
    """Decides when to give memory back: after it has grown, and no longer grows. `look` now and then."""

    def __init__(self, resident: Callable[[], int] = resident_bytes) -> None:
        self._resident = resident
        self._least = self._last = resident()

    def look(self) -> bool:
        """Returns whether memory should be given back now. Call `trimmed` when it was."""
        now, before = self._resident(), self._last
        self._last, self._least = now, min(self._least, now)
        return now <= before and now >= self._least + LEAST_BYTES

    def trimmed(self) -> None:
        self._least = self._last = self._resident()

    def start(self) -> None:
        """Looks in a thread of its own as long as the process lives."""
        threading.Thread(target=self._run, name="spare-memory", daemon=True).start()

    def _run(self) -> None:
        while True:
            time.sleep(LOOK_S)
            if self.look():
                trim()
                self.trimmed()
