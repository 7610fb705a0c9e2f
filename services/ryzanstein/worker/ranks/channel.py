"""Channels between the agent and its ranks, and from rank 0 to the others.

They carry length-prefixed msgpack over Unix socket pairs. A frame is a little-endian uint32 and so
many bytes. Ranks block (they have nothing else to do), the agent never does. Plans travel over
socket pairs too, not over shared memory: one way costs 12 us here against steps of a millisecond
and more, a waiting rank sleeps instead of polling, and the end of file reports the other side's
death at once.
"""

from __future__ import annotations

import asyncio
import contextlib
import select
import socket
import struct
from collections.abc import Callable, Iterator
from typing import Any, Generic, TypeVar, cast

import msgspec

MAX_FRAME_BYTES = 32 * 2**20
_READ_BYTES = 2**18
_LENGTH = struct.Struct("<I")

T = TypeVar("T")


class ChannelClosed(ConnectionError):
    """The other side is gone."""


class FrameTooLarge(ValueError):
    """A message is larger than a channel can carry."""


def encode(message: object) -> bytes:
    """Returns a frame. FrameTooLarge: the message has more than MAX_FRAME_BYTES."""
    body = msgspec.msgpack.encode(message)
    if len(body) > MAX_FRAME_BYTES:
        raise FrameTooLarge(f"{type(message).__name__} of {len(body)} bytes exceeds the limit of {MAX_FRAME_BYTES} bytes")
    return _LENGTH.pack(len(body)) + body


class FrameSplitter:
    """A splitter of a byte stream into the bodies of its frames."""

    def __init__(self) -> None:
        self._buffer = bytearray()

    def feed(self, data: bytes | memoryview) -> Iterator[bytes]:
        """Yields the frames that are complete with `data`.

        FrameTooLarge: the stream is not ours.
        """
        self._buffer += data
        start = 0
        while len(self._buffer) - start >= _LENGTH.size:
            (length,) = _LENGTH.unpack_from(self._buffer, start)
            if length > MAX_FRAME_BYTES:
                raise FrameTooLarge(f"frame of {length} bytes exceeds the limit of {MAX_FRAME_BYTES} bytes")
            end = start + _LENGTH.size + length
            if len(self._buffer) < end:
                break
            yield bytes(memoryview(self._buffer)[start + _LENGTH.size : end])
            start = end
        del self._buffer[:start]


class RankChannel(Generic[T]):
    """A rank's side of a channel: sends block; receives block (`wait`) or do not (`drain`).

    `incoming` is the type of what arrives.
    """

    def __init__(self, sock: socket.socket, incoming: Any) -> None:
        sock.setblocking(True)
        self._socket = sock
        self._splitter = FrameSplitter()
        self._decoder: msgspec.msgpack.Decoder[T] = msgspec.msgpack.Decoder(incoming)
        # Allocated once: a rank that is short of memory must still be able to receive.
        self._received = memoryview(bytearray(_READ_BYTES))

    def send(self, message: object) -> None:
        self.send_frame(encode(message))

    def send_frame(self, frame: bytes) -> None:
        """Sends what `encode` returned: one encoding serves several ranks."""
        try:
            self._socket.sendall(frame)
        except OSError as error:
            raise ChannelClosed(str(error)) from error

    def wait(self) -> list[T]:
        """Waits for messages; returns at least one."""
        messages: list[T] = []
        while not messages:
            messages = self._read(0)
        return messages

    def drain(self) -> list[T]:
        """Returns the messages that have arrived, possibly none; never blocks."""
        with contextlib.suppress(BlockingIOError):
            return self._read(socket.MSG_DONTWAIT)
        return []

    def wait_for(self, timeout_s: float) -> list[T]:
        """Waits for messages, no longer than `timeout_s`; returns none then."""
        select.select([self._socket], [], [], timeout_s)
        return self.drain()

    def _read(self, flags: int) -> list[T]:
        try:
            num_bytes = self._socket.recv_into(self._received, 0, flags)
        except ConnectionError as error:
            raise ChannelClosed(str(error)) from error
        if not num_bytes:
            raise ChannelClosed("end of file")
        return [self._decoder.decode(body) for body in self._splitter.feed(self._received[:num_bytes])]


class AgentChannel(asyncio.Protocol, Generic[T]):
    """The agent's side of a channel.

    `on_message` is called in the loop for each message, `on_closed` once when no more can come;
    `send` never waits. Unsent data is bounded by what the agent accepts (its bound on waiting
    generations), not here.
    """

    def __init__(self, incoming: Any, on_message: Callable[[T], None], on_closed: Callable[[], None]) -> None:
        self._splitter = FrameSplitter()
        self._decoder: msgspec.msgpack.Decoder[T] = msgspec.msgpack.Decoder(incoming)
        self._on_message = on_message
        self._on_closed = on_closed
        self._transport: asyncio.Transport | None = None

    async def open(self, sock: socket.socket) -> None:
        """Takes over the socket."""
        sock.setblocking(False)
        await asyncio.get_running_loop().create_unix_connection(lambda: self, sock=sock)

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Of asyncio.Protocol."""
        self._transport = cast("asyncio.Transport", transport)  # uvloop's transport does not inherit from it

    def data_received(self, data: bytes) -> None:
        """Of asyncio.Protocol."""
        for body in self._splitter.feed(data):
            self._on_message(self._decoder.decode(body))

    def connection_lost(self, error: Exception | None) -> None:
        """Of asyncio.Protocol.

        A frame that cannot be decoded also ends here, with an error that asyncio logs.
        """
        self._on_closed()

    def send(self, message: object) -> None:
        """Sends a message. FrameTooLarge: nothing was sent.

        A message to a rank that is gone is dropped: the loss is reported elsewhere.
        """
        frame = encode(message)
        if self._transport is not None and not self._transport.is_closing():
            self._transport.write(frame)

    def close(self) -> None:
        if self._transport is not None:
            self._transport.abort()
