"""How many chunks a client is ready to take of one stream."""

from __future__ import annotations

import asyncio

MAX_CREDIT = 1_000_000


class Credit:
    """The chunks that may still be sent. None is no bound."""

    def __init__(self, chunks: int | None) -> None:
        self._chunks = chunks
        self._given = asyncio.Event()

    @property
    def available(self) -> bool:
        return self._chunks is None or self._chunks > 0

    def give(self, chunks: int) -> None:
        """Adds credit. Beyond MAX_CREDIT it is not counted; without a bound nothing is."""
        if self._chunks is not None:
            self._chunks = min(MAX_CREDIT, self._chunks + chunks)
            self._given.set()

    def spend(self) -> None:
        if self._chunks is not None:
            self._chunks -= 1

    async def wait(self) -> None:
        """Returns when there is credit."""
        while not self.available:
            self._given.clear()
            await self._given.wait()
