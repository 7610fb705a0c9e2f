"""Gives memory back to the system that a peak of work has left behind.

glibc keeps what was freed between what is still in use. A router that held hundreds of large
prompts for a minute would show their size for ever, and count as full where a limit applies.
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


def resident_bytes() -> int:
    """Returns the memory of this process that is resident; 0 where the system does not say."""
    try:
        return int(_STATM.read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    except (OSError, IndexError, ValueError):
        return 0


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
