"""What the messages hold that clients have begun and not ended, over all calls of a server.

A call may hold one message of the largest size, and a client may open thousands. Who sends nothing more holds that until
its deadline, if it has one.
"""

from __future__ import annotations

import grpc

from ryzanstein.rpc.http2.messages import MessageError


class HalfSentMessages:
    """The bytes of all half-sent messages, at most `max_bytes`."""

    def __init__(self, max_bytes: int) -> None:
        self._max_bytes = max_bytes
        self.num_bytes = 0

    def grow(self, num_bytes: int) -> None:
        """Counts so many bytes more, or fewer. Raises MessageError RESOURCE_EXHAUSTED for more than there may be."""
        self.num_bytes += num_bytes
        if num_bytes > 0 and self.num_bytes > self._max_bytes:
            why = f"half-sent messages hold {self.num_bytes} bytes in all, at most {self._max_bytes} are kept"
            raise MessageError(grpc.StatusCode.RESOURCE_EXHAUSTED, why)
