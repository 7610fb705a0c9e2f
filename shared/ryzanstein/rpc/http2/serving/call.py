"""One call as its server runs it; also the context that its handler gets, with the interface of `grpc.aio`'s."""

from __future__ import annotations

import asyncio
import inspect
from collections import deque
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import aclosing
from typing import Any, Protocol

import grpc
import structlog

from ryzanstein.rpc.http2.messages import MessageError, MessageReader, prefixed, uncompressed
from ryzanstein.rpc.http2.serving.half_sent import HalfSentMessages
from ryzanstein.rpc.http2.serving.headers import Metadata, RequestHead, response_head, trailers

log = structlog.get_logger(__name__)

Behavior = Callable[[Any, Any], Any]
# What a handler may have written that its client has not taken. Beyond it the handler waits.
MAX_UNSENT_BYTES = 64 * 1024
# Of a stream of requests, what waits for its handler. Beyond it the client waits.
MAX_UNREAD_BYTES = 64 * 1024
_MESSAGE_BYTES = 64  # what one takes besides its bytes


class CallDetails:
    """What interceptors see of a call, as in `grpc.HandlerCallDetails`."""

    __slots__ = ("invocation_metadata", "method")

    def __init__(self, method: str, invocation_metadata: Metadata) -> None:
        self.method, self.invocation_metadata = method, invocation_metadata


class CallStream(Protocol):
    """The call's end of its stream: see `connection.Stream`."""

    peer: str
    auth: dict[str, list[bytes]]
    """The authentication context of the connection; empty without TLS."""

    @property
    def unsent_bytes(self) -> int: ...

    def begin(self, block: bytes) -> None:
        """Sends the headers of the response."""
        ...

    def send(self, message: bytes) -> None:
        """Sends a message with its prefix, or keeps what the client does not take now."""
        ...

    def finish(self, block: bytes) -> None:
        """Sends the trailers after all that is kept. Nothing follows."""
        ...

    def abandon(self) -> None:
        """Drops what is kept."""
        ...

    def credit(self) -> None:
        """Lets the client send as much more as has arrived since the last time."""
        ...


class Handlers(Protocol):
    """Where calls find what handles them."""

    max_message_bytes: int
    max_response_bytes: int
    half_sent: HalfSentMessages

    async def handler(self, details: CallDetails) -> Any:
        """Returns the handler of a method, wrapped by the interceptors; None if there is none."""
        ...


class ServerCall:
    """A call: `run` is its task. Its stream tells it what arrives and when it ends."""

    def __init__(self, stream: CallStream, head: RequestHead, handlers: Handlers) -> None:
        self._stream, self._head, self._handlers = stream, head, handlers
        self._reader: MessageReader | None = MessageReader(self._take, handlers.max_message_bytes, head.encoding)
        self._requests: deque[tuple[bytes, bool]] = deque()
        self._unread_bytes = self._num_taken = self._half_sent = 0
        self._requests_ended = False
        self._arrived: asyncio.Future[None] | None = None
        self._room: asyncio.Future[None] | None = None
        self._decode: Any = None
        self._encode: Any = None
        self._reads_many = self._writes_many = True
        self._begun = self._finished = self._cancelled = False
        self._code: Any = grpc.StatusCode.OK
        self._details = ""
        self._trailing: Metadata = ()
        self._callbacks: list[Callable[[Any], None]] = []
        self._deadline = None if head.timeout_s is None else asyncio.get_running_loop().time() + head.timeout_s
        self._timer: asyncio.TimerHandle | None = None
        self._task: asyncio.Task[None] | None = None

    def start(self, task: asyncio.Task[None]) -> None:
        """Names the task that runs the call."""
        self._task = task
        if self._deadline is not None:
            self._timer = asyncio.get_running_loop().call_at(self._deadline, self._late)

    # Called by the stream.

    def receive(self, payload: bytes) -> None:
        """Takes a part of the request's messages."""
        reader = self._reader
        if self._finished or reader is None:
            return
        try:
            reader.feed(payload)
        except MessageError as error:
            self.end(error.code, str(error))
            return
        if reader.num_left != self._half_sent:
            self._half_sent = reader.num_left
            self._handlers.half_sent.hold(self, self._half_sent)
        self._credit()

    def _read_no_more(self) -> None:
        self._reader = None
        if self._half_sent:
            self._half_sent = 0
            self._handlers.half_sent.hold(self, 0)

    def half_closed(self) -> None:
        """Called when the client sends no more."""
        self._requests_ended = True
        if self._half_sent:
            self.end(grpc.StatusCode.INTERNAL, "the request ends within a message")
        self._wake(self._arrived)

    def cancel(self) -> None:
        """Ends the call: the client, or its connection, is gone."""
        if not self._finished:
            self._finished = self._cancelled = True
            self._read_no_more()
            self._requests.clear()
            self._no_timer()
            self._stop()

    def _no_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def sent(self) -> None:
        """Called when the client took some of what was kept for it."""
        if self._stream.unsent_bytes <= MAX_UNSENT_BYTES:
            self._wake(self._room)

    def _take(self, message: bytes, compressed: bool) -> None:
        if self._num_taken and not self._reads_many:
            return
        self._requests.append((message, compressed))
        self._num_taken += 1
        self._unread_bytes += len(message) + _MESSAGE_BYTES
        self._wake(self._arrived)

    def _late(self) -> None:
        self.end(grpc.StatusCode.DEADLINE_EXCEEDED, "the deadline of the call is over")

    def end(self, code: grpc.StatusCode, details: str) -> None:
        """Ends the call with a status now, and its handler. What the client has not taken is dropped."""
        if not self._finished:
            self._stream.abandon()
            self.finish(code, details)
            self._read_no_more()
            self._requests.clear()
            self._no_timer()
            self._stop()

    def _stop(self) -> None:
        if self._task is not None and not self._task.done():
            self._task.cancel()

    # The work.

    async def run(self) -> None:
        """Runs the handler and ends the call with its status."""
        try:
            handler = await self._handlers.handler(CallDetails(self._head.method, self._head.invocation_metadata))
            if handler is None:
                self.finish(grpc.StatusCode.UNIMPLEMENTED, "Method not found!")
            else:
                await self._serve(handler)
                self.finish(self._code, self._details, self._trailing)
        except grpc.aio.AbortError:
            self.finish(self._code, self._details, self._trailing)
        except asyncio.CancelledError:
            self.finish(grpc.StatusCode.CANCELLED, "the server cancelled the call")
            raise
        except Exception as error:
            log.exception("call failed", method=self._head.method)
            self.finish(grpc.StatusCode.UNKNOWN, f"Unexpected {type(error)}: {error}")
        finally:
            self._no_timer()
            for callback in self._callbacks:
                callback(self)
            # Each of these knows the call: without them it is freed at once, with its request, and not at the next collection.
            self._read_no_more()
            self._task = None
            self._callbacks = []

    async def _serve(self, handler: Any) -> None:
        behavior: Behavior = handler.unary_unary or handler.unary_stream or handler.stream_unary or handler.stream_stream
        self._decode, self._encode = handler.request_deserializer, handler.response_serializer
        self._reads_many, self._writes_many = handler.request_streaming, handler.response_streaming
        request = self._iterate() if self._reads_many else await self._only_request()
        answer = behavior(request, self)
        if inspect.isasyncgen(answer):
            async with aclosing(answer) as responses:
                async for response in responses:
                    await self.write(response)
            return
        response = await answer
        if not self._writes_many:
            await self.write(response)

    async def _only_request(self) -> Any:
        request = await self._next()
        if request is None:
            await self.abort(grpc.StatusCode.INTERNAL, "the request has no message")
        return self._decoded(request or b"")

    async def _iterate(self) -> AsyncIterator[Any]:
        while (request := await self._next()) is not None:
            yield self._decoded(request)

    async def _next(self) -> bytes | None:
        """Returns the next request's bytes; None after the last."""
        while not self._requests:
            if self._requests_ended:
                return None
            self._arrived = asyncio.get_running_loop().create_future()
            await self._arrived
        request, compressed = self._requests.popleft()
        self._unread_bytes -= len(request) + _MESSAGE_BYTES
        self._credit()
        if compressed:
            try:
                return uncompressed(request, self._head.encoding, self._handlers.max_message_bytes)
            except MessageError as error:
                await self.abort(error.code, str(error))
        return request

    def _credit(self) -> None:
        """A call that reads one message needs no more when it has that."""
        if self._unread_bytes <= MAX_UNREAD_BYTES if self._reads_many else not self._num_taken:
            self._stream.credit()

    def _decoded(self, request: bytes) -> Any:
        return request if self._decode is None else self._decode(request)

    def finish(self, code: Any, details: str, trailing: Metadata = ()) -> None:
        """Ends the call with a status. Only the first one counts."""
        if not self._finished:
            self._finished = True
            if not isinstance(code, grpc.StatusCode):
                code = _CODES.get(code, grpc.StatusCode.UNKNOWN)
            block = trailers(code, details, trailing)
            self._stream.finish(block if self._begun else response_head() + block)

    @staticmethod
    def _wake(waiting: asyncio.Future[None] | None) -> None:
        if waiting is not None and not waiting.done():
            waiting.set_result(None)

    # The interface of `grpc.aio.ServicerContext`.

    async def write(self, response: Any) -> None:
        """Sends a response. Waits while the client does not take what was written before."""
        data = response if self._encode is None else self._encode(response)
        if len(data) > self._handlers.max_response_bytes:
            most = self._handlers.max_response_bytes
            await self.abort(grpc.StatusCode.RESOURCE_EXHAUSTED, f"a response of {len(data)} bytes, at most {most} are sent")
        self._begin()
        if self._finished:
            raise asyncio.CancelledError
        self._stream.send(prefixed(data))
        while self._stream.unsent_bytes > MAX_UNSENT_BYTES and not self._finished:
            self._room = asyncio.get_running_loop().create_future()
            await self._room

    async def read(self) -> Any:
        """Returns the next request of a stream, or `grpc.aio.EOF`."""
        request = await self._next()
        return grpc.aio.EOF if request is None else self._decoded(request)

    def _begin(self, metadata: Metadata = ()) -> None:
        if not self._begun and not self._finished:
            self._begun = True
            self._stream.begin(response_head(metadata))

    async def send_initial_metadata(self, metadata: Sequence[tuple[str, str | bytes]]) -> None:
        self._begin(tuple(metadata))

    async def abort(self, code: Any, details: str = "", trailing_metadata: Sequence[tuple[str, str | bytes]] = ()) -> None:
        """Ends the call. Raises `grpc.aio.AbortError`."""
        self._code, self._details = code, details
        self._trailing = tuple((str(key), value) for key, value in trailing_metadata) or self._trailing
        raise grpc.aio.AbortError("aborted")

    async def abort_with_status(self, status: Any) -> None:
        await self.abort(status.code, status.details, status.trailing_metadata or ())

    def invocation_metadata(self) -> Metadata:
        return self._head.invocation_metadata

    def peer(self) -> str:
        return self._stream.peer

    def auth_context(self) -> dict[str, Any]:
        return self._stream.auth

    def time_remaining(self) -> float | None:
        return None if self._deadline is None else max(0.0, self._deadline - asyncio.get_running_loop().time())

    def cancelled(self) -> bool:
        return self._cancelled

    def done(self) -> bool:
        return self._finished

    def add_done_callback(self, callback: Callable[[Any], None]) -> None:
        self._callbacks.append(callback)

    def set_code(self, code: Any) -> None:
        self._code = code

    def code(self) -> Any:
        return self._code

    def set_details(self, details: str) -> None:
        self._details = details

    def details(self) -> str:
        return self._details

    def set_trailing_metadata(self, metadata: Sequence[tuple[str, str | bytes]]) -> None:
        self._trailing = tuple((str(key), value) for key, value in metadata)

    def trailing_metadata(self) -> Metadata:
        return self._trailing


_CODES = {each.value[0]: each for each in grpc.StatusCode}
