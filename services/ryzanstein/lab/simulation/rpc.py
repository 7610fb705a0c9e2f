"""gRPC over the simulated network: replacements for `grpc.aio`'s channels and servers.

The generated stubs and servicers are the real ones, and every message is serialized and parsed. The
interface is what the services use of grpc.aio: calls that are read, written, awaited and cancelled,
deadlines, metadata, rich statuses, interceptors, graceful stops. Flow control is a window of bytes
per direction that the reader has not yet read.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections import deque
from collections.abc import AsyncIterable, AsyncIterator, Callable, Sequence
from typing import Any

import grpc

from ryzanstein.lab.simulation.loop import OWNER
from ryzanstein.lab.simulation.network import SimulatedConnection, SimulatedNetwork
from ryzanstein.lab.simulation.process import Process

WINDOW_BYTES = 4 * 2**20
_EOF = object()

Metadata = tuple[tuple[str, str | bytes], ...]


def process() -> Process:
    """Returns the process whose code runs."""
    owner = OWNER.get()
    assert isinstance(owner, Process), "a call from outside of a simulated process"
    return owner


def rewritten(sender: Process, message: Any) -> Any:
    """Returns the message as a service of the sender's version would send it."""
    return sender.rewrite(message) if sender.rewrite is not None else message


class SimulatedStream:
    """Messages that arrived on one side of a call and were not read yet."""

    def __init__(self) -> None:
        self._messages: deque[Any] = deque()
        self._waiter: asyncio.Future[None] | None = None
        self.unread_bytes = 0
        self.on_read: Callable[[], None] = lambda: None

    def push(self, message: Any, size: int = 0) -> None:
        self._messages.append((message, size))
        self.unread_bytes += size
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    async def pop(self) -> Any:
        while not self._messages:
            self._waiter = asyncio.get_running_loop().create_future()
            await self._waiter
        message, size = self._messages.popleft()
        if message is _EOF:
            self._messages.append((message, 0))  # for further reads
        self.unread_bytes -= size
        if size:
            self.on_read()
        return message


class Window:
    """Limits how many bytes may be unread by a reader."""

    def __init__(self) -> None:
        self._unread = 0
        self._room: asyncio.Future[None] | None = None

    async def wait(self) -> None:
        while self._unread >= WINDOW_BYTES:
            self._room = asyncio.get_running_loop().create_future()
            await self._room

    def sent(self, size: int) -> None:
        self._unread += size

    def read(self, size: int) -> None:
        self._unread -= size
        if self._room is not None and not self._room.done():
            self._room.set_result(None)


class Channel:
    """A client's channel: one connection at a time, opened when needed."""

    def __init__(self, network: SimulatedNetwork, address: str, options: Sequence[tuple[str, Any]]) -> None:
        self.process = process()
        self._network = network
        self._address = address
        self._attempts = _attempts(options)
        self._connection: SimulatedConnection | None = None
        self._connecting: list[asyncio.Future[SimulatedConnection | None]] = []
        self._calls: dict[ClientCall, None] = {}
        self._closed = False

    async def __aenter__(self) -> Channel:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    async def close(self, grace: float | None = None) -> None:
        self._closed = True
        for call in list(self._calls):
            call.cancel()
        if self._connection is not None:
            self._connection.end_of(self.process, silently=False)
            self._connection = None

    def unary_unary(self, method: str, request_serializer: Any, response_deserializer: Any, **_: Any) -> Any:
        return _Method(self, method, (request_serializer, response_deserializer), streams_in=False, streams_out=False)

    def unary_stream(self, method: str, request_serializer: Any, response_deserializer: Any, **_: Any) -> Any:
        return _Method(self, method, (request_serializer, response_deserializer), streams_in=False, streams_out=True)

    def stream_unary(self, method: str, request_serializer: Any, response_deserializer: Any, **_: Any) -> Any:
        return _Method(self, method, (request_serializer, response_deserializer), streams_in=True, streams_out=False)

    def stream_stream(self, method: str, request_serializer: Any, response_deserializer: Any, **_: Any) -> Any:
        return _Method(self, method, (request_serializer, response_deserializer), streams_in=True, streams_out=True)

    def connection_lost(self, why: str) -> None:
        """Implements `network.End`."""
        self._connection = None
        for call in list(self._calls):
            call.finish(grpc.StatusCode.UNAVAILABLE, why)

    async def connection(self) -> SimulatedConnection | None:
        """Returns the open connection or a new one; None if there is no server.

        It retries according to the channel's retry policy.
        """
        for attempt in range(self._attempts):
            if attempt:
                await asyncio.sleep(0.05 * 2**attempt)
            if self._closed:
                return None
            if (connection := await self._connect()) is not None:
                return connection
        return None

    async def _connect(self) -> SimulatedConnection | None:
        if self._connection is not None and self._connection.alive:
            return self._connection
        waiter: asyncio.Future[SimulatedConnection | None] = asyncio.get_running_loop().create_future()
        self._connecting.append(waiter)
        if len(self._connecting) == 1:
            self._network.connect(self.process, self._address, self, self._connected)
        return await waiter

    def _connected(self, connection: SimulatedConnection | None) -> None:
        waiting, self._connecting = self._connecting, []
        if self._closed and connection is not None:
            connection.end_of(self.process, silently=False)
            connection = None
        self._connection = connection
        for waiter in waiting:
            if not waiter.done():
                waiter.set_result(connection)

    def opened(self, call: ClientCall) -> None:
        self._calls[call] = None

    def ended(self, call: ClientCall) -> None:
        self._calls.pop(call, None)


def _attempts(options: Sequence[tuple[str, Any]]) -> int:
    config = dict(options).get("grpc.service_config")
    return int(json.loads(config)["methodConfig"][0]["retryPolicy"]["maxAttempts"]) if config else 1


class _Method:
    """A method of a stub."""

    def __init__(self, channel: Channel, method: str, codec: tuple[Any, Any], *, streams_in: bool, streams_out: bool) -> None:
        self._channel, self._method, self._codec = channel, method, codec
        self._streams_in, self._streams_out = streams_in, streams_out

    def __call__(self, request: Any = None, *, timeout: float | None = None, metadata: Any = None, **_: Any) -> ClientCall:
        requests = request if self._streams_in else _once(request)
        return ClientCall(
            self._channel,
            self._method,
            self._codec,
            requests,
            timeout=timeout,
            metadata=tuple((str(key), value) for key, value in metadata or ()),
            unary=not self._streams_out,
        )


async def _once(request: Any) -> AsyncIterator[Any]:
    yield request


class ClientCall:
    """A call as its client sees it: awaitable (unary), iterable, or read and written explicitly."""

    def __init__(
        self,
        channel: Channel,
        method: str,
        codec: tuple[Any, Any],
        requests: AsyncIterable[Any] | None,
        *,
        timeout: float | None,
        metadata: Metadata,
        unary: bool,
    ) -> None:
        loop = asyncio.get_running_loop()
        self._channel, self._method, self._unary = channel, method, unary
        self._encode, self._decode = codec
        self._responses = SimulatedStream()
        self._responses.on_read = self._on_read
        self._window = Window()
        self._initial: asyncio.Future[Metadata] = loop.create_future()
        self._opened: asyncio.Future[ServerCall | None] = loop.create_future()
        self._status: tuple[grpc.StatusCode, str, Metadata] | None = None
        self._server: ServerCall | None = None
        self._connection: SimulatedConnection | None = None
        self._metadata = metadata
        self._deadline = None if timeout is None else loop.time() + timeout
        self._timer = None if timeout is None else loop.call_later(max(0.0, timeout), self._late)
        self._read_bytes = 0
        self._cancelled = False
        channel.opened(self)
        self._opening = loop.create_task(self._open())
        self._writing = None if requests is None else loop.create_task(self._write_all(requests))

    def __await__(self) -> Any:
        return self._response().__await__()

    async def _response(self) -> Any:
        try:
            response = await self._responses.pop()
            if response is not _EOF:
                await self._responses.pop()
        except asyncio.CancelledError:
            self.cancel()
            raise
        self._raise()
        return response

    def __aiter__(self) -> AsyncIterator[Any]:
        return self._iterate()

    async def _iterate(self) -> AsyncIterator[Any]:
        while (response := await self.read()) is not grpc.aio.EOF:
            yield response

    async def read(self) -> Any:
        """Returns the next response, or grpc.aio.EOF after the last.

        Raises AioRpcError if the call failed.

        Cancellation cancels the call.
        """
        try:
            response = await self._responses.pop()
        except asyncio.CancelledError:
            self.cancel()
            raise
        if response is _EOF:
            self._raise()
            return grpc.aio.EOF
        return response

    async def write(self, request: Any) -> None:
        """Sends a request when there is room. Raises InvalidStateError if the call has ended."""
        data = self._encode(rewritten(self._channel.process, request))
        server = await asyncio.shield(self._opened)
        await self._window.wait()
        if server is None or self._status is not None or self._connection is None:
            if self._status is not None and self._status[0] is not grpc.StatusCode.OK:
                self._raise()
            raise asyncio.InvalidStateError("the call has ended")
        self._window.sent(len(data))
        self._connection.to_server.send(server.receive, data)

    async def done_writing(self) -> None:
        server = await asyncio.shield(self._opened)
        if server is not None and self._status is None and self._connection is not None:
            self._connection.to_server.send(server.half_closed)

    async def initial_metadata(self) -> Metadata:
        return await asyncio.shield(self._initial)

    async def trailing_metadata(self) -> Metadata:
        return () if self._status is None else self._status[2]

    async def code(self) -> grpc.StatusCode:
        await self._responses.pop()
        assert self._status is not None
        return self._status[0]

    def done(self) -> bool:
        return self._status is not None

    def cancelled(self) -> bool:
        return self._cancelled

    def cancel(self) -> bool:
        if self._status is not None:
            return False
        self._cancelled = True
        self._cancel_server()
        self.finish(grpc.StatusCode.CANCELLED, "Locally cancelled by application!")
        return True

    def _cancel_server(self) -> None:
        if self._server is not None and self._connection is not None and self._connection.alive:
            self._connection.to_server.send(self._server.cancel)

    def _late(self) -> None:
        if self._status is None:
            self._cancel_server()
            self.finish(grpc.StatusCode.DEADLINE_EXCEEDED, "Deadline Exceeded")

    async def _open(self) -> None:
        connection = await self._channel.connection()
        if self._status is not None:
            return
        if connection is None:
            self.finish(grpc.StatusCode.UNAVAILABLE, "failed to connect to all addresses")
            return
        self._connection = connection
        server_end = connection.server_end
        assert isinstance(server_end, _Session)
        left_s = None if self._deadline is None else self._deadline - asyncio.get_running_loop().time()
        details = _Details(self._method, self._metadata)
        self._server = ServerCall(self, connection, server_end, details, left_s)
        connection.to_server.send(self._server.begin)
        self._opened.set_result(self._server)

    async def _write_all(self, requests: AsyncIterable[Any]) -> None:
        try:
            async for request in requests:
                await self.write(request)
            await self.done_writing()
        except (asyncio.InvalidStateError, grpc.aio.AioRpcError):
            return
        except asyncio.CancelledError:
            raise
        except Exception:
            # grpc.aio does the same with an iterator that raises.
            self.cancel()

    def _on_read(self) -> None:
        if self._server is not None:
            self._server.window.read(self._read_bytes - self._responses.unread_bytes)
        self._read_bytes = self._responses.unread_bytes

    # Called by the server.

    def receive(self, data: bytes) -> None:
        if self._status is None:
            self._responses.push(self._decode(data), len(data))
            self._read_bytes = self._responses.unread_bytes
            self.begun(())

    def begun(self, metadata: Metadata) -> None:
        if not self._initial.done():
            self._initial.set_result(metadata)

    def written(self, size: int) -> None:
        self._window.read(size)

    def finish(self, code: grpc.StatusCode, details: str = "", trailing: Metadata = ()) -> None:
        """Ends the call with a status. Only the first one counts."""
        if self._status is not None:
            return
        self._status = (code, details, trailing)
        if self._timer is not None:
            self._timer.cancel()
        if not self._opened.done():
            self._opened.set_result(None)
        self.begun(())
        self._window.read(WINDOW_BYTES)
        self._responses.push(_EOF)
        if self._server is not None:
            self._server.window.read(0)
        if self._writing is not None:
            self._writing.cancel()
        if code is not grpc.StatusCode.OK:
            self._opening.cancel()
        self._channel.ended(self)

    def _raise(self) -> None:
        assert self._status is not None
        code, details, trailing = self._status
        if self._cancelled:
            raise asyncio.CancelledError
        if code is not grpc.StatusCode.OK:
            metadata = grpc.aio.Metadata.from_tuple(trailing)
            raise grpc.aio.AioRpcError(code, grpc.aio.Metadata(), metadata, details)


class Server:
    """The result of `grpc.aio.server`."""

    def __init__(self, network: SimulatedNetwork, interceptors: Sequence[Any]) -> None:
        self.process = process()
        self._network = network
        self._interceptors = interceptors
        self._handlers: dict[str, Any] = {}
        self._generic: list[Any] = []
        self._address = ""
        self._port = 0
        self._listening = False
        self.sessions: dict[_Session, None] = {}
        self.calls: dict[ServerCall, None] = {}
        self._idle = asyncio.Event()
        self._idle.set()

    def begun(self, call: ServerCall) -> None:
        self.calls[call] = None
        self._idle.clear()

    def over(self, call: ServerCall) -> None:
        self.calls.pop(call, None)
        if not self.calls:
            self._idle.set()

    def add_generic_rpc_handlers(self, handlers: Sequence[Any]) -> None:
        self._generic.extend(handlers)

    def add_registered_method_handlers(self, service: str, handlers: dict[str, Any]) -> None:
        self._handlers.update({f"/{service}/{method}": handler for method, handler in handlers.items()})

    def add_insecure_port(self, address: str) -> int:
        self._address = address
        self._network.listen(address, self)
        return int(address.rpartition(":")[2])

    async def start(self) -> None:
        self._listening = True

    async def stop(self, grace: float | None) -> None:
        """Stops taking new calls at once; running ones have `grace` seconds."""
        self._listening = False
        self._network.close(self._address, self)
        loop = asyncio.get_running_loop()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout_at(loop.time() + (grace or 0.0)):
                await self._idle.wait()
        for call in list(self.calls):
            call.cancel()
        await asyncio.sleep(0)
        for session in list(self.sessions):
            session.close()

    def accept(self, connection: SimulatedConnection) -> None:
        """Implements `network.Listener`."""
        connection.server_end = session = _Session(self, connection)
        self.sessions[session] = None

    async def handler(self, details: Any) -> Any:
        """Returns the handler of a method, wrapped by the interceptors, or None if unknown."""

        async def find(details: Any) -> Any:
            if (handler := self._handlers.get(details.method)) is not None:
                return handler
            found = (generic.service(details) for generic in self._generic)
            return next((handler for handler in found if handler is not None), None)

        continuation: Callable[[Any], Any] = find
        for interceptor in reversed(self._interceptors):
            continuation = _intercepted(interceptor, continuation)
        return await continuation(details)

    @property
    def takes_calls(self) -> bool:
        return self._listening


def _intercepted(interceptor: Any, continuation: Callable[[Any], Any]) -> Callable[[Any], Any]:
    async def intercept(details: Any) -> Any:
        return await interceptor.intercept_service(continuation, details)

    return intercept


class _Session:
    """The server's end of a connection."""

    def __init__(self, server: Server, connection: SimulatedConnection) -> None:
        self.server = server
        self.connection = connection

    def connection_lost(self, why: str) -> None:
        """Implements `network.End`."""
        self.server.sessions.pop(self, None)
        for call in [call for call in self.server.calls if call.session is self]:
            call.cancel()

    def close(self) -> None:
        self.server.sessions.pop(self, None)
        if self.connection.alive:
            self.connection.end_of(self.server.process, silently=False)


class _Details:
    """The equivalent of `grpc.HandlerCallDetails`."""

    def __init__(self, method: str, metadata: Metadata) -> None:
        self.method = method
        self.invocation_metadata = metadata


class ServerCall:
    """A call as its server sees it; also the servicer's context."""

    def __init__(
        self,
        client: ClientCall,
        connection: SimulatedConnection,
        session: _Session,
        details: _Details,
        left_s: float | None,
    ) -> None:
        self.session = session
        self.window = Window()
        self._client, self._connection = client, connection
        self._details = details
        self._left_s = left_s
        self._deadline: float | None = None
        self._requests = SimulatedStream()
        self._requests.on_read = self._on_read
        self._unread = 0
        self._task: asyncio.Task[None] | None = None
        self._decode: Any = None
        self._raw: list[bytes] = []
        self._raw_ended = False
        self._code = grpc.StatusCode.OK
        self._text = ""
        self._trailing: Metadata = ()
        self._callbacks: list[Any] = []
        self._ended = False

    # Called by the client, in the server's process.

    def begin(self) -> None:
        server, loop = self.session.server, asyncio.get_running_loop()
        if not server.takes_calls or not self._connection.alive:
            self._connection.to_client.send(self._client.finish, grpc.StatusCode.UNAVAILABLE, "the server stops")
            return
        if self._left_s is not None:
            self._deadline = loop.time() + self._left_s
            loop.call_later(max(0.0, self._left_s), self.cancel)
        server.begun(self)
        self._task = loop.create_task(self._run())
        self._task.add_done_callback(self._over)

    def receive(self, data: bytes) -> None:
        if self._decode is None:
            self._raw.append(data)
        else:
            self._requests.push(self._decode(data), len(data))
            self._unread = self._requests.unread_bytes

    def half_closed(self) -> None:
        if self._decode is None:
            self._raw_ended = True
        else:
            self._requests.push(_EOF)

    def cancel(self) -> None:
        if self._task is not None and not self._task.done():
            self._task.cancel()

    async def _run(self) -> None:
        handler = await self.session.server.handler(self._details)
        if handler is None:
            self._finish(grpc.StatusCode.UNIMPLEMENTED, "Method not found!")
            return
        self._accept_requests(handler.request_deserializer)
        try:
            await self._serve(handler)
        except grpc.aio.AbortError:
            pass
        except asyncio.CancelledError:
            self._ended = True
            raise
        except Exception as error:
            self._code, self._text = grpc.StatusCode.UNKNOWN, f"Unexpected {type(error)}: {error}"
        self._finish(self._code, self._text, self._trailing)

    def _accept_requests(self, decode: Any) -> None:
        self._decode = decode
        raw, self._raw = self._raw, []
        for data in raw:
            self.receive(data)
        if self._raw_ended:
            self._requests.push(_EOF)

    async def _serve(self, handler: Any) -> None:
        encode = handler.response_serializer
        behavior = handler.unary_unary or handler.unary_stream or handler.stream_unary or handler.stream_stream
        request = self._iterate() if handler.request_streaming else await self._requests.pop()
        if handler.response_streaming:
            async for response in behavior(request, self):
                await self._send(encode(rewritten(self.session.server.process, response)))
        else:
            await self._send(encode(rewritten(self.session.server.process, await behavior(request, self))))

    async def _send(self, data: bytes) -> None:
        await self.window.wait()
        self.window.sent(len(data))
        self._connection.to_client.send(self._client.receive, data)

    async def _iterate(self) -> AsyncIterator[Any]:
        while (request := await self._requests.pop()) is not _EOF:
            yield request

    def _on_read(self) -> None:
        self._client.written(self._unread - self._requests.unread_bytes)
        self._unread = self._requests.unread_bytes

    def _finish(self, code: grpc.StatusCode, text: str, trailing: Metadata = ()) -> None:
        self._ended = True
        if self._connection.alive:
            self._connection.to_client.send(self._client.finish, code, text, trailing)

    def _over(self, task: asyncio.Task[None]) -> None:
        self.session.server.over(self)
        if not task.cancelled():
            task.exception()
        elif self._connection.alive:
            self._connection.to_client.send(self._client.finish, grpc.StatusCode.CANCELLED, "cancelled by the server")
        for callback in self._callbacks:
            callback(self)

    # The interface of `grpc.aio.ServicerContext`.

    def invocation_metadata(self) -> Metadata:
        return self._details.invocation_metadata

    def peer(self) -> str:
        return f"ipv4:{self._connection.client.machine.name}"

    def time_remaining(self) -> float | None:
        return None if self._deadline is None else max(0.0, self._deadline - asyncio.get_running_loop().time())

    def cancelled(self) -> bool:
        return self._task is not None and self._task.cancelled()

    def done(self) -> bool:
        return self._ended

    def add_done_callback(self, callback: Any) -> None:
        self._callbacks.append(callback)

    def set_code(self, code: grpc.StatusCode) -> None:
        self._code = code

    def set_details(self, details: str) -> None:
        self._text = details

    def set_trailing_metadata(self, metadata: Metadata) -> None:
        self._trailing = tuple(metadata)

    async def send_initial_metadata(self, metadata: Metadata) -> None:
        self._connection.to_client.send(self._client.begun, tuple(metadata))

    async def abort(self, code: grpc.StatusCode, details: str = "", trailing_metadata: Metadata = ()) -> None:
        self._code, self._text, self._trailing = code, details, tuple(trailing_metadata)
        raise grpc.aio.AbortError("aborted")

    async def abort_with_status(self, status: Any) -> None:
        await self.abort(status.code, status.details, status.trailing_metadata or ())


def install(network: SimulatedNetwork) -> None:
    """Makes `grpc.aio` create simulated channels and servers from now on."""
    aio: Any = grpc.aio
    aio.insecure_channel = lambda address, options=(), **_: Channel(network, address, options or ())
    aio.server = lambda interceptors=(), options=(), **_: Server(network, interceptors or ())
