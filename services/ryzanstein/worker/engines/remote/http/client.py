"""The HTTP client of one inference server.

It connects to that server alone: no proxy of the environment, no redirect, no cookie, no compression. What comes back is
bounded before it is read.
"""

from __future__ import annotations

import asyncio
import ssl
from collections.abc import AsyncGenerator, AsyncIterator, Mapping
from contextlib import asynccontextmanager, suppress
from io import BytesIO
from types import SimpleNamespace

import aiohttp
import msgspec

from ryzanstein.worker.engines.remote.http.address import EngineAddress
from ryzanstein.worker.engines.remote.http.faults import (
    EngineBusy,
    EngineFault,
    EngineProtocolError,
    EngineRefused,
    EngineUnreachable,
    clean,
    fault_of,
    reported_text,
)
from ryzanstein.worker.engines.remote.http.sse import MAX_EVENT_BYTES, EventReader

_MAX_ANSWER_BYTES = 4 * 1024 * 1024
_MAX_ERROR_BYTES = 64 * 1024
_LONG_BYTES = 512 * 1024
_GET_S = 10.0
_KEPT_S = 3.0
"""Idle connections are kept shorter than servers keep them: uvicorn and llama.cpp close theirs after 5 seconds."""
_SPARE = 4
"""Connections beside those of streams, for health and questions."""
_STALE = 8
"""So many kept connections in a row may have been closed by the server; then something else is wrong."""
_SENT_NOTHING = (aiohttp.ServerDisconnectedError, aiohttp.ClientOSError)


class EngineClient:
    """One HTTP client of one server; connections are reused. It belongs to one event loop. Close it.

    `key` is sent as `Authorization: Bearer` and never shown. `most_streams` streams run at once; 0: any number. A connection
    may take `connect_s` seconds. A server may be silent for `silence_s`, and its answer begins within as much.
    """

    def __init__(
        self,
        address: EngineAddress,
        key: str = "",
        *,
        most_streams: int = 0,
        connect_s: float = 5.0,
        silence_s: float = 300.0,
        max_event_bytes: int = MAX_EVENT_BYTES,
    ) -> None:
        """Opens nothing yet. Raises ValueError for a key that no header can carry."""
        if not key.isascii() or not key.isprintable() or " " in key:
            raise ValueError("engine_key_file: the key must be printable ASCII without spaces")
        self.address, self._key = address, key
        self._headers = {"Accept-Encoding": "identity", "User-Agent": "ryzanstein", "Content-Type": "application/json"}
        if key:
            self._headers["Authorization"] = f"Bearer {key}"
        self._most_connections = most_streams + _SPARE if most_streams else 0
        self._connect_s, self._silence_s, self._most = connect_s, silence_s, max_event_bytes
        self._opened: aiohttp.ClientSession | None = None

    async def get(self, path: str) -> object:
        """Returns the JSON at a path. Raises EngineFault, within 10 seconds."""
        return await self._json("GET", path, None, _GET_S)

    async def post(
        self, path: str, body: Mapping[str, object], timeout_s: float = _GET_S, most_bytes: int = _MAX_ANSWER_BYTES
    ) -> object:
        """Returns the JSON of at most so many bytes that answers a request without a stream.

        Raises EngineFault, within `timeout_s`.
        """
        return await self._json("POST", path, body, timeout_s, most_bytes)

    async def stream(self, path: str, body: Mapping[str, object]) -> AsyncGenerator[bytes, None]:
        """Yields the data of each event. Raises EngineFault.

        Closing the iterator (`contextlib.aclosing`) closes the connection, at which the server ends its work.
        """
        async with self._answer("POST", path, body, self._limits(self._silence_s, None)) as response:
            if response.content_type != "text/event-stream":
                raise EngineProtocolError(
                    f"{self.address}{path} answered {clean(response.content_type)}, not a stream of events"
                )
            reader = EventReader(self._most)
            while chunk := await self._chunk(response):
                for event in reader.feed(chunk):
                    yield event

    async def healthy(self, timeout_s: float) -> None:
        """Returns if the server calls itself healthy. Raises EngineFault. It proves little: a hung engine says so too."""
        async with self._answer("GET", "/health", None, self._limits(timeout_s, timeout_s)) as response:
            await self._read(response, _MAX_ANSWER_BYTES)

    async def answers(self, timeout_s: float) -> None:
        """Returns if the server answers at all. Raises EngineUnreachable.

        Its health is not asked for: SGLang computes a token for that, which waits behind long prompts.
        """
        with suppress(EngineRefused, EngineBusy, EngineProtocolError):
            async with self._answer("GET", "/v1/models", None, self._limits(timeout_s, timeout_s)) as response:
                await self._read(response, _MAX_ANSWER_BYTES)

    async def close(self) -> None:
        """Closes all connections, and with them what the server still computes."""
        if self._opened is not None:
            await self._opened.close()

    async def _json(
        self,
        method: str,
        path: str,
        body: Mapping[str, object] | None,
        timeout_s: float,
        most_bytes: int = _MAX_ANSWER_BYTES,
    ) -> object:
        async with self._answer(method, path, body, self._limits(timeout_s, timeout_s)) as response:
            data = await self._read(response, most_bytes)
        try:
            return msgspec.json.decode(data)
        except (msgspec.DecodeError, UnicodeDecodeError):
            raise EngineProtocolError(f"{self.address}{path} answered no JSON: {clean(data)}") from None

    @asynccontextmanager
    async def _answer(
        self, method: str, path: str, body: Mapping[str, object] | None, limits: aiohttp.ClientTimeout
    ) -> AsyncIterator[aiohttp.ClientResponse]:
        """A response of status 200. The connection is kept if the response was read to its end, and closed otherwise."""
        data = None if body is None else msgspec.json.encode(body)
        response = await self._begun(method, path, data, limits)
        try:
            if response.status != 200:
                raise await self._fault(response, path)
            yield response
        finally:
            if response.content.at_eof():
                response.release()
            else:
                response.close()

    async def _begun(
        self, method: str, path: str, data: bytes | None, limits: aiohttp.ClientTimeout, *, again: int = _STALE
    ) -> aiohttp.ClientResponse:
        """Sends a request. One that met a kept connection that the server had just closed is sent again."""
        seen = SimpleNamespace(reused=False)
        try:
            # A head that comes byte by byte is never silent.
            async with asyncio.timeout(limits.sock_read):
                return await self._session().request(
                    method,
                    self.address.url(path),
                    data=_payload(data),
                    timeout=limits,
                    allow_redirects=False,
                    trace_request_ctx=seen,
                )
        except (aiohttp.ClientError, OSError, TimeoutError) as error:
            if not (again and seen.reused and isinstance(error, _SENT_NOTHING)):
                raise self._named(error) from error
        return await self._begun(method, path, data, limits, again=again - 1)

    async def _chunk(self, response: aiohttp.ClientResponse) -> bytes:
        """Returns what has come, at least one byte; empty: the answer is complete."""
        try:
            return await response.content.readany()
        except (aiohttp.ClientError, OSError, TimeoutError) as error:
            raise self._named(error) from error

    async def _read(self, response: aiohttp.ClientResponse, most: int) -> bytes:
        data = bytearray()
        while chunk := await self._chunk(response):
            data += chunk
            if len(data) > most:
                raise EngineProtocolError(f"{self.address}{response.url.path} answered more than {most} bytes")
        return bytes(data)

    async def _fault(self, response: aiohttp.ClientResponse, path: str) -> EngineFault:
        text = b""
        with suppress(EngineFault):
            text = await self._read(response, _MAX_ERROR_BYTES)
        reason = self._without_key(reported_text(text) or clean(response.reason or ""))
        message = f"{self.address}{path} answered {response.status}: {reason}"
        return fault_of(response.status, message, _seconds(response.headers.get("Retry-After", "")))

    def _without_key(self, text: str) -> str:
        """Returns what a server says, also one that repeats what it was sent."""
        return text.replace(self._key, "***") if self._key else text

    def _named(self, error: Exception) -> EngineFault:
        """Returns the fault for an error of the transport."""
        if isinstance(error, TimeoutError):
            return EngineUnreachable(f"{self.address} did not answer in time: {clean(str(error)) or 'it is silent'}")
        if isinstance(error, (aiohttp.ClientPayloadError, aiohttp.ServerDisconnectedError)):
            return EngineUnreachable(f"{self.address} broke off its answer")
        if isinstance(error, aiohttp.ClientResponseError):
            return EngineProtocolError(f"{self.address} answered what is no HTTP: {clean(str(error))}")
        return EngineUnreachable(f"{self.address} cannot be reached: {clean(str(error)) or type(error).__name__}")

    def _limits(self, silence_s: float, total_s: float | None) -> aiohttp.ClientTimeout:
        return aiohttp.ClientTimeout(total=total_s, connect=self._connect_s, sock_read=silence_s)

    def _session(self) -> aiohttp.ClientSession:
        if self._opened is None:
            trace = aiohttp.TraceConfig()
            trace.on_connection_reuseconn.append(_note_reuse)
            self._opened = aiohttp.ClientSession(
                connector=self._connector(),
                headers=self._headers,
                cookie_jar=aiohttp.DummyCookieJar(),
                trust_env=False,
                auto_decompress=False,
                trace_configs=[trace],
            )
        return self._opened

    def _connector(self) -> aiohttp.BaseConnector:
        if self.address.socket:
            return aiohttp.UnixConnector(self.address.socket, limit=self._most_connections, keepalive_timeout=_KEPT_S)
        context: ssl.SSLContext | bool = ssl.create_default_context() if self.address.is_tls else True
        return aiohttp.TCPConnector(limit=self._most_connections, keepalive_timeout=_KEPT_S, ssl=context)


async def _note_reuse(_session: object, context: SimpleNamespace, _params: object) -> None:
    context.trace_request_ctx.reused = True


def _payload(data: bytes | None) -> bytes | BytesIO | None:
    """Returns the body. A long one is sent in pieces, between which others have their turn."""
    return data if data is None or len(data) < _LONG_BYTES else BytesIO(data)


def _seconds(text: str) -> float | None:
    """Returns the value of a Retry-After that is a number; a date is ignored."""
    return float(text) if text.isascii() and text.isdecimal() and len(text) < 7 else None
