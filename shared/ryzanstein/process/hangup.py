"""SIGHUP, the signal to read files again, for every part of a process that wants to know of it."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def hangups(*wanted: asyncio.Event) -> Iterator[None]:
    """Sets these events at each SIGHUP, instead of ending the process.

    A loop has one handler of a signal: whoever wants to know of it passes an event to the same call.
    Outside the main thread, where signals do not arrive, nothing happens.
    """
    loop = asyncio.get_running_loop()

    def ring() -> None:
        for each in wanted:
            each.set()

    try:
        loop.add_signal_handler(signal.SIGHUP, ring)
    except (ValueError, RuntimeError, NotImplementedError):
        yield
        return
    try:
        yield
    finally:
        loop.remove_signal_handler(signal.SIGHUP)
