"""A clock that all services of a cluster share, and that can run faster than the machine's.

Hours of idleness pass in a minute.

The services live through that time: beats, leases, keepalives and watchdogs come as often as in
real time, only sooner. A jump would be another fault, with no beats for an hour.
`injection/fast_clock.c` is the services' side.
"""

from __future__ import annotations

import asyncio
import mmap
import struct
import time
from pathlib import Path

from ryzanstein.lab.chaos.machines.preloaded import built

RATE = 40.0
_PAGE = struct.Struct("=Qqqq")
_SEQUENCE = struct.Struct("=Q")
_ONE = 1000
# A wait that began before an acceleration lasts too long by at most this factor, which no silence
# detector notices. Each rate holds for this long in the services' time, which is the longest such
# wait.
_QUICKER = 1.15
_SETTLES_S = 1.0


class FastClock:
    """The clock. At first it runs as the machine's does.

    Raises NetworkImpossibleError if there is no C compiler.
    """

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
        """Returns how far the services' clocks are ahead of the machine's."""
        return self._ahead_at(time.monotonic_ns()) / 1e9

    def environment(self) -> dict[str, str]:
        """Returns the environment for starting a service with this clock."""
        return {"LD_PRELOAD": str(self._library), "RYZANSTEIN_FAST_CLOCK": str(self._file)}

    def run_at(self, rate: float) -> None:
        """Makes the clock run `rate` times as fast as the machine's from now on."""
        now_ns = time.monotonic_ns()
        self._ahead_ns, self._since_ns, self._rate = self._ahead_at(now_ns), now_ns, round(rate * _ONE)
        self._write_sequence()
        _PAGE.pack_into(self._page, 0, self._sequence, self._since_ns, self._ahead_ns, self._rate)
        self._write_sequence()

    async def pass_time(self, seconds: float, rate: float = RATE) -> None:
        """Returns when this much more time has passed for the services than for us.

        Their clock then runs at the machine's rate again, also on cancellation.
        """
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
