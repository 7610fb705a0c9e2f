"""Length-prefixed messages, as gRPC puts them into DATA (gRPC over HTTP2: a flag, four bytes of length, the message)."""

from __future__ import annotations

import struct
from collections.abc import Callable

from ryzanstein.rpc.http2.frames import ErrorCode, Http2Error

_PREFIX = struct.Struct(">BI")
PREFIX_BYTES = 5


def prefixed(message: bytes) -> bytes:
    """Returns the message as it is sent, uncompressed."""
    return _PREFIX.pack(0, len(message)) + message


class MessageReader:
    """Puts one stream's messages together from the payloads of its DATA frames, and passes each to `take`.

    A message may have at most `max_bytes`.
    """

    def __init__(self, take: Callable[[bytes], None], max_bytes: int) -> None:
        self._take, self._max_bytes = take, max_bytes
        self._unread = bytearray()

    @property
    def between(self) -> bool:
        """Whether no part of a message is left."""
        return not self._unread

    def feed(self, payload: bytes) -> None:
        """Passes on all messages that are complete. Raises Http2Error, and whatever `take` raises."""
        if not self._unread:
            at = self._take_all(payload)
            if at < len(payload):
                self._unread += payload[at:]
            return
        self._unread += payload
        if self._missing(self._unread, 0) <= 0:
            unread, self._unread = bytes(self._unread), bytearray()
            self._unread += unread[self._take_all(unread) :]

    def _take_all(self, data: bytes) -> int:
        """Passes on the messages that the bytes begin with, and returns where they end."""
        at = 0
        while self._missing(data, at) <= 0:
            end = at + PREFIX_BYTES + int.from_bytes(data[at + 1 : at + PREFIX_BYTES])
            self._take(data[at + PREFIX_BYTES : end])
            at = end
        return at

    def _missing(self, data: bytes | bytearray, at: int) -> int:
        """Returns how many bytes the next message lacks, as far as is known."""
        if len(data) - at < PREFIX_BYTES:
            return PREFIX_BYTES - (len(data) - at)
        compressed, length = _PREFIX.unpack_from(data, at)
        if compressed:
            raise Http2Error(ErrorCode.PROTOCOL_ERROR, "a message is compressed, which was not offered")
        if length > self._max_bytes:
            raise Http2Error(ErrorCode.ENHANCE_YOUR_CALM, f"a message of {length} bytes, at most {self._max_bytes} are read")
        return int(PREFIX_BYTES + length - (len(data) - at))
