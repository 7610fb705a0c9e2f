"""A rank as its agent sees it, without a process: a number, futures of its end, and the signals that it is sent."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import Callable


class SimulatedProcess:
    """A `source.ForkedRank`. `on_signal` hears every signal; whoever simulates the rank says what comes of it."""

    def __init__(self, rank: int, pid: int, resident_bytes: int, on_signal: Callable[[signal.Signals], object]) -> None:
        loop = asyncio.get_running_loop()
        self.rank = rank
        self.pid = pid
        self.dying: asyncio.Future[None] = loop.create_future()
        self.over: asyncio.Future[None] = loop.create_future()
        self.exited: asyncio.Future[int] = loop.create_future()
        self.stopped = False
        self._resident_bytes = resident_bytes
        self._on_signal = on_signal

    @property
    def resident_bytes(self) -> int:
        """0 when the process has ended."""
        return 0 if self.exited.done() else self._resident_bytes

    def send_signal(self, number: signal.Signals) -> None:
        """Does nothing to a process that has ended."""
        if not self.exited.done():
            self._on_signal(number)

    def dies(self) -> None:
        """It was killed; its end is not seen yet."""
        if not self.dying.done():
            self.dying.set_result(None)

    def ended(self, code: int) -> None:
        """The first word counts."""
        if not self.exited.done():
            self.stopped = False
            self.over.set_result(None)
            self.exited.set_result(code)
