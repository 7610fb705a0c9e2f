"""How a rank waits for another: it spins briefly, then yields the core, then sleeps."""

from __future__ import annotations

import os
import time
from dataclasses import dataclass

from ryzanstein.worker.collectives import CollectiveTimeout

_SLEEP_S = 0.0002


@dataclass(frozen=True, slots=True)
class WaitPolicy:
    """A wait policy: `spin_s` seconds without yielding the core, `deadline_s` seconds in all.

    From `yield_s` on, sleeping costs little; until then the core is only yielded.

    The spin is short because the peer may need this very core: with more ranks than idle cores, a
    long spin makes every wait as long as the spin. The deadline is the last resort: the agent's
    watchdog detects a stalled collective in seconds.
    """

    spin_s: float = 0.00001
    yield_s: float = 0.001
    deadline_s: float = 600.0


SLEEPING = WaitPolicy(spin_s=0.0, yield_s=0.0)
"""For a processor that is granted by quota: idle cores let every yield return at once, and all of it is charged."""


def await_flag(flags: memoryview, index: int, value: int, patience: WaitPolicy, waiting: str) -> None:
    """Returns when `flags[index] >= value`.

    Raises CollectiveTimeout, whose message contains `waiting`, after the deadline.
    """
    started = time.perf_counter()
    while flags[index] < value:
        waited_s = time.perf_counter() - started
        if waited_s < patience.spin_s:
            continue
        if waited_s < patience.yield_s:
            os.sched_yield()
        elif waited_s < patience.deadline_s:
            time.sleep(_SLEEP_S)
        else:
            raise overdue(waiting, waited_s)


def overdue(waiting: str, waited_s: float) -> CollectiveTimeout:
    """Returns the exception for a wait that has lasted so long."""
    return CollectiveTimeout(f"{waiting}: timed out after {waited_s:.1f} s")
