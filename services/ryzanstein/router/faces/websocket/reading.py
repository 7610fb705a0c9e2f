"""Reads a generation on behalf of a client that may stop for a while.

A reader that takes nothing is no reader: the core pauses the generation as if the client were away,
and the next event is read anew from where this reading stands.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Mapping

from ryzanstein.generation.events import GenerationEvent, Started
from ryzanstein.router.core.core import Core
from ryzanstein.router.core.reader import PassedReader
from ryzanstein.router.faces.answer import read_start


class Reading:
    """The events of one generation, each once, from these indices on."""

    def __init__(self, core: Core, generation_id: str, from_index: Mapping[int, int], tenant: str = "") -> None:
        self._core = core
        self._generation_id, self._tenant = generation_id, tenant
        self._reader = PassedReader(from_index)
        self._events: AsyncGenerator[GenerationEvent, None] | None = None

    async def start(self) -> Started:
        """Begins to read. Raises NOT_FOUND, or the generation's error when it failed."""
        self._events = self._follow()
        started = await read_start(self._events)
        self._reader.wants(started)
        return started

    async def next(self) -> GenerationEvent | None:
        """Returns the next event, or None after the last. Raises the generation's error."""
        if self._events is None:
            self._events = self._follow()
        async for event in self._events:
            if self._reader.wants(event):
                return event
        return None

    async def leave(self) -> None:
        """Stops reading, until the next event is asked for."""
        events, self._events = self._events, None
        if events is not None:
            await events.aclose()

    def _follow(self) -> AsyncGenerator[GenerationEvent, None]:
        return self._core.follow(self._generation_id, self._reader.from_index, tenant=self._tenant)
