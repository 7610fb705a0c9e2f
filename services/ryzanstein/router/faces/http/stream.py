"""How chunks are framed: a generation as server-sent events (WHATWG HTML, 9.2).

`chunks` says what they say.

Each event has an `id:`, see `cursor`, so that a client can resume where its connection broke.
`data: [DONE]` ends a complete stream. A failed stream ends with an `error` event instead, whose
data is an OpenAI error body.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Iterator
from contextlib import aclosing
from types import MappingProxyType
from typing import Any, Generic, Protocol, TypeVar

import structlog
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from ryzanstein import errors
from ryzanstein.errors import RyzansteinError
from ryzanstein.generation.tokens import GenerationEvent, Started
from ryzanstein.router.faces.http.gate import HttpCall, HttpLimits
from ryzanstein.router.faces.http.serving.presence import ClientLeft, while_connected, write_may_wait
from ryzanstein.router.faces.openai.answers.chunks import Chunks, encoded
from ryzanstein.router.faces.openai.answers.cursor import Cursor, event_id
from ryzanstein.router.faces.openai.answers.dialect import AnswerForm
from ryzanstein.router.faces.openai.answers.failures import CLIENT_CLOSED_REQUEST, HttpFailure, failure_from_error

log = structlog.get_logger(__name__)

DONE = b"data: [DONE]\n\n"
STREAM_HEADERS = MappingProxyType({"Cache-Control": "no-cache", "X-Accel-Buffering": "no"})
"""The second is for proxies such as nginx, which otherwise collect events before they forward them."""
COMMENT = b": the answer goes on\n"
"""A line alone: with an empty one behind it openai's client takes it for an event without data."""
_STOPS = errors.unavailable("GENERATION_MOVED", "the router stops: attach again at another router", 1.0)
_Event_contra = TypeVar("_Event_contra", contravariant=True)
_Read = TypeVar("_Read")


class EventWriter(Protocol[_Event_contra]):
    """Converts the events of a generation, or of several, to the bytes of a stream."""

    def opening(self) -> bytes:
        """Returns what comes before all events."""
        ...

    def write(self, event: _Event_contra, /) -> bytes: ...

    def close(self) -> bytes:
        """Returns the end of a complete stream."""
        ...

    def failed(self, failure: HttpFailure) -> bytes:
        """Returns the end of a stream whose generation failed."""
        ...


class ChunkWriter:
    """Frames chunks as server-sent events. Each reader has its own."""

    def __init__(self, started: Started, form: AnswerForm, cursor: Cursor, *, show_nodes: bool = False) -> None:
        self._generation_id = started.generation_id
        self._chunks = Chunks(started, form.dialect, cursor, form.usage, continuous=form.continuous, show_nodes=show_nodes)

    def opening(self) -> bytes:
        return b""

    def failed(self, failure: HttpFailure) -> bytes:
        return error_event(failure)

    def write(self, event: GenerationEvent) -> bytes:
        """Returns the bytes of an event; empty for tokens whose text is not certain yet."""
        return self._framed(self._chunks.json_of(event))

    def close(self) -> bytes:
        """Returns the end of a complete stream."""
        return self._framed(map(encoded, self._chunks.last())) + DONE

    def _framed(self, chunks: Iterator[str]) -> bytes:
        # Chunk by chunk, because the id is the cursor as it stands after each of them.
        generation_id, cursor = self._generation_id, self._chunks.cursor
        return "".join([f"id: {event_id(generation_id, cursor)}\ndata: {chunk}\n\n" for chunk in chunks]).encode()


def _body(part: bytes) -> dict[str, Any]:
    return {"type": "http.response.body", "body": part, "more_body": True}


def error_event(failure: HttpFailure) -> bytes:
    return f"event: error\ndata: {json.dumps(failure.body)}\n\n".encode()


class EventStreamResponse(Response, Generic[_Read]):
    """A response that writes `events`, whose first was already read, and closes them.

    It closes them also when the client disconnects.
    """

    media_type = "text/event-stream"

    def __init__(
        self,
        events: AsyncGenerator[_Read, None],
        writer: EventWriter[_Read],
        call: HttpCall,
        limits: HttpLimits,
        headers: dict[str, str],
    ) -> None:
        super().__init__(headers={**headers, **STREAM_HEADERS})
        del self.headers["content-length"]
        self._events = events
        self._writer = writer
        self._call = call
        self._limits = limits
        self._sent_at = 0.0
        self.on_left: Callable[[], Awaitable[None]] | None = None
        """Called when the client disconnects, or stops reading, before the end."""
        self.before_end: Callable[[], Awaitable[None]] | None = None
        """Called when the generation is complete, before the client reads the end."""

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            async with aclosing(self._events):
                await while_connected(receive, self._send_all(scope, send))
        except (ClientLeft, OSError):
            await self._left()
        except TimeoutError:
            log.warning("reader too slow, stream aborted", write_timeout_s=self._limits.write_timeout_s)
            await self._left()
            raise

    async def _left(self) -> None:
        self._call.code = CLIENT_CLOSED_REQUEST
        if self.on_left is not None:
            await self.on_left()

    async def _send_all(self, scope: Scope, send: Send) -> None:
        await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
        now = asyncio.get_running_loop().time
        self._sent_at = now()
        commenting = asyncio.create_task(self._comment(scope, send))
        try:
            async for part in self._parts():
                self._sent_at = now()
                await self._send_part(scope, send, part)
        except asyncio.CancelledError:
            if not write_may_wait(scope):  # the server stops; of a client that left nobody reads it
                await send(_body(self._failed(_STOPS)))
            raise
        finally:
            commenting.cancel()
            await asyncio.gather(commenting, return_exceptions=True)
        await send({"type": "http.response.body", "body": b"", "more_body": False})

    async def _send_part(self, scope: Scope, send: Send, part: bytes) -> None:
        if write_may_wait(scope):
            async with asyncio.timeout(self._limits.write_timeout_s):
                await send(_body(part))
        else:  # a timer for each write costs as much as the JSON
            await send(_body(part))

    async def _comment(self, scope: Scope, send: Send) -> None:
        """Sends a comment whenever nothing was sent for `max_silence_s`. Runs until it is cancelled."""
        now, silence_s = asyncio.get_running_loop().time, self._limits.max_silence_s
        while True:
            if (left_s := self._sent_at + silence_s - now()) > 0:
                await asyncio.sleep(left_s)
                continue
            self._sent_at = now()
            if not write_may_wait(scope):
                await send(_body(COMMENT))

    async def _parts(self) -> AsyncIterator[bytes]:
        try:
            if opening := self._writer.opening():
                yield opening
            async for event in self._events:
                if part := self._writer.write(event):
                    yield part
            end = self._writer.close()
            if self.before_end is not None:
                await self.before_end()
            yield end
        except RyzansteinError as error:
            yield self._failed(error)
        except Exception:
            log.exception("stream failed")
            yield self._failed(errors.internal(f"internal error, request {self._call.request_id}"))

    def _failed(self, error: RyzansteinError) -> bytes:
        failure = failure_from_error(error)
        self._call.code = failure.status
        return self._writer.failed(failure)
