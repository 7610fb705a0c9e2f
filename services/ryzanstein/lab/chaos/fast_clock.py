"""A clock that all services of a cluster share and that can run faster than the machine's: hours of idleness in a minute.

Everybody lives through the time: beats, leases, keepalives and watchdogs come as often as in that time without us, each so
much sooner. A jump would be another fault: then nobody beats for an hour. `injection/fast_clock.c` is the services' side.
"""

from __future__ import annotations

import asyncio
import mmap
import struct
import time
from pathlib import Path

from ryzanstein.lab.chaos.preloaded import built

RATE = 40.0
_PAGE = struct.Struct("=Qqqq")
_SEQUENCE = struct.Struct("=Q")
_ONE = 1000
# A wait that began before a quickening lasts too long by this factor at most, which no detector of silence minds; and so
# long, in the services' time, it may be: the longest that somebody waits to see.
_QUICKER = 1.15
_SETTLES_S = 1.0


class FastClock:
    """Runs with the machine's clock at first. NetworkImpossibleError: there is no C compiler."""

    def __init__(self, directory: Path) -> None:
        self._library = built("fast_clock.c", directory)
        self._file = directory / "fast.clock"
        self._file.write_bytes(bytes(_PAGE.size))
        with self._file.open("r+b") as file:
            self._page = mmap.mmap(file.fileno(), _PAGE.size)
        self._sequence, self._since_ns, self._ahead_ns, self._rate = 0, 0, 0, _ONE
        self.run_at(1.0)

    @property
    def ahead_s(self) -> float:
        """How far the services' clocks are ahead of the machine's."""
        return self._ahead_at(time.monotonic_ns()) / 1e9

    def environment(self) -> dict[str, str]:
        """What a service with this clock is started with."""
        return {"LD_PRELOAD": str(self._library), "RYZANSTEIN_FAST_CLOCK": str(self._file)}

    def run_at(self, rate: float) -> None:
        """From now on so many times as fast as the machine's."""
        now_ns = time.monotonic_ns()
        self._ahead_ns, self._since_ns, self._rate = self._ahead_at(now_ns), now_ns, round(rate * _ONE)
        self._write_sequence()
        _PAGE.pack_into(self._page, 0, self._sequence, self._since_ns, self._ahead_ns, self._rate)
        self._write_sequence()

    async def pass_time(self, seconds: float, rate: float = RATE) -> None:
        """Returns when so much time more has passed for the services than for us; by then their clock runs with ours."""
        until_s = self.ahead_s + seconds
        try:
            await self._quicken(rate)
            await asyncio.sleep(max(0.0, until_s - self.ahead_s) / (rate - 1))
        finally:
            self.run_at(1.0)

    async def _quicken(self, rate: float) -> None:
        now = 1.0
        while now < rate:
            now = min(rate, now * _QUICKER)
            self.run_at(now)
            await asyncio.sleep(_SETTLES_S / now)

    def _ahead_at(self, now_ns: int) -> int:
        return self._ahead_ns + (now_ns - self._since_ns) * (self._rate - _ONE) // _ONE

    def _write_sequence(self) -> None:
        self._sequence += 1
        _SEQUENCE.pack_into(self._page, 0, self._sequence)
