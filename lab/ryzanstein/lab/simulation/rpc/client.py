"""The client's side: the channels that replace those of `grpc.aio`, and their calls."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterable, AsyncIterator, Sequence
from typing import Any

import grpc

from ryzanstein.lab.simulation.machine.network import SimulatedConnection, SimulatedNetwork
from ryzanstein.lab.simulation.rpc.flow import EOF, WINDOW_BYTES, Metadata, SimulatedStream, Window, process, rewritten
from ryzanstein.lab.simulation.rpc.server import CallDetails, ServerCall, ServerSession


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
            if response is not EOF:
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
        if response is EOF:
            self._raise()
            return grpc.aio.EOF
        return response

    async def write(self, request: Any) -> None:
        """Sends a request when there is room. Raises InvalidStateError if the call has ended."""
        data = self._encode(rewritten(self._channel.process, request))
        # A future that is done is not awaited: most messages are sent on calls that are open.
        server = self._opened.result() if self._opened.done() else await asyncio.shield(self._opened)
        if self._window.full:
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
        assert isinstance(server_end, ServerSession)
        left_s = None if self._deadline is None else self._deadline - asyncio.get_running_loop().time()
        details = CallDetails(self._method, self._metadata)
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
        self._responses.push(EOF)
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
