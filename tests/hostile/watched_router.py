"""`python -m tests.hostile.watched_router`: a real router that says how late its event loop is.

Standard output has the probe's port. Each connection to it is told the worst lateness in seconds since the last one.
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
        self._worst_s = 0.0

    async def run(self) -> None:
        while True:
            due = time.monotonic() + _PERIOD_S
            await asyncio.sleep(_PERIOD_S)
            self._worst_s = max(self._worst_s, time.monotonic() - due)

    async def answer(self, _: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        worst_s, self._worst_s = self._worst_s, 0.0
        writer.write(repr(worst_s).encode())
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
