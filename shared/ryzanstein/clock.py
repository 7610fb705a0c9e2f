"""Unix time for deadlines, by a clock that nobody sets: the wall clock when the process began, and what has passed since.

A wall clock that is set by an hour must neither end what runs nor let it run an hour longer.
"""

from __future__ import annotations

import time

_BEGAN_S = time.time() - time.monotonic()


def unix_s() -> float:
    """Seconds since 1970. Never jumps, and so may differ from a wall clock that was set meanwhile."""
    return _BEGAN_S + time.monotonic()
