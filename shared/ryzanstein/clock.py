"""Unix time for deadlines that never jumps: the wall clock at process start plus the time since.

When a wall clock is set forward or back by an hour, running work must neither end nor run an hour
longer.
"""

from __future__ import annotations

import time

_BEGAN_S = time.time() - time.monotonic()


def unix_s() -> float:
    """Returns the seconds since 1970.

    The result never jumps, so it may differ from a wall clock that was set in the meantime.
    """
    return _BEGAN_S + time.monotonic()


def boot_s() -> float:
    """Returns seconds of the machine, including those in which it or this process did not run. No clock setting changes it."""
    return time.clock_gettime(time.CLOCK_BOOTTIME) if hasattr(time, "CLOCK_BOOTTIME") else time.monotonic()
