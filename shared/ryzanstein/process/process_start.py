"""What a process does before its long imports: it obeys SIGTERM, and says what its machine lacks.

It imports the standard library alone.
"""

from __future__ import annotations

import os
import signal
import sqlite3
import sys
from collections.abc import Callable, Iterator
from typing import NoReturn

_STOPS = (signal.SIGTERM,)
# STRICT tables (3.37) and RETURNING (3.35).
_OLDEST_SQLITE = (3, 37, 0)


def begin(*, ranks: bool) -> None:
    """Begins a service. Exits with 1, after a sentence, where it cannot run; `ranks`: it has some.

    From now on SIGTERM ends the process with 0, until the service handles it. A process that is the
    first of its container would ignore it until then: for that one the kernel has no default.
    """
    signal.signal(signal.SIGTERM, _end)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, _STOPS)
    for lack in lacks(ranks=ranks):
        print(lack, file=sys.stderr)
        sys.exit(1)


def become_service(command: list[str]) -> NoReturn:
    """Becomes a service. A SIGTERM that comes meanwhile waits until the service has begun."""
    signal.pthread_sigmask(signal.SIG_BLOCK, _STOPS)
    os.execv(command[0], command)


def lacks(*, ranks: bool) -> Iterator[str]:
    """Yields a sentence for each thing that services need and this machine or interpreter lacks."""
    if sys.platform != "linux":
        yield f"Ryzanstein's services run on Linux alone, not on {sys.platform}: run them in a container or a virtual machine"
        return
    if sqlite3.sqlite_version_info < _OLDEST_SQLITE:
        yield (
            f"SQLite {sqlite3.sqlite_version} of {sys.executable} is too old: "
            "use a Python that is built with SQLite 3.37 or newer"
        )
    if ranks:
        calls: tuple[tuple[str, str, Callable[[], int]], ...] = (
            ("memfd_create", "Linux 3.17", lambda: os.memfd_create("probe")),
            ("pidfd_open", "Linux 5.3", lambda: os.pidfd_open(os.getpid())),
        )
        yield from (
            f"the system call {name} is missing ({why}): nodes need {since} or newer, a Python that is built on it, "
            "and a sandbox that allows the call"
            for name, since, call in calls
            if (why := _why_not(call))
        )


def _why_not(call: Callable[[], int]) -> str:
    try:
        os.close(call())
    except (AttributeError, OSError) as error:
        return error.strerror or "" if isinstance(error, OSError) else f"{sys.executable} does not know it"
    return ""


def _end(*_: object) -> NoReturn:
    os._exit(0)
