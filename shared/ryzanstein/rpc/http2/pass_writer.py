"""What one pass of the event loop writes to a connection leaves in one write: each has the price of a system call."""

from __future__ import annotations

import asyncio

MAX_BYTES = 64 * 1024


class PassWriter:
    """The bytes that wait for the end of the pass, or until they are many."""

    def __init__(self, transport: asyncio.Transport) -> None:
        self._transport = transport
        self._loop = asyncio.get_running_loop()
        self._parts: list[bytes] = []
        self._num_bytes = 0

    def write(self, data: bytes) -> None:
        """Writes soon."""
        if not self._parts:
            self._loop.call_soon(self.flush)
        self._parts.append(data)
        self._num_bytes += len(data)
        if self._num_bytes > MAX_BYTES:
            self.flush()

    def flush(self) -> None:
        """Writes now."""
        parts, self._parts, self._num_bytes = self._parts, [], 0
        if parts and not self._transport.is_closing():
            self._transport.write(b"".join(parts) if len(parts) > 1 else parts[0])
