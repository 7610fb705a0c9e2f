"""Changes that are written to the store: one after the other, and never half of one."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any, TypeVar

from ryzanstein import errors
from ryzanstein.process.background import Background

MAX_PENDING_WRITES = 64

_Written = TypeVar("_Written")


class StoreWrites:
    """`check` raises while this orchestrator may not write."""

    def __init__(self, background: Background, check: Callable[[], None]) -> None:
        self._background, self._check = background, check
        self._serial = asyncio.Lock()
        self._running: set[asyncio.Task[Any]] = set()

    async def write(self, change: Coroutine[Any, Any, _Written]) -> _Written:
        """Applies a change. Cancelling the caller does not leave it half done."""
        if len(self._running) >= MAX_PENDING_WRITES:
            change.close()
            raise errors.queue_full(len(self._running), MAX_PENDING_WRITES)
        task = self._background.once("store_write", self._serially(change))
        self._running.add(task)
        task.add_done_callback(self._running.discard)
        return await asyncio.shield(task)

    async def ended(self) -> None:
        """Returns when all changes that were begun have ended."""
        await asyncio.gather(*self._running, return_exceptions=True)

    async def _serially(self, change: Coroutine[Any, Any, _Written]) -> _Written:
        async with self._serial:
            try:
                self._check()
            except errors.RyzansteinError:
                change.close()
                raise
            return await change
