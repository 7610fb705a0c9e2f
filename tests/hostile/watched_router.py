"""`python -m tests.hostile.watched_router`: a real router that says how late its event loop is.

Standard output has the probe's port. Each connection to it is told the worst lateness in seconds since the last one, and the
most processor time that the loop's thread took from one wake of the probe to the next: lateness without other processes' part.
"""

from __future__ import annotations

import asyncio
import sys
import time

from ryzanstein.router import __main__ as router

_PERIOD_S = 0.001


class Probe:
    """Wakes every millisecond and notes how late it is."""

    def __init__(self) -> None:
        self._late_s = self._busy_s = 0.0

    async def run(self) -> None:
        while True:
            due, spent_s = time.monotonic() + _PERIOD_S, time.thread_time()
            await asyncio.sleep(_PERIOD_S)
            self._late_s = max(self._late_s, time.monotonic() - due)
            self._busy_s = max(self._busy_s, time.thread_time() - spent_s)

    async def answer(self, _: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(f"{self._late_s} {self._busy_s}".encode())
        self._late_s = self._busy_s = 0.0
        writer.close()


async def serve(settings: router.RouterSettings) -> None:
    probe = Probe()
    running = asyncio.create_task(probe.run())
    server = await asyncio.start_server(probe.answer, "127.0.0.1", 0)
    print(server.sockets[0].getsockname()[1], flush=True)
    try:
        await original(settings)
    finally:
        server.close()
        running.cancel()


if __name__ == "__main__":
    original, router.serve = router.serve, serve
    sys.exit(router.main())
