"""Memory of unfinished messages, over all calls of a server.

A call may hold one message of the largest size, and a client may open thousands. A client that stops sending keeps that memory
until its deadline, if it has one, or until others need it.
"""

from __future__ import annotations

from typing import Protocol

import grpc

_WHY = "other calls need the memory of this unfinished message"


class Holder(Protocol):
    """A call that holds a part of a message."""

    def end(self, code: grpc.StatusCode, details: str) -> None:
        """Ends the call, which then holds nothing."""
        ...


class HalfSentMessages:
    """The bytes of all unfinished messages. Beyond `max_bytes`, the calls end that have been without progress longest."""

    def __init__(self, max_bytes: int) -> None:
        self._max_bytes = max_bytes
        self._holders: dict[Holder, int] = {}
        self.num_bytes = 0

    def hold(self, holder: Holder, num_bytes: int) -> None:
        """Notes how many bytes a call holds now; 0: it holds none any more."""
        self.num_bytes += num_bytes - self._holders.pop(holder, 0)
        if num_bytes:
            self._holders[holder] = num_bytes
        while self.num_bytes > self._max_bytes and self._holders:
            holder = next(iter(self._holders))
            self.num_bytes -= self._holders.pop(holder)
            holder.end(grpc.StatusCode.RESOURCE_EXHAUSTED, _WHY)
