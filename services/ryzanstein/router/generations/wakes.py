"""Notifies readers of new tokens, a few per loop iteration.

If all readers were notified at once, each frame would wait until every reader has had its message.
Under load the frames would pile up unread, and each token would be sent alone and late. With a few
readers at a time, frames are read in between, and what has arrived meanwhile goes into one message:
load makes messages larger, not the wait longer.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable

READERS_PER_TURN = 4


class Wakes:
    """The readers of all generations that have something new to read, in order of arrival."""

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._due: dict[asyncio.Event, None] = {}

    def add(self, readers: Iterable[asyncio.Event]) -> None:
        if not self._due:
            self._loop.call_soon(self._turn)
        for reader in readers:
            self._due[reader] = None

    def _turn(self) -> None:
        due = self._due
        for reader in [reader for reader, _ in zip(due, range(READERS_PER_TURN), strict=False)]:
            del due[reader]
            reader.set()
        if due:
            self._loop.call_soon(self._turn)
