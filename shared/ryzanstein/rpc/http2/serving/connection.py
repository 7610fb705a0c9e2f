"""A client's connection as the server reads and writes it (RFC 9113): streams, flow control, and what is refused."""

from __future__ import annotations

import asyncio
from contextlib import suppress
from typing import Protocol, cast
from urllib.parse import quote

import grpc
import structlog
from hpack.exceptions import HPACKError

from ryzanstein.addresses import join_address
from ryzanstein.rpc.http2.frames import (
    DEFAULT_WINDOW,
    MAX_FRAME_BYTES,
    MAX_WINDOW,
    PREFACE,
    ErrorCode,
    Flag,
    FrameReader,
    FrameType,
    Http2Error,
    Setting,
    frame,
    read_increment,
    read_settings,
    read_uint32,
    reset,
    settings_frame,
    window_update,
    without_padding,
)
from ryzanstein.rpc.http2.header_block import HeaderBlock
from ryzanstein.rpc.http2.pass_writer import PassWriter
from ryzanstein.rpc.http2.serving.call import Handlers, ServerCall
from ryzanstein.rpc.http2.serving.headers import (
    MAX_BLOCK_BYTES,
    MAX_METADATA_BYTES,
    RequestHeads,
    header_frames,
    response_head,
    trailers,
    whole_response,
)
from ryzanstein.rpc.http2.serving.manners import Manners
from ryzanstein.rpc.http2.serving.stream import STREAM_WINDOW, Stream
from ryzanstein.rpc.tls.server_context import auth_context, speaks_http2

log = structlog.get_logger(__name__)

CONNECTION_WINDOW = 4 * 2**20
# Answers to pings and settings that a client does not read.
MAX_UNREAD_ANSWERS = 2**20
_CLOSING_S, DRAIN_S = 1.0, 10.0
_MOST_UNSENT_BYTES = 64 * 1024
_LAST_CALLS, _LAST_CALLS_S = b"lastcall", 1.0
_GOING = "the server stops or balances its connections"


class ConnectionHost(Handlers, Protocol):
    """The server of a connection."""

    max_streams: int
    min_ping_interval_s: float
    handshake_s: float
    keepalive_s: float
    keepalive_timeout_s: float

    def joined(self, connection: ServerConnection) -> bool:
        """Returns False if there is no room for another connection."""
        ...

    def left(self, connection: ServerConnection) -> None: ...

    def begin(self, call: ServerCall) -> bool:
        """Runs a call. Returns False if too many run."""
        ...


class ServerConnection(asyncio.Protocol):
    """One connection, whose calls the host runs."""

    def __init__(self, host: ConnectionHost) -> None:
        self._host = host
        self._loop = asyncio.get_running_loop()
        self._transport: asyncio.Transport | None = None
        self._closing: asyncio.Transport | None = None
        self._writer: PassWriter | None = None
        self._frames = FrameReader(self._take)
        self._heads = RequestHeads()
        self._manners = Manners(host.min_ping_interval_s)
        self._preface = b""
        self._greeted = self._paused = self._asked_to_go = self._going = False
        self._streams: dict[int, Stream] = {}
        self._waiting: dict[Stream, None] = {}
        self._last_id = 0
        self._window = self._initial_window = DEFAULT_WINDOW
        self._arrived = 0
        self._block = HeaderBlock(MAX_BLOCK_BYTES)
        self._read_at = self._loop.time()
        self._timer: asyncio.TimerHandle | None = None
        self.peer = ""
        self.auth: dict[str, list[bytes]] = {}
        """The authentication context of calls; empty without TLS."""

    # Called by the transport.

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        # Not an isinstance check: uvloop's transports only look like asyncio's.
        self._transport = cast(asyncio.Transport, transport)
        self._writer = PassWriter(self._transport)
        self.peer = _peer(transport.get_extra_info("peername"))
        tls = transport.get_extra_info("ssl_object")
        if not self._host.joined(self) or (tls is not None and not speaks_http2(tls)):
            self._abort()
            return
        self.auth = {} if tls is None else auth_context(tls)
        self._transport.set_write_buffer_limits(_MOST_UNSENT_BYTES)  # by default half a megabyte with TLS
        self._timer = self._loop.call_later(self._host.handshake_s, self._no_preface)
        settings = {
            Setting.MAX_CONCURRENT_STREAMS: self._host.max_streams,
            Setting.INITIAL_WINDOW_SIZE: STREAM_WINDOW,
            Setting.MAX_HEADER_LIST_SIZE: MAX_METADATA_BYTES,
        }
        self.write(settings_frame(settings) + window_update(0, CONNECTION_WINDOW - DEFAULT_WINDOW))

    def connection_lost(self, exc: Exception | None) -> None:
        self._transport = self._closing = None
        if self._timer is not None:
            self._timer.cancel()
        streams, self._streams = self._streams, {}
        self._waiting.clear()
        for stream in streams.values():
            stream.drop()
        self._frames = FrameReader(_ignore)  # one that knows this connection would keep it until the next collection
        self._host.left(self)

    def pause_writing(self) -> None:
        self._paused = True

    def resume_writing(self) -> None:
        self._paused = False
        self._send_waiting()

    def data_received(self, data: bytes) -> None:
        if self._transport is None:
            return  # it is closed, and read until the client has seen that
        self._read_at = self._loop.time()
        try:
            self._frames.feed(data if self._greeted else self._after_preface(data))
        except Http2Error as error:
            self._break_off(error)
        except HPACKError as error:
            self._break_off(Http2Error(ErrorCode.COMPRESSION_ERROR, f"headers cannot be read: {error}"))

    def _after_preface(self, data: bytes) -> bytes:
        """Returns what follows the 24 bytes that every client begins with."""
        self._preface += data
        if not self._preface.startswith(PREFACE[: len(self._preface)]):
            raise Http2Error(ErrorCode.PROTOCOL_ERROR, "the client does not speak HTTP/2")
        if len(self._preface) < len(PREFACE):
            return b""
        rest, self._preface, self._greeted = self._preface[len(PREFACE) :], b"", True
        if self._timer is not None:
            self._timer.cancel()
        self._timer = self._loop.call_later(self._host.keepalive_s, self._keep_alive)
        return rest

    def _no_preface(self) -> None:
        self._abort()

    # Reading.

    def _take(self, kind: int, flags: int, stream_id: int, payload: bytes) -> None:
        if self._transport is None:
            return
        self._block.check(kind, stream_id)
        if kind == FrameType.DATA:
            self._on_data(flags, stream_id, payload)
        elif kind == FrameType.HEADERS:
            self._on_headers(flags, stream_id, payload)
        elif kind == FrameType.WINDOW_UPDATE:
            self._on_window_update(stream_id, payload)
        else:
            self._on_control(kind, flags, stream_id, payload)

    def _on_data(self, flags: int, stream_id: int, payload: bytes) -> None:
        self._arrived += len(payload)
        if self._arrived > CONNECTION_WINDOW // 2:
            self.write(window_update(0, self._arrived))
            self._arrived = 0
        stream = self._streams.get(stream_id)
        if stream is None:
            self._check_closed(stream_id)
            return
        if stream.half_closed:
            raise Http2Error(ErrorCode.STREAM_CLOSED, f"data on stream {stream_id} after its end")
        stream.arrived(len(payload))
        call = cast(ServerCall, stream.call)
        if payload:
            call.receive(without_padding(flags & Flag.PADDED, payload))
        elif not flags & Flag.END_STREAM:
            self._manners.said_nothing(self._read_at)
        if flags & Flag.END_STREAM:
            stream.half_closed = True
            call.half_closed()

    def _on_headers(self, flags: int, stream_id: int, payload: bytes) -> None:
        if stream_id % 2 == 0:
            raise Http2Error(ErrorCode.PROTOCOL_ERROR, f"a client opens stream {stream_id}")
        if (block := self._block.begun(flags, stream_id, without_padding(flags, payload))) is not None:
            self._on_block(flags, stream_id, block)

    def _on_block(self, flags: int, stream_id: int, block: bytes) -> None:
        # It is read in any case: the table of later ones depends on it.
        head = self._heads.read(block)
        if (stream := self._streams.get(stream_id)) is not None:
            self._on_trailers(stream, flags)
            return
        if stream_id <= self._last_id and flags & Flag.END_STREAM:
            self._manners.said_nothing(self._read_at)  # trailers of a call that has just ended
            return
        if stream_id <= self._last_id:
            raise Http2Error(ErrorCode.STREAM_CLOSED, f"headers on stream {stream_id}, which is closed")
        self._last_id = stream_id
        if self._going or len(self._streams) >= self._host.max_streams:
            self.write(reset(stream_id, ErrorCode.REFUSED_STREAM))
        elif head.http != 200:
            self.write(header_frames(stream_id, whole_response(head.http), last=True) + reset(stream_id, ErrorCode.NO_ERROR))
        elif head.problem is not None:
            self._refuse(stream_id, head.problem)
        else:
            stream = Stream(self, stream_id, self._initial_window)
            call = stream.call = ServerCall(stream, head, self._host)
            stream.half_closed = bool(flags & Flag.END_STREAM)
            if stream.half_closed:
                call.half_closed()
            self._streams[stream_id] = stream
            if not self._host.begin(call):
                del self._streams[stream_id]
                stream.drop()
                self._refuse(stream_id, _TOO_MANY)

    def _refuse(self, stream_id: int, problem: tuple[grpc.StatusCode, str]) -> None:
        block = response_head() + trailers(*problem)
        self.write(header_frames(stream_id, block, last=True) + reset(stream_id, ErrorCode.NO_ERROR))

    def _on_trailers(self, stream: Stream, flags: int) -> None:
        """gRPC's clients send none, and they say nothing here."""
        if stream.half_closed or not flags & Flag.END_STREAM:
            raise Http2Error(ErrorCode.PROTOCOL_ERROR, f"headers within stream {stream.id}")
        stream.half_closed = True
        cast(ServerCall, stream.call).half_closed()

    def _on_window_update(self, stream_id: int, payload: bytes) -> None:
        increment = read_increment(payload)
        if stream_id == 0:
            self._window += increment
            if self._window > MAX_WINDOW:
                raise Http2Error(ErrorCode.FLOW_CONTROL_ERROR, f"a window of more than {MAX_WINDOW} bytes")
            self._send_waiting()
        elif (stream := self._streams.get(stream_id)) is not None:
            self._widen(stream, increment)
            self._send_waiting()
        else:
            self._check_closed(stream_id)

    def _widen(self, stream: Stream, num_bytes: int) -> None:
        stream.window += num_bytes
        if stream.window > MAX_WINDOW:
            raise Http2Error(ErrorCode.FLOW_CONTROL_ERROR, f"a window of more than {MAX_WINDOW} bytes")
        if stream.waits:
            self._waiting[stream] = None

    def _on_control(self, kind: int, flags: int, stream_id: int, payload: bytes) -> None:
        match kind:
            case FrameType.CONTINUATION:
                if (block := self._block.continued(flags, payload)) is not None:
                    self._on_block(self._block.flags, stream_id, block)
            case FrameType.RST_STREAM:
                self._on_reset(stream_id, read_uint32(payload, "RST_STREAM"))
            case FrameType.SETTINGS if stream_id == 0:
                self._on_settings(flags, payload)
            case FrameType.PING if stream_id == 0:
                self._on_ping(flags, payload)
            case FrameType.GOAWAY if stream_id == 0:
                self._going = True
                self._close_if_done()
            case FrameType.PUSH_PROMISE | FrameType.SETTINGS | FrameType.PING | FrameType.GOAWAY:
                raise Http2Error(ErrorCode.PROTOCOL_ERROR, f"a frame of type {kind} on stream {stream_id}")
            case _:
                self._manners.said_nothing(self._read_at)

    def _on_reset(self, stream_id: int, _: int) -> None:
        if (stream := self._streams.pop(stream_id, None)) is not None:
            self._waiting.pop(stream, None)
            stream.drop()
            self._close_if_done()
            self._manners.reset(self._read_at)
        else:
            self._check_closed(stream_id)
            self._manners.said_nothing(self._read_at)

    def _on_settings(self, flags: int, payload: bytes) -> None:
        if flags & Flag.ACK:
            return
        self._manners.said_nothing(self._read_at)
        for setting, value in read_settings(payload):
            if setting == Setting.INITIAL_WINDOW_SIZE:
                if value > MAX_WINDOW:
                    raise Http2Error(ErrorCode.FLOW_CONTROL_ERROR, f"a window of more than {MAX_WINDOW} bytes")
                change, self._initial_window = value - self._initial_window, value
                for stream in self._streams.values():
                    self._widen(stream, change)
        self.write(frame(FrameType.SETTINGS, Flag.ACK, 0))
        self._send_waiting()

    def _on_ping(self, flags: int, payload: bytes) -> None:
        if len(payload) != 8:
            raise Http2Error(ErrorCode.FRAME_SIZE_ERROR, f"PING of {len(payload)} bytes")
        if not flags & Flag.ACK:
            self._manners.pinged(self._read_at)
            self.write(frame(FrameType.PING, Flag.ACK, 0, payload))
        elif payload == _LAST_CALLS:
            self._stop_taking()

    def _check_closed(self, stream_id: int) -> None:
        """What arrives for a call that has ended is dropped. Raises Http2Error for one that never began."""
        if stream_id > self._last_id or stream_id % 2 == 0:
            raise Http2Error(ErrorCode.PROTOCOL_ERROR, f"stream {stream_id} is not open")

    # Writing.

    def room(self, stream: Stream) -> int:
        """Returns how many bytes of data a stream may send in one frame now."""
        return 0 if self._paused else min(self._window, stream.window, MAX_FRAME_BYTES)

    def spend(self, stream: Stream, num_bytes: int) -> None:
        """Records that a stream sends so many bytes."""
        self._window -= num_bytes
        stream.window -= num_bytes
        self._manners.answered()

    def wants_to_send(self, stream: Stream) -> None:
        """Keeps a stream until it may send more."""
        if stream.waits:
            self._waiting[stream] = None
            self._send_waiting()

    def _send_waiting(self) -> None:
        """Sends what streams have kept, a frame of each in turn."""
        while self._waiting and not self._paused and self._window > 0:
            stream = next(iter(self._waiting))
            del self._waiting[stream]
            sent = stream.send_some()
            if stream.waits:
                self._waiting[stream] = None
            if sent and stream.call is not None:
                stream.call.sent()

    def write(self, data: bytes) -> None:
        """Hands bytes to the transport. Raises Http2Error when far too many are not read."""
        if self._transport is not None and self._writer is not None:
            self._writer.write(data)
            if self._paused and self._transport.get_write_buffer_size() > MAX_UNREAD_ANSWERS:
                self._abort()

    # Ending.

    def forget(self, stream: Stream) -> None:
        """Called when a stream has sent its last frame."""
        self._streams.pop(stream.id, None)
        self._waiting.pop(stream, None)
        self._close_if_done()

    def go_away(self) -> None:
        """Asks the client to open no more calls here, and ends the connection with the last one.

        Calls that are on their way are taken until the client answers, or a second is over (RFC 9113, section 6.8).
        """
        if not self._asked_to_go:
            self._asked_to_go = True
            self.write(_goaway(MAX_WINDOW, ErrorCode.NO_ERROR, _GOING) + frame(FrameType.PING, 0, 0, _LAST_CALLS))
            self._loop.call_later(_LAST_CALLS_S, self._stop_taking)

    def _stop_taking(self) -> None:
        if not self._going and self._asked_to_go:
            self._going = True
            self.write(_goaway(self._last_id, ErrorCode.NO_ERROR, _GOING))
            self._close_if_done()

    @property
    def busy(self) -> bool:
        """Whether a call runs, or its client has not taken all of its answer."""
        return bool(self._streams)

    def close(self) -> None:
        """Ends the connection and all of its calls."""
        self._break_off(Http2Error(ErrorCode.NO_ERROR, "the server stops"))

    def _close_if_done(self) -> None:
        if self._going and not self._streams:
            self._close(DRAIN_S)

    def _break_off(self, error: Http2Error) -> None:
        if error.code is not ErrorCode.NO_ERROR:
            log.debug("connection ended", peer=self.peer, why=str(error))
        self.write(_goaway(self._last_id, error.code, str(error)))
        self._close(_CLOSING_S, still_sends=error.code is not ErrorCode.NO_ERROR)

    def _close(self, within_s: float, *, still_sends: bool = False) -> None:
        """Says that nothing follows, and waits until the client has closed its side: it may still read what was written.

        A client that `still_sends` learns it by the last frame alone where there is TLS. If this side closed the socket, the
        kernel would answer what arrives with a reset, and the client would lose that frame.
        """
        transport, self._transport, self._closing = self._transport, None, self._transport
        if transport is None or self._writer is None:
            return
        self._writer.flush()
        with suppress(OSError):  # the client is gone already
            if transport.can_write_eof() and not transport.is_closing():
                transport.write_eof()
            elif not still_sends:
                transport.close()
        for stream in list(self._streams.values()):
            stream.drop()
        self._loop.call_later(within_s, transport.abort)

    def abort(self) -> None:
        """Ends the connection though its client has not closed it."""
        if self._closing is not None:
            self._closing.abort()
        self._abort()

    def _abort(self) -> None:
        transport, self._transport = self._transport, None
        if transport is not None:
            transport.abort()

    def _keep_alive(self) -> None:
        """Asks a silent client whether it is there."""
        silent_s = self._loop.time() - self._read_at
        if silent_s >= self._host.keepalive_s + self._host.keepalive_timeout_s:
            self._abort()
            return
        if silent_s >= self._host.keepalive_s:
            self.write(frame(FrameType.PING, 0, 0, bytes(8)))
            wait_s = self._host.keepalive_timeout_s
        else:
            wait_s = self._host.keepalive_s - silent_s
        self._timer = self._loop.call_later(wait_s, self._keep_alive)


_TOO_MANY = (grpc.StatusCode.RESOURCE_EXHAUSTED, "Concurrent RPC limit exceeded!")


def _ignore(kind: int, flags: int, stream_id: int, payload: bytes) -> None:
    pass


def _goaway(last_id: int, code: ErrorCode, why: str) -> bytes:
    payload = last_id.to_bytes(4) + int(code).to_bytes(4) + why.encode()[:256]
    return frame(FrameType.GOAWAY, 0, 0, payload)


def _peer(address: object) -> str:
    """Returns a client's address as gRPC writes it."""
    if not isinstance(address, tuple):
        return "unix:"
    host = address[0].removeprefix("::ffff:")  # a client of IPv4 at a socket for both
    return f"{'ipv6' if ':' in host else 'ipv4'}:{quote(join_address(host, address[1]), safe=':')}"
