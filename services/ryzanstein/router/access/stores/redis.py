"""Keys of Redis: the version is read as often as the watch looks, and what changed when that has changed.

In a thread, with the library's blocking client: 100,000 keys would hold the event loop for a second.
"""

from __future__ import annotations

import asyncio
import math
import threading
import time
from collections.abc import Callable
from typing import TypeVar

from ryzanstein.auth.keys.records import KeySnapshot
from ryzanstein.auth.keys.redis_keys import KeysRedisError, RedisKeys
from ryzanstein.router.access.stores.saved import SavedKeys
from ryzanstein.router.access.stores.source import FoundKeys, KeysUnreadableError

_SAVE_EVERY_S = 10.0
_Result = TypeVar("_Result")
_LOST = (
    "Redis has no keys, though it had some: it was emptied, or restarted without its data; "
    "where that is meant, remove {name} from the state_dir of every router and start it again"
)


class RedisKeySource:
    """The keys of a Redis server. It owns its client."""

    name = "redis"

    def __init__(self, keys: RedisKeys, saved: SavedKeys) -> None:
        self._keys, self._saved = keys, saved
        self._version: str | None = None
        # A look that was cancelled goes on in its thread, while the source is closed in another.
        self._one_at_a_time = threading.Lock()
        self._snapshot = KeySnapshot()
        self._unsaved, self._saved_at = False, -math.inf

    async def saved(self) -> FoundKeys | None:
        return await asyncio.to_thread(self._saved.load)

    async def newer(self) -> KeySnapshot | None:
        return await asyncio.to_thread(self._alone, self._newer)

    async def close(self) -> None:
        await asyncio.to_thread(self._alone, self._close)

    def _alone(self, act: Callable[[], _Result]) -> _Result:
        with self._one_at_a_time:
            return act()

    def _newer(self) -> KeySnapshot | None:
        try:
            version = self._keys.version()
            if version == self._version:
                self._keep_copy()
                return None
            version, snapshot = self._keys.read_changed(self._version or "", self._snapshot)
        except KeysRedisError as error:
            raise KeysUnreadableError(str(error)) from None
        if not version and (self._version or self._saved.exists()):
            raise KeysUnreadableError(_LOST.format(name=self._saved.name))
        self._version, self._snapshot, self._unsaved = version, snapshot, bool(version)
        self._keep_copy()
        return snapshot

    def _keep_copy(self) -> None:
        """Saves what changed, though not with every change: a copy of 100,000 keys takes seconds. A copy without it ages."""
        if not self._unsaved:
            self._saved.confirm()
        elif (now := time.monotonic()) - self._saved_at >= _SAVE_EVERY_S:
            self._saved.save(self._snapshot)
            self._unsaved, self._saved_at = False, now

    def _close(self) -> None:
        if self._unsaved:
            self._saved.save(self._snapshot)
        self._keys.close()
