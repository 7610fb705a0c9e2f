"""A bound on bytes a second."""

from __future__ import annotations

import asyncio
import time

AT_ONCE_S = 0.1
"""A second's share that may be sent at once."""


class RateLimit:
    """A bound that all who send share. 0: none."""

    def __init__(self, bytes_s: int) -> None:
        self._bytes_s = bytes_s
        self._free_s = 0.0

    def most(self, num_bytes: int, seconds: float) -> int:
        """Returns how many bytes may be sent in so many seconds, at most `num_bytes`."""
        return min(num_bytes, int(self._bytes_s * seconds)) if self._bytes_s else num_bytes

    async def spend(self, num_bytes: int) -> None:
        """Returns when so many bytes may be sent."""
        if not self._bytes_s:
            return
        now = time.monotonic()
        self._free_s = max(self._free_s, now - AT_ONCE_S) + num_bytes / self._bytes_s
        if self._free_s > now:
            await asyncio.sleep(self._free_s - now)
