"""A rank as its agent sees it, without a process: an id, futures of its end, and its signals."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import Callable

from ryzanstein.worker.supervision.stacks import ProcessStacks


class SimulatedProcess:
    """A `source.ForkedRank`. `on_signal` is called with every signal and decides what follows."""

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
        """Returns the resident memory; 0 once the process has ended."""
        return 0 if self.exited.done() else self._resident_bytes

    @property
    def private_bytes(self) -> int:
        """Returns the same as `resident_bytes`: no files back a simulated rank."""
        return self.resident_bytes

    @property
    def crash(self) -> str:
        """Returns nothing: a simulated rank has no interpreter of its own that could crash."""
        return ""

    async def stacks(self, watched_s: float) -> ProcessStacks:
        """Returns no threads: it has none."""
        return ProcessStacks(f"rank {self.rank}", self.pid)

    def send_signal(self, number: signal.Signals) -> None:
        """Sends a signal. Does nothing if the process has ended."""
        if not self.exited.done():
            self._on_signal(number)

    def dies(self) -> None:
        """Marks the process as killed; its end is not visible yet."""
        if not self.dying.done():
            self.dying.set_result(None)

    def ended(self, code: int) -> None:
        """Marks the process as ended. Only the first exit code counts."""
        if not self.exited.done():
            self.stopped = False
            self.over.set_result(None)
            self.exited.set_result(code)
