"""The server's side: the servers that replace those of `grpc.aio`, and their calls."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable, Sequence
from typing import Any

import grpc

from ryzanstein.lab.simulation.machine.network import SimulatedConnection, SimulatedNetwork
from ryzanstein.lab.simulation.rpc.flow import EOF, ClientEnd, Metadata, SimulatedStream, Window, process, rewritten


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
        self.sessions: dict[ServerSession, None] = {}
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
        connection.server_end = session = ServerSession(self, connection)
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


class ServerSession:
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


class CallDetails:
    """The equivalent of `grpc.HandlerCallDetails`."""

    def __init__(self, method: str, metadata: Metadata) -> None:
        self.method = method
        self.invocation_metadata = metadata


class ServerCall:
    """A call as its server sees it; also the servicer's context."""

    def __init__(
        self,
        client: ClientEnd,
        connection: SimulatedConnection,
        session: ServerSession,
        details: CallDetails,
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
            self._requests.push(EOF)

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
            self._requests.push(EOF)

    async def _serve(self, handler: Any) -> None:
        encode = handler.response_serializer
        behavior = handler.unary_unary or handler.unary_stream or handler.stream_unary or handler.stream_stream
        request = self._iterate() if handler.request_streaming else await self._requests.pop()
        if handler.response_streaming:
            sender = self.session.server.process
            async for response in behavior(request, self):
                data = encode(response if sender.rewrite is None else sender.rewrite(response))
                if self.window.full:
                    await self.window.wait()
                self._sent(data)
        else:
            await self._send(encode(rewritten(self.session.server.process, await behavior(request, self))))

    async def _send(self, data: bytes) -> None:
        if self.window.full:
            await self.window.wait()
        self._sent(data)

    def _sent(self, data: bytes) -> None:
        self.window.sent(len(data))
        self._connection.to_client.send(self._client.receive, data)

    async def _iterate(self) -> AsyncIterator[Any]:
        while (request := await self._requests.pop()) is not EOF:
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

    def auth_context(self) -> dict[str, Any]:
        return {}

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

    def trailing_metadata(self) -> Metadata:
        return self._trailing

    async def send_initial_metadata(self, metadata: Metadata) -> None:
        self._connection.to_client.send(self._client.begun, tuple(metadata))

    async def abort(self, code: grpc.StatusCode, details: str = "", trailing_metadata: Metadata = ()) -> None:
        self._code, self._text, self._trailing = code, details, tuple(trailing_metadata)
        raise grpc.aio.AbortError("aborted")

    async def abort_with_status(self, status: Any) -> None:
        await self.abort(status.code, status.details, status.trailing_metadata or ())
