"""One call's stream on a client's connection: what it may send, and what it could not send yet (RFC 9113, section 5)."""

from __future__ import annotations

from collections import deque
from typing import Protocol, cast

from ryzanstein.rpc.http2.frames import ErrorCode, FrameType, Http2Error, frame_header, reset, window_update
from ryzanstein.rpc.http2.serving.call import ServerCall
from ryzanstein.rpc.http2.serving.headers import header_frames

STREAM_WINDOW = 2**20


class StreamConnection(Protocol):
    """The connection of a stream."""

    peer: str
    auth: dict[str, list[bytes]]

    def room(self, stream: Stream) -> int:
        """Returns how many bytes of data a stream may send in one frame now."""
        ...

    def spend(self, stream: Stream, num_bytes: int) -> None:
        """Records that a stream sends so many bytes."""
        ...

    def wants_to_send(self, stream: Stream) -> None:
        """Keeps a stream until it may send more."""
        ...

    def write(self, data: bytes) -> None:
        """Hands bytes to the transport."""
        ...

    def forget(self, stream: Stream) -> None:
        """Called when a stream has sent its last frame."""
        ...


class Stream:
    """One call's stream: what it may send, and what it could not send yet."""

    __slots__ = (
        "_arrived",
        "_connection",
        "_finish",
        "_unsent",
        "auth",
        "call",
        "half_closed",
        "id",
        "over",
        "peer",
        "unsent_bytes",
        "window",
    )

    def __init__(self, connection: StreamConnection, stream_id: int, window: int) -> None:
        self._connection, self.id, self.window = connection, stream_id, window
        self.peer, self.auth = connection.peer, connection.auth
        self.call: ServerCall | None = None
        self.half_closed = self.over = False
        self.unsent_bytes = 0
        self._unsent: deque[memoryview] = deque()
        self._finish: bytes | None = None
        self._arrived = 0

    def begin(self, block: bytes) -> None:
        """Implements `CallStream`."""
        if not self.over:
            self._connection.write(header_frames(self.id, block, last=False))

    def send(self, message: bytes) -> None:
        """Implements `CallStream`."""
        if self.over:
            return
        size = len(message)
        if not self._unsent and size <= self._connection.room(self):
            self._connection.spend(self, size)
            self._connection.write(frame_header(FrameType.DATA, 0, self.id, size) + message)
            return
        self._unsent.append(memoryview(message))
        self.unsent_bytes += size
        self._connection.wants_to_send(self)

    def finish(self, block: bytes) -> None:
        """Implements `CallStream`."""
        self._finish = block
        if not self._unsent:
            self._end()

    def credit(self) -> None:
        """Implements `CallStream`."""
        if self._arrived > STREAM_WINDOW // 4 and not self.half_closed and not self.over:
            self._connection.write(window_update(self.id, self._arrived))
            self._arrived = 0

    def arrived(self, num_bytes: int) -> None:
        """Records what the client sent. Raises Http2Error if it was more than it may."""
        self._arrived += num_bytes
        if self._arrived > STREAM_WINDOW:
            raise Http2Error(ErrorCode.FLOW_CONTROL_ERROR, "more data than the stream's window permits")

    def send_some(self) -> bool:
        """Sends one frame of what is kept. Returns False if the windows or the transport take nothing."""
        part = self._unsent[0]
        size = min(len(part), self._connection.room(self))
        if size <= 0:
            return False
        self._connection.spend(self, size)
        self._connection.write(b"".join((frame_header(FrameType.DATA, 0, self.id, size), part[:size])))
        self.unsent_bytes -= size
        if size == len(part):
            self._unsent.popleft()
        else:
            self._unsent[0] = part[size:]
        if not self._unsent and self._finish is not None:
            self._end()
        return True

    @property
    def waits(self) -> bool:
        """Whether something is kept that may be sent as far as its own window goes."""
        return bool(self._unsent) and self.window > 0 and not self.over

    def _end(self) -> None:
        if not self.over:
            self.over = True
            frames = header_frames(self.id, cast(bytes, self._finish), last=True)
            # A client that still sends is asked to stop (RFC 9113, section 8.1).
            self._connection.write(frames if self.half_closed else frames + reset(self.id, ErrorCode.NO_ERROR))
            self._connection.forget(self)
            self.call = None

    def abandon(self) -> None:
        """Implements `CallStream`."""
        self._unsent.clear()
        self.unsent_bytes = 0

    def drop(self) -> None:
        """Ends the stream without a word: the client has left it."""
        self.over = True
        self.abandon()
        call, self.call = self.call, None
        if call is not None:
            call.cancel()
