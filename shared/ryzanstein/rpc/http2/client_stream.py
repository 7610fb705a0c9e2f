"""One bidirectional gRPC call on a connection of its own (gRPC over HTTP2; RFC 9113).

A library of gRPC hands each message through threads, queues and tasks of its own. Here a message that
arrived is passed to its receiver while the bytes are read, and one that is sent goes to the transport
at once; what is sent in one pass of uvloop's loop leaves in one write.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from typing import Protocol, cast

import grpc
from hpack import Decoder, Encoder
from hpack.exceptions import HPACKError

from ryzanstein.rpc.http2.call_end import NO_STATUS, CallEnd, end_of_headers, end_of_reset, no_server
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
    frame_header,
    goaway,
    read_increment,
    read_settings,
    read_uint32,
    reset,
    settings_frame,
    window_update,
    without_padding,
)
from ryzanstein.rpc.http2.header_block import HeaderBlock
from ryzanstein.rpc.http2.messages import MessageError, MessageReader, prefixed
from ryzanstein.rpc.http2.pass_writer import PassWriter

_STREAM = 1
WINDOW_BYTES = 4 * 2**20
"""How much a server may send before it was read. It is read at once, so this bounds what one pass of the loop reads."""
MAX_HEADER_BYTES = 64 * 1024
# Answers to pings and settings that a peer does not read.
MAX_UNREAD_BYTES = 2**20
_CLOSING_S = 1.0
_HTTP_1 = b"HTTP/"


class MessageReceiver(Protocol):
    """Receives what one call does. Called in the event loop while bytes are read: its methods must not block."""

    def message(self, data: bytes) -> None:
        """Called with each serialized message, in order. Must not raise."""
        ...

    def writable(self) -> None:
        """Called when a stream that was not `ready` is again."""
        ...

    def ended(self, end: CallEnd) -> None:
        """Called once, last, and not after `close`."""
        ...


class ClientStream(asyncio.Protocol):
    """The client's end of one call, which begins when the connection is made.

    `send` one message when it is `ready`, and `close` it at the end, also after it has ended.
    """

    def __init__(self, headers: Mapping[str, str], receiver: MessageReceiver, max_message_bytes: int) -> None:
        self._headers = headers
        self._receiver = receiver
        self._frames = FrameReader(self._take)
        self._messages = MessageReader(self._message, max_message_bytes)
        self._decoder = Decoder(max_header_list_size=MAX_HEADER_BYTES)
        self._transport: asyncio.Transport | None = None
        self._writer: PassWriter | None = None
        self._unsent = memoryview(b"")
        self._paused = False
        # How much this end may send, on the connection and on the stream.
        self._connection_window = self._stream_window = DEFAULT_WINDOW
        self._initial_window = DEFAULT_WINDOW
        self._unacknowledged = 0
        self._block = HeaderBlock(MAX_HEADER_BYTES)
        self._answered = self._greeted = self._over = False

    @property
    def ready(self) -> bool:
        """Whether another message may be sent."""
        return not self._unsent and not self._paused and not self._over and self._transport is not None

    @property
    def holds(self) -> bool:
        """Whether a part of a message waits for the server."""
        return bool(self._unsent)

    def send(self, message: bytes) -> None:
        """Sends a message, as much of it as windows and the transport take now. Only when `ready`."""
        if not self.ready:
            raise RuntimeError("an earlier message is not sent yet, or the call has ended")
        self._unsent = memoryview(prefixed(message))
        self._flush()

    def close(self) -> None:
        """Ends the call, if it runs, and the connection. The receiver is not called again."""
        transport, was_over = self._transport, self._over
        self._over, self._transport = True, None
        if transport is None:
            return
        # A peer that does not read must not keep the connection.
        if transport.is_closing() or self._paused or self._writer is None:
            transport.abort()
            return
        if not was_over:
            self._writer.write(reset(_STREAM, ErrorCode.CANCEL) + goaway(ErrorCode.NO_ERROR))
        self._writer.flush()
        transport.close()
        asyncio.get_running_loop().call_later(_CLOSING_S, transport.abort)

    # Called by the transport.

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        # Not an isinstance check: uvloop's transports only look like asyncio's.
        self._transport = cast(asyncio.Transport, transport)
        self._writer = PassWriter(self._transport)
        headers = Encoder().encode(self._headers.items(), huffman=False)
        self._writer.write(
            PREFACE
            + settings_frame({Setting.ENABLE_PUSH: 0, Setting.INITIAL_WINDOW_SIZE: WINDOW_BYTES})
            + window_update(0, WINDOW_BYTES - DEFAULT_WINDOW)
            + frame(FrameType.HEADERS, Flag.END_HEADERS, _STREAM, headers)
        )

    def connection_lost(self, exc: Exception | None) -> None:
        why = "" if exc is None else f": {exc}"
        self._end(no_server(f"the connection was lost{why}"))

    def eof_received(self) -> bool:
        return False

    def pause_writing(self) -> None:
        self._paused = True

    def resume_writing(self) -> None:
        self._paused = False
        self._flush()
        self._tell_writable()

    def data_received(self, data: bytes) -> None:
        if self._over:
            return
        try:
            if not self._greeted and data.startswith(_HTTP_1):
                raise Http2Error(ErrorCode.PROTOCOL_ERROR, "it answers in HTTP/1")
            self._frames.feed(data)
        except Http2Error as error:
            self._break_off(error)
        except MessageError as error:
            self._break_off(Http2Error(ErrorCode.CANCEL, str(error)), error.code)
        except HPACKError as error:
            self._break_off(Http2Error(ErrorCode.COMPRESSION_ERROR, f"headers cannot be read: {error}"))

    # Reading.

    def _take(self, kind: int, flags: int, stream_id: int, payload: bytes) -> None:
        if self._over:
            return
        self._block.check(kind, stream_id)
        if kind == FrameType.DATA:
            self._on_data(flags, stream_id, payload)
        elif not self._greeted and kind != FrameType.SETTINGS:
            raise Http2Error(ErrorCode.PROTOCOL_ERROR, "it does not begin with settings, as HTTP/2 does")
        else:
            self._on_control(kind, flags, stream_id, payload)

    def _on_data(self, flags: int, stream_id: int, payload: bytes) -> None:
        if stream_id != _STREAM or not self._answered:
            raise Http2Error(ErrorCode.PROTOCOL_ERROR, f"data on stream {stream_id} before its headers")
        self._unacknowledged += len(payload)
        if self._unacknowledged > WINDOW_BYTES // 2:
            self._write(window_update(0, self._unacknowledged) + window_update(_STREAM, self._unacknowledged))
            self._unacknowledged = 0
        self._messages.feed(without_padding(flags & Flag.PADDED, payload))
        if flags & Flag.END_STREAM:
            self._end(NO_STATUS)

    def _on_control(self, kind: int, flags: int, stream_id: int, payload: bytes) -> None:
        match kind:
            case FrameType.HEADERS if stream_id == _STREAM:
                self._on_block(self._block.begun(flags, stream_id, without_padding(flags, payload)))
            case FrameType.CONTINUATION:
                self._on_block(self._block.continued(flags, payload))
            case FrameType.RST_STREAM if stream_id == _STREAM:
                self._end(end_of_reset(read_uint32(payload, "RST_STREAM")))
            case FrameType.WINDOW_UPDATE:
                self._on_window_update(stream_id, read_increment(payload))
            case FrameType.SETTINGS if stream_id == 0:
                self._on_settings(flags, payload)
            case FrameType.PING if stream_id == 0:
                self._on_ping(flags, payload)
            case FrameType.GOAWAY if stream_id == 0:
                self._on_goaway(payload)
            case FrameType.HEADERS | FrameType.RST_STREAM | FrameType.PUSH_PROMISE:
                raise Http2Error(ErrorCode.PROTOCOL_ERROR, f"a frame of type {kind} on stream {stream_id}")
            case _:
                pass  # frames of unknown types are ignored (RFC 9113, section 5.5)

    def _on_block(self, block: bytes | None) -> None:
        if block is None:
            return
        headers = {_text(name): _text(value) for name, value in self._decoder.decode(block, raw=True)}
        last = bool(self._block.flags & Flag.END_STREAM)
        if headers.get(":status", "").startswith("1") and not last:
            return  # an interim answer
        end = end_of_headers(headers, last=last)
        self._answered = True
        if end is not None:
            self._end(end)

    def _on_window_update(self, stream_id: int, increment: int) -> None:
        if stream_id == 0:
            self._connection_window += increment
        elif stream_id == _STREAM:
            self._stream_window += increment
        if max(self._connection_window, self._stream_window) > MAX_WINDOW:
            raise Http2Error(ErrorCode.FLOW_CONTROL_ERROR, f"a window of more than {MAX_WINDOW} bytes")
        self._go_on()

    def _on_settings(self, flags: int, payload: bytes) -> None:
        self._greeted = True
        if flags & Flag.ACK:
            return
        for setting, value in read_settings(payload):
            if setting == Setting.INITIAL_WINDOW_SIZE:
                if value > MAX_WINDOW:
                    raise Http2Error(ErrorCode.FLOW_CONTROL_ERROR, f"a window of more than {MAX_WINDOW} bytes")
                self._stream_window += value - self._initial_window
                self._initial_window = value
        self._write(frame(FrameType.SETTINGS, Flag.ACK, 0))
        self._go_on()

    def _on_ping(self, flags: int, payload: bytes) -> None:
        if len(payload) != 8:
            raise Http2Error(ErrorCode.FRAME_SIZE_ERROR, f"PING of {len(payload)} bytes")
        if not flags & Flag.ACK:
            self._write(frame(FrameType.PING, Flag.ACK, 0, payload))

    def _on_goaway(self, payload: bytes) -> None:
        """A call that the server has begun with goes on."""
        if len(payload) < 8:
            raise Http2Error(ErrorCode.FRAME_SIZE_ERROR, f"GOAWAY of {len(payload)} bytes")
        if int.from_bytes(payload[:4]) & MAX_WINDOW < _STREAM:
            code, why = int.from_bytes(payload[4:8]), payload[8:].decode(errors="replace")
            self._end(no_server(f"the server takes no calls (code {code}{why and ', '}{why})"))

    # Writing.

    def _flush(self) -> None:
        """Writes of the message that waits as much as windows and the transport take."""
        while self._unsent and not self._paused and not self._over:
            room = min(len(self._unsent), self._connection_window, self._stream_window, MAX_FRAME_BYTES)
            if room <= 0:
                return
            self._connection_window -= room
            self._stream_window -= room
            part, self._unsent = self._unsent[:room], self._unsent[room:]
            self._write(b"".join((frame_header(FrameType.DATA, 0, _STREAM, room), part)))

    def _go_on(self) -> None:
        if self._unsent:
            self._flush()
            self._tell_writable()

    def _tell_writable(self) -> None:
        if self.ready:
            self._receiver.writable()

    def _write(self, data: bytes) -> None:
        if self._transport is not None and self._writer is not None:
            self._writer.write(data)
            if self._paused and self._transport.get_write_buffer_size() > MAX_UNREAD_BYTES:
                raise Http2Error(ErrorCode.ENHANCE_YOUR_CALM, "it asks for answers and reads none")

    # Ending.

    def _message(self, data: bytes, _: bool) -> None:
        if not self._over:
            self._receiver.message(data)

    def _break_off(self, error: Http2Error, code: grpc.StatusCode = grpc.StatusCode.INTERNAL) -> None:
        """Ends a connection whose peer does not keep to HTTP/2."""
        transport = self._transport
        self._end(CallEnd(code, str(error)))
        if transport is not None and self._paused:
            transport.abort()
        elif transport is not None and self._writer is not None:
            self._writer.write(goaway(error.code, str(error)))
            self._writer.flush()
            transport.close()

    def _end(self, end: CallEnd) -> None:
        if not self._over:
            self._over = True
            self._receiver.ended(end)


def _text(value: bytes) -> str:
    return bytes(value).decode("utf-8", "replace")
