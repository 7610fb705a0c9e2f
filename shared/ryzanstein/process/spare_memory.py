"""Keeps a process's memory near what it uses: few arenas, and back to the system what a peak of work has left behind.

A full garbage collection stops the process for about a microsecond for each object: it is not left to chance.

glibc keeps what was freed between what is still in use. A router that held hundreds of large
prompts for a minute would show their size for ever, and count as full where a limit applies. It also
gives each thread an arena of its own, up to eight for each core, and each keeps what it was once
filled with: the memory of a router that is hit for hours crept up by 3 % an hour.
"""

from __future__ import annotations

import ctypes
import gc
import math
import os
import threading
import time
from collections.abc import Callable
from pathlib import Path

LOOK_S = 10.0
YOUNG_S = 0.25
LEAST_BYTES = 32 * 2**20
QUICK_OBJECTS = 100_000
"""Old objects that a full collection looks at in at most 0.1 s."""
_GROWN_OBJECTS = 20_000
_FULL, _FULL_S = 0.85, 60.0
"""A process that holds this share of its limit collects once in so many seconds."""
_LEAK_BYTES = 512 * 2**20
_LEAK_S = 3600.0
_NEVER = 2**30
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
    """Gives back what is free, also in cycles."""
    gc.collect()
    give_back()


def give_back() -> None:
    """Gives back what is free. An allocator other than glibc's keeps it."""
    if (malloc_trim := getattr(ctypes.CDLL(None), "malloc_trim", None)) is not None:
        malloc_trim(0)


def _num_old_objects() -> int:
    """Returns how many objects a full collection would look at, besides new ones."""
    return len(gc.get_objects(generation=2))


class CalmCollector:
    """Decides when a process that must stay on time collects garbage from all of its memory.

    By default the interpreter does so when a quarter of the objects is new. In a router with 35,000 ended answers, which
    clients may come back to, that stopped the process for 1.6 s. Reference counts free nearly all of these objects. The
    others are cycles that outlived the two younger generations. They are collected when that is quick, when memory runs
    out, and after an hour of growth.
    """

    def __init__(
        self,
        objects: Callable[[], int] = _num_old_objects,
        resident: Callable[[], int] = resident_bytes,
        limit_bytes: float = math.inf,
    ) -> None:
        self._objects, self._resident, self._limit_bytes = objects, resident, limit_bytes
        self._least_objects = objects()
        self._least_bytes, self._collected_at = resident(), time.monotonic()

    def begin(self) -> None:
        """Exempts the objects of now from collections, and makes full collections rare.

        At the default, every 700 new objects, a loaded router spends 3 % of its time in the collector. Every call of
        the gRPC library leaves a cycle of ten objects: what waits for a collection is a megabyte.
        """
        gc.collect()
        gc.freeze()
        gc.set_threshold(10_000, 20, _NEVER)
        self.collected()

    def look(self) -> bool:
        """Returns whether to collect now. Call `collected` when that is done."""
        objects, resident, waited_s = self._objects(), self._resident(), time.monotonic() - self._collected_at
        self._least_objects, self._least_bytes = min(self._least_objects, objects), min(self._least_bytes, resident)
        if objects <= QUICK_OBJECTS:
            return objects - self._least_objects >= _GROWN_OBJECTS or resident - self._least_bytes >= LEAST_BYTES
        if resident > _FULL * self._limit_bytes:
            return waited_s >= _FULL_S
        return waited_s >= _LEAK_S and resident - self._least_bytes >= _LEAK_BYTES

    def collect_young(self) -> None:
        """Looks at the objects that are new since the last time, and at no others.

        The interpreter does so once 10,000 more were made than freed. A router that forgets as many answers as it ends makes no
        more, until hundreds of clients come or go at once: then it would look at all answers since the last time, for 0.3 s.
        """
        gc.collect(1)

    def collected(self) -> None:
        self._least_objects, self._least_bytes, self._collected_at = self._objects(), self._resident(), time.monotonic()


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

    def start(self, collector: CalmCollector) -> None:
        """Looks in a thread of its own as long as the process lives."""
        threading.Thread(target=self._run, args=(collector,), name="spare-memory", daemon=True).start()

    def _run(self, collector: CalmCollector) -> None:
        while True:
            for _ in range(round(LOOK_S / YOUNG_S)):
                time.sleep(YOUNG_S)
                collector.collect_young()
            if collector.look():
                gc.collect()
                collector.collected()
            if self.look():
                give_back()
                self.trimmed()
