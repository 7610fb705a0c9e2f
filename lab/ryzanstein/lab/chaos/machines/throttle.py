"""Slows a process down: it runs for only a share of each period (SIGCONT, SIGSTOP).

`python -P -m ryzanstein.lab.chaos.machines.throttle PID FACTOR` runs until standard input ends; then the
process runs again. It is a program, because periods of 20 ms need a loop that does nothing else.
"""

from __future__ import annotations

import os
import select
import signal
import sys
from contextlib import suppress

PERIOD_S = 0.020


def throttle(pid: int, factor: float) -> None:
    """Gives the process 1/factor of the time. Returns when standard input or the process ends."""
    running_s = PERIOD_S / factor
    try:
        while not _ended(PERIOD_S - running_s):
            os.kill(pid, signal.SIGCONT)
            if _ended(running_s):
                return
            os.kill(pid, signal.SIGSTOP)
    except ProcessLookupError:
        return
    finally:
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGCONT)


def _ended(wait_s: float) -> bool:
    """Returns whether standard input ended; otherwise takes `wait_s`."""
    readable, _, _ = select.select([sys.stdin], [], [], wait_s)
    return bool(readable) and not os.read(sys.stdin.fileno(), 1)


if __name__ == "__main__":
    throttle(int(sys.argv[1]), float(sys.argv[2]))
