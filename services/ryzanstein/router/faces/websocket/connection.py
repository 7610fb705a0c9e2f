"""One WebSocket (RFC 6455) on a connection: messages within bounds, pings, and the ways to close.

The parser is that of `websockets`, which does no input and output of its own. It gets what arrived
in pieces, in turns with other sockets, so that the smallest frames of many clients hold the event
loop no longer than the largest of one.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import cast

from uvicorn.server import ServerState
from websockets.exceptions import InvalidState
from websockets.frames import Frame, Opcode
from websockets.protocol import State
from websockets.server import ServerProtocol

from ryzanstein.router.faces.http.arrival import ByteBudget
from ryzanstein.router.faces.websocket.limits import CloseCode, SocketLimits
from ryzanstein.router.faces.websocket.turns import ParsingTurns

_PIECE_BYTES = 1024  # 20 frames that give credit
_MAX_QUEUED = 16  # messages that wait to be read
_MAX_UNSENT_BYTES = 2**20  # beyond it, nothing is read: pongs would pile up
_LINGER_S = 1.0  # for the client to read why it was closed, and to close
_ABORT_S = 5.0
_TICK_S = 5.0


@dataclass(frozen=True, slots=True)
class ConnectionParts:
    """What the connections of a router share: their bounds, the memory for messages, and the time to parse them."""

    limits: SocketLimits
    room: ByteBudget
    turns: ParsingTurns


class WebSocketConnection(asyncio.Protocol):
    """A connection whose handshake `parser` has accepted.

    `on_lost` is called once, when it is gone. `on_drain` is called when the server stops.
    """

    def __init__(
        self, parser: ServerProtocol, parts: ConnectionParts, server: ServerState, on_lost: Callable[[], None]
    ) -> None:
        self._parser = parser
        self._limits = parts.limits
        self._room = parts.room
        self._turns = parts.turns
        self._server = server
        self._on_lost = on_lost
        self.on_drain: Callable[[], None] = lambda: None
        self.busy: Callable[[], bool] = lambda: False
        """Whether a stream is open: a socket without one is closed when it is idle."""
        self.close_code = 0
        """Who closed with which code; 0 while open, 1006 when the connection broke."""

        self._loop = asyncio.get_running_loop()
        self.transport: asyncio.Transport
        self._unparsed = bytearray()
        self._fragments: list[bytes] = []
        self._fragment_bytes = 0
        self._messages: deque[bytes] = deque()
        self._message_bytes = 0
        self._news = asyncio.Event()
        self._held_bytes = 0
        self._writable = asyncio.Event()
        self._writable.set()
        self._reading = True
        self._closing = self._lost = False
        self._in_line = False
        self._parse_timer: asyncio.TimerHandle | None = None
        self._slow_timer: asyncio.TimerHandle | None = None
        self._close_timer: asyncio.TimerHandle | None = None
        self._allowance = float(parts.limits.frame_burst)
        now = self._loop.time()
        self._refilled = self._heard = self._active = now
        self._arriving_since: float | None = None
        self._flooded_since: float | None = None
        self._pinged = now
        self._tick_s = min(
            _TICK_S, *(s / 4 for s in (self._limits.ping_s, self._limits.idle_s, self._limits.message_timeout_s))
        )
        self._ticker = self._loop.call_later(self._tick_s, self._tick)

    # What the conversation uses.

    async def next_message(self) -> bytes | None:
        """Returns the next message, or None when the connection is closing."""
        while not self._messages:
            if self._closing:
                return None
            self._news.clear()
            await self._news.wait()
        message = self._messages.popleft()
        self._message_bytes -= len(message)
        self._account()
        if self._unparsed or not self._reading:
            self._parse_soon()
        return None if self._closing else message

    def write(self, text: bytes) -> None:
        """Sends a message, however much waits to be sent. Nothing when the connection is closing."""
        if not self._closing:
            self._parser.send_text(text)
            self._flush()

    @property
    def has_room(self) -> bool:
        return self._writable.is_set()

    async def room(self) -> None:
        """Returns when the client has read enough for more to be sent."""
        await self._writable.wait()

    def close(self, code: CloseCode, reason: str = "") -> None:
        """Closes with a code, after what was written. A second call has no effect."""
        if self._closing:
            return
        with contextlib.suppress(InvalidState):
            self._parser.send_close(code, reason[:100])
        self._close_begun(code)

    # What the event loop and the server call.

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = cast(asyncio.Transport, transport)  # uvloop's is none by class
        self._server.connections.add(self)  # type: ignore[arg-type]
        self._flush()

    def connection_lost(self, exc: Exception | None) -> None:
        self._lost = self._closing = True
        self.close_code = self.close_code or 1006
        self._server.connections.discard(self)
        for timer in (self._ticker, self._parse_timer, self._slow_timer, self._close_timer):
            if timer is not None:
                timer.cancel()
        self._room.taken -= self._held_bytes
        self._held_bytes = 0
        self._writable.set()
        self._news.set()
        self._on_lost()

    def shutdown(self) -> None:
        """Called by the server when it stops."""
        self.on_drain()

    def pause_writing(self) -> None:
        self._writable.clear()
        self._slow_timer = self._loop.call_later(self._limits.give_up_s, self._too_slow)

    def resume_writing(self) -> None:
        self._writable.set()
        if self._slow_timer is not None:
            self._slow_timer.cancel()
            self._slow_timer = None

    def eof_received(self) -> bool:
        return False

    def data_received(self, data: bytes) -> None:
        self._heard = self._loop.time()
        if self._closing and self._parser.state is not State.CLOSING:
            return
        if self._parser.parser_exc is not None:
            return  # lingering: the rest is not looked at
        self._unparsed += data
        self._account()
        if len(self._unparsed) > _PIECE_BYTES:
            self._read(False)
        self._parse_soon()

    # Reading.

    def _parse_soon(self) -> None:
        if not self._in_line and self._parse_timer is None:
            self._in_line = True
            self._turns.wait(self._parse)

    def _parse_later(self, delay_s: float) -> None:
        def parse() -> None:
            self._parse_timer = None
            self._parse_soon()

        self._parse_timer = self._loop.call_later(delay_s, parse)

    def _parse(self) -> None:
        """Parses a piece, if it fits into the rate and the queue of messages."""
        self._in_line = False
        if self._lost:
            return
        self._refill()
        if self._unparsed and not self._must_wait():
            piece = bytes(self._unparsed[:_PIECE_BYTES])
            del self._unparsed[:_PIECE_BYTES]
            self._feed(piece)
            if self._parser.parser_exc is not None:
                self._failed()
                return
        self._account()
        self._flush()
        self._go_on()

    def _feed(self, piece: bytes) -> None:
        self._parser.receive_data(piece)
        frames = self._parser.events_received()
        for frame in frames:
            if isinstance(frame, Frame):
                self._take(frame)
        self._allowance -= len(frames)

    def _must_wait(self) -> bool:
        return (
            len(self._messages) >= _MAX_QUEUED
            or self._allowance < 0
            or self.transport.get_write_buffer_size() > _MAX_UNSENT_BYTES
        )

    def _go_on(self) -> None:
        """Reads more, or parses the rest when its turn comes."""
        if not self._unparsed:
            self._flooded_since = None
            self._read(True)
            return
        self._read(False)
        if self._allowance < 0:
            now = self._loop.time()
            self._flooded_since = self._flooded_since or now
            if now - self._flooded_since > self._limits.flood_s:
                self.close(CloseCode.POLICY_VIOLATION, f"more than {self._limits.frames_per_s:g} frames per second")
                return
            self._parse_later(-self._allowance / self._limits.frames_per_s)
        elif self.transport.get_write_buffer_size() > _MAX_UNSENT_BYTES:
            self._parse_later(0.1)
        elif len(self._messages) < _MAX_QUEUED:
            self._parse_soon()

    def _read(self, on: bool) -> None:
        if on is not self._reading and not self.transport.is_closing():
            self._reading = on
            if on:
                self.transport.resume_reading()
            else:
                self.transport.pause_reading()

    def _refill(self) -> None:
        now = self._loop.time()
        gained = (now - self._refilled) * self._limits.frames_per_s
        self._allowance = min(float(self._limits.frame_burst), self._allowance + gained)
        self._refilled = now

    def _take(self, frame: Frame) -> None:
        match frame.opcode:
            case Opcode.TEXT | Opcode.CONT:
                self._add(bytes(frame.data), frame.fin)
            case Opcode.BINARY:
                self.close(CloseCode.UNSUPPORTED_DATA, "messages are JSON in text frames")
            case Opcode.CLOSE:
                self._close_received()

    def _add(self, fragment: bytes, is_last: bool) -> None:
        if self._closing:
            return
        self._fragments.append(fragment)
        self._fragment_bytes += len(fragment)
        if len(self._fragments) > self._limits.max_fragments:
            self.close(CloseCode.POLICY_VIOLATION, f"a message has at most {self._limits.max_fragments} fragments")
            return
        if not is_last:
            return
        message = self._fragments[0] if len(self._fragments) == 1 else b"".join(self._fragments)
        self._fragments.clear()
        self._fragment_bytes = 0
        try:
            message.decode()
        except UnicodeDecodeError:
            self.close(CloseCode.INVALID_DATA, "a message is not UTF-8")
            return
        self._active = self._loop.time()
        self._arriving_since = None
        self._messages.append(message)
        self._message_bytes += len(message)
        self._news.set()

    def _account(self) -> None:
        """Counts what is held of messages, and from when on one is arriving."""
        if self._lost:
            return
        partial = len(self._parser.reader.buffer) + self._fragment_bytes
        if not partial:
            self._arriving_since = None
        elif self._arriving_since is None:
            self._arriving_since = self._loop.time()
        held = len(self._unparsed) + partial + self._message_bytes
        self._room.taken += held - self._held_bytes
        self._held_bytes = held
        if self._room.taken > self._room.bound and held > _PIECE_BYTES:
            self.close(CloseCode.TRY_AGAIN_LATER, "too many messages are arriving")

    # Writing and closing.

    def _flush(self) -> None:
        data = b"".join(self._parser.data_to_send())
        if data and not self.transport.is_closing():
            self.transport.write(data)

    def _close_begun(self, code: int) -> None:
        """Waits for the client to close, but not for long."""
        self.close_code = self.close_code or code
        self._closing = True
        self._news.set()
        self._writable.set()
        if not self._lost:
            self._flush()
            self._close_timer = self._loop.call_later(_LINGER_S, self._hang_up)

    def _close_received(self) -> None:
        received = self._parser.close_rcvd
        self.close_code = self.close_code or (1005 if received is None else received.code)
        self._closing = True
        self._news.set()
        self._writable.set()
        self._flush()
        self._hang_up()

    def _failed(self) -> None:
        """The parser has given up and written why."""
        sent = self._parser.close_sent
        self._unparsed.clear()
        self._fragments.clear()
        self._fragment_bytes = 0
        self._account()
        self._close_begun(CloseCode.PROTOCOL_ERROR if sent is None else sent.code)
        self._read(True)  # and discard, so that the client can read the reason before it is cut off

    def _hang_up(self) -> None:
        """Closes the connection; a client that does not read what is left is cut off."""
        if self._close_timer is not None:
            self._close_timer.cancel()
        self.transport.close()
        self._close_timer = self._loop.call_later(_ABORT_S, self.transport.abort)

    def _too_slow(self) -> None:
        self.close_code = self.close_code or CloseCode.NOT_READING
        self.transport.abort()

    def _tick(self) -> None:
        """Looks after time: pings, and closes what is silent, idle, or too slow to complete a message."""
        now, limits = self._loop.time(), self._limits
        self._ticker = self._loop.call_later(self._tick_s, self._tick)
        if self._closing:
            return
        if not self._reading:
            self._heard = now  # it may have been heard, had it been listened to
        if now - self._heard > limits.silence_s:
            self.close(CloseCode.SILENT, "no answer to a ping")
        elif self._arriving_since is not None and now - self._arriving_since > limits.message_timeout_s:
            self.close(CloseCode.MESSAGE_TIMEOUT, f"a message must be complete within {limits.message_timeout_s:g} s")
        elif not self.busy() and now - self._active > limits.idle_s:
            self.close(CloseCode.IDLE, "idle")
        elif now - self._pinged >= limits.ping_s:
            self._pinged = now
            self._parser.send_ping(b"")
            self._flush()

    def touch(self) -> None:
        """Starts the idle time anew: a stream has just ended."""
        self._active = self._loop.time()
