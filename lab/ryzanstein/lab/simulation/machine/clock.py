"""Virtual time and seeded randomness in place of the machine's.

`install` must run before any service is imported, because several take `time.monotonic` as a
default argument. After it, the functions of `time` read `CLOCK`, and identifiers and seeds come
from one generator that `seed` restarts.
"""

from __future__ import annotations

import random
import secrets
import time
import uuid
from collections.abc import Callable
from contextvars import ContextVar

# Sunday, 1 November 2026, so that a Unix time looks like one.
EPOCH_S = 1_793_491_200.0

RATE: ContextVar[float] = ContextVar("clock_rate", default=1.0)
"""How many seconds the running code's monotonic clock counts in a second. Wall clocks are set right by time servers."""

real_monotonic: Callable[[], float] = time.monotonic
"""The machine's own clock, for budgets of real time."""


class VirtualClock:
    """Seconds since the simulation began, and the wall-clock offset of the calling process."""

    def __init__(self) -> None:
        self.now = 0.0
        self.wall_offset_s: Callable[[], float] = lambda: 0.0

    def monotonic(self) -> float:
        return self.now * RATE.get()

    def monotonic_ns(self) -> int:
        return round(self.monotonic() * 1e9)

    def unix(self) -> float:
        return EPOCH_S + self.now + self.wall_offset_s()

    def unix_ns(self) -> int:
        return round(self.unix() * 1e9)


CLOCK = VirtualClock()
_IDS = random.Random(0)


def seed(value: int) -> None:
    """Restarts time and randomness."""
    CLOCK.now = 0.0
    CLOCK.wall_offset_s = lambda: 0.0
    _IDS.seed(f"ids {value}")
    random.seed(f"global {value}")


def install() -> None:
    """Replaces the machine's clocks and sources of randomness in this process, permanently."""
    replaced: tuple[tuple[object, str, object], ...] = (
        (time, "monotonic", CLOCK.monotonic),
        (time, "monotonic_ns", CLOCK.monotonic_ns),
        (time, "clock_gettime", lambda clock: CLOCK.monotonic()),
        (time, "perf_counter", CLOCK.monotonic),
        (time, "perf_counter_ns", CLOCK.monotonic_ns),
        (time, "time", CLOCK.unix),
        (time, "time_ns", CLOCK.unix_ns),
        (time, "sleep", _sleep),
        (uuid, "uuid4", lambda: uuid.UUID(int=_IDS.getrandbits(128), version=4)),
        (secrets, "randbits", _IDS.getrandbits),
    )
    for module, name, replacement in replaced:
        setattr(module, name, replacement)


def _sleep(seconds: float) -> None:
    """Raises: a process's thread that sleeps would block the whole cluster."""
    raise AssertionError(f"a simulated service called time.sleep({seconds:g})")
