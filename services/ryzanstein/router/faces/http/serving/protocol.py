"""uvicorn's HTTP/1.1 with bounds on what a connection may take.

The bounds are on the time and bytes for headers, on pipelined requests, on the chunks of a body,
and on the time to close. Input that is not HTTP gets an answer in OpenAI's form, is counted, and
ends its connection; nothing of it is logged. The gate bounds the time for a body, because it knows
when a request is served.
"""

from __future__ import annotations

import asyncio
from functools import partial
from typing import Any, cast

import httptools
from starlette.types import ASGIApp, Message, Receive, Scope, Send
from uvicorn.protocols.http.httptools_impl import STATUS_LINE, HttpToolsProtocol, RequestResponseCycle

from ryzanstein.router.faces.http.serving.connections import Connections
from ryzanstein.router.faces.http.serving.presence import tell_flow
from ryzanstein.router.faces.http.serving.upgrade import SocketUpgrades, UpgradeRequest
from ryzanstein.router.faces.openai.answers.failures import CONNECTIONS, MALFORMED, TIMEOUT, TOO_LARGE, HttpFailure, HttpRefused

_MAX_PIPELINED = 16
_MAX_CHUNKS = 65_536
_LINGER_S = 5.0  # for the rest of a refused body, so that the client can read the reason
_GOODBYE_S = 1.0  # for a refused client to read its answer

_NOT_HTTP = HttpFailure(400, "not an HTTP/1.1 request", None, "invalid_http")
_NO_HOST = HttpFailure(400, "a request must have one Host header", "Host", "invalid_http")
_BUSY = HttpFailure(503, "too many connections", None, "too_many_connections", {"Retry-After": "1"})


class BoundedProtocol(HttpToolsProtocol):
    """One client connection."""

    def __init__(self, connections: Connections, upgrades: SocketUpgrades | None = None, **uvicorns: Any) -> None:
        super().__init__(**uvicorns)
        self._upgrades = upgrades
        self._upgrading = False
        self._counted = connections
        self._bounds = connections.bounds
        self._refusal: HttpRefused | None = None
        self._timer: asyncio.TimerHandle | None = None
        # `self.cycle` is the request that arrived last: the running one, or the last in the queue.
        self._running: RequestResponseCycle | None = None
        self._in_head = self._in_body = self._over = False
        self._began = False
        self._head_bytes = self._pending_bytes = self._read_bytes = self._num_chunks = 0

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        if self._counted.opened(transport):
            self._wait_for_head()
            return
        self.connections.discard(self)
        self._over = True
        self._counted.on_refused(CONNECTIONS)
        self._say_goodbye()

    def connection_lost(self, exc: Exception | None) -> None:
        self._stop_waiting()
        self._unset_keepalive_if_required()
        self._counted.closed(self.transport)
        super().connection_lost(exc)
        self._disconnect()

    def data_received(self, data: bytes) -> None:
        if self._over:
            return
        self._unset_keepalive_if_required()
        self._counted.busy(self.transport)
        if self._free and not self._in_body and self._timer is None:
            self._wait_for_head()
        self._began, self._read_bytes = True, len(data)
        try:
            self.parser.feed_data(data)
        except httptools.HttpParserUpgrade as upgrade:
            if self._upgrading:
                self._hand_over(data[upgrade.args[0] :])
            return  # another upgrade: the request is answered as plain HTTP/1.1
        except httptools.HttpParserError:
            self._end(self._refusal or HttpRefused(_NOT_HTTP, MALFORMED))
            return
        if self._in_head:
            self._pending_bytes += len(data)
            if self._pending_bytes > self._bounds.max_head_bytes:
                self._end(self._head_too_large())

    def on_message_begin(self) -> None:
        if len(self.pipeline) >= _MAX_PIPELINED:
            self._refuse(HttpRefused(_NOT_HTTP, MALFORMED))
        if self._timer is None:
            self._wait_for_head()
        self._in_head, self._upgrading = True, False
        self._head_bytes = self._num_chunks = 0
        # Bytes that were read with the end of the previous message do not count here; complete
        # header fields are counted in `_count_head`.
        self._pending_bytes = -self._read_bytes
        super().on_message_begin()
        tell_flow(cast(Scope, self.scope), self.flow)

    def on_url(self, url: bytes) -> None:
        self._count_head(len(url))
        super().on_url(url)

    def on_header(self, name: bytes, value: bytes) -> None:
        self._count_head(len(name) + len(value) + 4)
        if len(self.headers) >= self._bounds.max_headers:
            self._refuse(self._head_too_large())
        super().on_header(name, value)

    def on_headers_complete(self) -> None:
        num_hosts = sum(name == b"host" for name, _ in self.headers)
        if num_hosts > 1 or (num_hosts == 0 and self.parser.get_http_version() != "1.0"):
            self._refuse(HttpRefused(_NO_HOST, MALFORMED))  # RFC 9112, 3.2
        self._in_head, self._in_body = False, True
        self._stop_waiting()
        self._upgrading = self.parser.should_upgrade() and self._takes_upgrade()
        super().on_headers_complete()

    def on_chunk_header(self) -> None:
        self._num_chunks += 1
        if self._num_chunks > _MAX_CHUNKS:
            self._refuse(
                HttpRefused(HttpFailure(413, f"the body exceeds {_MAX_CHUNKS} chunks", "body", "body_too_large"), TOO_LARGE)
            )

    def on_message_complete(self) -> None:
        self._in_body = False
        super().on_message_complete()
        if not self._upgrading and self.cycle.response_complete:
            self._rest()

    def on_response_complete(self) -> None:
        super().on_response_complete()
        if self.transport.is_closing() or not self.cycle.response_complete:
            return
        if self._in_body:
            self._unset_keepalive_if_required()
            self._stop_waiting()
            self._timer = self.loop.call_later(_LINGER_S, self.transport.close)
        else:
            self._rest()

    def _should_upgrade(self) -> bool:
        """Overrides uvicorn's: only what `_takes_upgrade` takes is no plain request."""
        return self._upgrading

    def _takes_upgrade(self) -> bool:
        """Returns whether the request asks for what `upgrades` serves, and nothing is answered before it."""
        return (
            self._upgrades is not None
            and self._get_upgrade() == b"websocket"
            and self.url.partition(b"?")[0] == self._upgrades.path.encode()
            and self.parser.get_method() == b"GET"
            and self._free
            and not self.pipeline
        )

    def _hand_over(self, rest: bytes) -> None:
        """Passes the connection to another protocol, with what has arrived for it already."""
        assert self._upgrades is not None
        self._stop_waiting()
        fields = [(name.decode("latin-1"), value.decode("latin-1")) for name, value in self.headers]
        closed = partial(self._counted.closed, self.transport)
        request = UpgradeRequest(self.url.decode("latin-1"), fields, self.transport, self.server_state, closed)
        try:
            protocol = self._upgrades.upgraded(request)
        except HttpRefused as refused:
            self._end(refused)
            return
        self._over = True
        self.connections.discard(self)
        self.transport.set_protocol(protocol)
        protocol.connection_made(self.transport)
        if rest:
            protocol.data_received(rest)

    def _start_asgi_task(self, cycle: RequestResponseCycle, app: Any) -> None:
        self._running = cycle
        super()._start_asgi_task(cycle, _until_close(cycle, app) if cycle.scope["http_version"] == "1.0" else app)

    @property
    def _free(self) -> bool:
        """True while no request of this connection is being answered."""
        return self.cycle is None or self.cycle.response_complete

    def _rest(self) -> None:
        """Marks the connection as idle between two requests, and starts its keep-alive time."""
        if self._in_head:
            return
        self._stop_waiting()
        self._began = False
        self._unset_keepalive_if_required()
        self.timeout_keep_alive_task = self.loop.call_later(self.timeout_keep_alive, self.timeout_keep_alive_handler)
        self._counted.idle(self.transport)

    def _wait_for_head(self) -> None:
        self._timer = self.loop.call_later(self._bounds.header_timeout_s, self._on_head_timeout)

    def _stop_waiting(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _on_head_timeout(self) -> None:
        self._timer = None
        if not self._free:
            # No further request on this connection, but the answer in progress is completed.
            self.cycle.keep_alive = False
            self.flow.pause_reading()
            return
        if not self._began:
            self.transport.close()
            return
        message = f"the headers were not complete within {self._bounds.header_timeout_s:g} s"
        self._end(HttpRefused(HttpFailure(408, message, None, "request_timeout"), TIMEOUT))

    def _count_head(self, num_bytes: int) -> None:
        self._head_bytes += num_bytes
        if self._head_bytes > self._bounds.max_head_bytes:
            self._refuse(self._head_too_large())

    def _head_too_large(self) -> HttpRefused:
        message = f"the headers must have at most {self._bounds.max_head_bytes} bytes and {self._bounds.max_headers} fields"
        return HttpRefused(HttpFailure(431, message, "headers", "headers_too_large"), TOO_LARGE)

    def _refuse(self, refusal: HttpRefused) -> None:
        """Raises out of the parser, which stops where it is."""
        self._refusal = refusal
        raise refusal

    def _end(self, refusal: HttpRefused) -> None:
        """Answers if no answer is in progress, and closes the connection."""
        self._over = True
        self._stop_waiting()
        self._counted.on_refused(refusal.reason)
        if self._free or not (self.cycle.response_started or self.pipeline):
            self.transport.write(whole_answer(refusal.failure))
        self._disconnect()
        self.transport.close()

    def _disconnect(self) -> None:
        """Notifies the running request and those queued behind it that the client disconnected.

        uvicorn notifies only the request that arrived last.
        """
        running = () if self._running is None else (self._running,)
        for cycle in (*running, *(cycle for cycle, _ in self.pipeline)):
            cycle.disconnected = True
            cycle.message_event.set()

    def _say_goodbye(self) -> None:
        """Refuses a connection that there is no room for.

        It gets an answer unless too many are being answered already.
        """
        if not self._counted.may_answer(self.transport):
            self.transport.abort()
            return
        self.transport.write(whole_answer(_BUSY))
        if self.transport.can_write_eof():
            self.transport.write_eof()
        else:
            self.transport.close()  # with TLS
        self._timer = self.loop.call_later(_GOODBYE_S, self.transport.abort)


def _until_close(cycle: RequestResponseCycle, app: ASGIApp) -> Any:
    """Returns the application for a client of HTTP/1.0, which knows no chunks: a stream ends with its connection."""

    async def answered(scope: Scope, receive: Receive, send: Send) -> None:
        async def framed(message: Message) -> None:
            if message["type"] == "http.response.start":
                if not any(name.lower() == b"content-length" for name, _ in message["headers"]):
                    cycle.chunked_encoding, cycle.keep_alive = False, False
                    framed_by_close.append(True)
            elif framed_by_close:
                cycle.expected_content_length = len(message.get("body", b""))  # no more, and no less
            await send(message)

        framed_by_close: list[bool] = []
        await app(scope, receive, framed)

    return answered


def whole_answer(failure: HttpFailure) -> bytes:
    """Returns a whole response, after which the connection closes."""
    response = failure.response()
    fields = [*response.raw_headers, (b"connection", b"close")]
    head = b"".join(name + b": " + value + b"\r\n" for name, value in fields)
    return STATUS_LINE[failure.status] + head + b"\r\n" + bytes(response.body)
