"""A bound on bytes a second."""

from __future__ import annotations

import asyncio
import time


class RateLimit:
    """A bound that all who send share. 0: none. At most a tenth of a second's bytes are sent at once."""

    def __init__(self, bytes_s: int) -> None:
        self._bytes_s = bytes_s
        self._free_s = 0.0

    async def spend(self, num_bytes: int) -> None:
        """Returns when so many bytes may be sent."""
        if not self._bytes_s:
            return
        now = time.monotonic()
        self._free_s = max(self._free_s, now - 0.1) + num_bytes / self._bytes_s
        if self._free_s > now:
            await asyncio.sleep(self._free_s - now)
