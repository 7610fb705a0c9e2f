"""Length-prefixed messages, as gRPC puts them into DATA (gRPC over HTTP2: a flag, four bytes of length, the message)."""

from __future__ import annotations

import struct
import zlib
from collections.abc import Callable

import grpc

_PREFIX = struct.Struct(">BI")
PREFIX_BYTES = 5
IDENTITY = "identity"
# The window bits of zlib: 16 more select the header of gzip. "deflate" is zlib's own format (RFC 1950).
_ZLIB = {"gzip": zlib.MAX_WBITS | 16, "deflate": zlib.MAX_WBITS}
ENCODINGS = ",".join((IDENTITY, *_ZLIB))


class MessageError(Exception):
    """A message cannot be read, and so none after it. The call ends with this status."""

    def __init__(self, code: grpc.StatusCode, why: str) -> None:
        super().__init__(why)
        self.code = code


def prefixed(message: bytes) -> bytes:
    """Returns the message as it is sent, uncompressed."""
    return _PREFIX.pack(0, len(message)) + message


class MessageReader:
    """Puts one stream's messages together from the payloads of its DATA frames.

    Passes each to `take`, and whether it is compressed: it is uncompressed when it is wanted, because a small one may stand
    for a huge one. A message may have at most `max_bytes`. `encoding` is how those are compressed that say so.
    """

    def __init__(self, take: Callable[[bytes, bool], None], max_bytes: int, encoding: str = IDENTITY) -> None:
        self._take, self._max_bytes, self._encoding = take, max_bytes, encoding
        self._unread = bytearray()

    @property
    def num_left(self) -> int:
        """The bytes of a message whose rest has not arrived."""
        return len(self._unread)

    def feed(self, payload: bytes) -> None:
        """Passes on all messages that are complete. Raises MessageError, and whatever `take` raises."""
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
            self._take(data[at + PREFIX_BYTES : end], bool(data[at]))
            at = end
        return at

    def _missing(self, data: bytes | bytearray, at: int) -> int:
        """Returns how many bytes the next message lacks, as far as is known."""
        if len(data) - at < PREFIX_BYTES:
            return PREFIX_BYTES - (len(data) - at)
        compressed, length = _PREFIX.unpack_from(data, at)
        if compressed and self._encoding not in _ZLIB:
            raise MessageError(
                grpc.StatusCode.INTERNAL, f"a message is compressed, and the encoding is {self._encoding[:32]!r}"
            )
        if length > self._max_bytes:
            raise _too_large(f"{length} bytes", self._max_bytes)
        return int(PREFIX_BYTES + length - (len(data) - at))


def uncompressed(message: bytes, encoding: str, max_bytes: int) -> bytes:
    """Returns what a compressed message stands for. Raises MessageError, also for more than `max_bytes`."""
    inflating = zlib.decompressobj(_ZLIB[encoding])
    try:
        data = inflating.decompress(message, max_bytes + 1)
    except zlib.error as error:
        raise MessageError(grpc.StatusCode.INTERNAL, f"a message is not {encoding}: {error}") from None
    if len(data) > max_bytes:
        raise _too_large("more bytes when it is uncompressed", max_bytes)
    if not inflating.eof:
        raise MessageError(grpc.StatusCode.INTERNAL, f"a message is not {encoding}: it is cut off")
    return data


def _too_large(size: str, max_bytes: int) -> MessageError:
    return MessageError(grpc.StatusCode.RESOURCE_EXHAUSTED, f"a message of {size}, at most {max_bytes} are read")
