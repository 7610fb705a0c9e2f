"""A generation as server-sent events (WHATWG HTML, 9.2), in OpenAI's chunks.

Each event has an `id:`, see `cursor`, so that a client can resume where its connection broke.
`data: [DONE]` ends a complete stream. A failed stream ends with an `error` event instead, whose
data is an OpenAI error body.
"""

from __future__ import annotations

import asyncio
import json
import time
from collections import defaultdict, deque
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable
from contextlib import aclosing
from typing import Any

import structlog
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from ryzanstein import errors
from ryzanstein.errors import RyzansteinError
from ryzanstein.generation import Delta, Finished, GenerationEvent, Started
from ryzanstein.router.faces.http.alignment import Alignment, LogprobRow
from ryzanstein.router.faces.http.cursor import Cursor
from ryzanstein.router.faces.http.dialect import Dialect, usage_body
from ryzanstein.router.faces.http.failures import CLIENT_CLOSED_REQUEST, HttpFailure, failure_from_error
from ryzanstein.router.faces.http.gate import HttpCall
from ryzanstein.router.faces.http.presence import ClientLeft, while_connected

log = structlog.get_logger(__name__)

DONE = b"data: [DONE]\n\n"


class ChunkWriter:
    """Converts events to the bytes of server-sent events. Each reader has its own."""

    def __init__(self, started: Started, dialect: Dialect, cursor: Cursor, include_usage: bool) -> None:
        self._dialect = dialect
        self._cursor = cursor
        self._seen = cursor.from_index
        self._alignments: defaultdict[int, Alignment] = defaultdict(Alignment)
        self._usage: dict[str, Any] | None = None
        self._include_usage = include_usage
        self._envelope = {
            "id": dialect.id_prefix + started.generation_id,
            "object": dialect.chunk_object,
            "created": int(time.time()),
            "model": started.model,
            "system_fingerprint": None,
        } | ({"usage": None} if include_usage else {})

    def write(self, event: GenerationEvent) -> bytes:
        """Returns the bytes of an event; empty for tokens whose text is not certain yet."""
        match event:
            case Delta():
                return self._opening(event.choice) + self._delta(event)
            case Finished():
                return self._opening(event.choice) + self._ending(event)
            case _:
                return b""

    def close(self) -> bytes:
        """Returns the end of a complete stream."""
        if not self._include_usage or self._usage is None:
            return DONE
        return self._event({"choices": [], "usage": self._usage}) + DONE

    def _opening(self, choice: int) -> bytes:
        if self._cursor.began(choice):
            return b""
        self._cursor.begin(choice)
        opening = self._dialect.opening(choice)
        return self._event({"choices": [opening]}) if opening is not None else b""

    def _delta(self, delta: Delta) -> bytes:
        if delta.tokens[0].logprobs is not None:
            return self._with_logprobs(delta)
        self._cursor.advance(delta.choice, delta.first_index + len(delta.tokens))
        return self._piece(delta.choice, delta.text, [])

    def _with_logprobs(self, delta: Delta) -> bytes:
        """Returns the bytes of a Delta with log probabilities.

        Tokens that the reader has seen only prepare the alignment of later ones.
        """
        alignment = self._alignments[delta.choice]
        num_seen = max(0, self._seen.get(delta.choice, 0) - delta.first_index)
        for token in delta.tokens[:num_seen]:
            deque(alignment.push(token), maxlen=0)
        tokens = delta.tokens[num_seen:]
        if not tokens:
            return b""
        self._cursor.advance(delta.choice, delta.first_index + len(delta.tokens))
        return self._piece(delta.choice, "".join(t.text for t in tokens), [row for t in tokens for row in alignment.push(t)])

    def _piece(self, choice: int, text: str, rows: list[LogprobRow]) -> bytes:
        return self._event({"choices": [self._dialect.delta(choice, text, rows)]}) if text or rows else b""

    def _ending(self, finished: Finished) -> bytes:
        self._usage = usage_body(finished.usage)
        if self._cursor.ended(finished.choice):
            return b""
        self._cursor.end(finished.choice)
        rows = list(self._alignments.pop(finished.choice, Alignment()).end())
        return self._event({"choices": [self._dialect.ending(finished.choice, finished.reason, rows)]})

    def _event(self, fields: dict[str, Any]) -> bytes:
        data = json.dumps(self._envelope | fields, separators=(",", ":"))
        return f"id: {self._cursor}\ndata: {data}\n\n".encode()


def error_event(failure: HttpFailure) -> bytes:
    return f"event: error\ndata: {json.dumps(failure.body)}\n\n".encode()


class EventStreamResponse(Response):
    """A response that writes `events`, whose first was already read, and closes them.

    It closes them also when the client disconnects.
    """

    media_type = "text/event-stream"

    def __init__(
        self,
        events: AsyncGenerator[GenerationEvent, None],
        writer: ChunkWriter,
        call: HttpCall,
        write_timeout_s: float,
        headers: dict[str, str],
    ) -> None:
        # Otherwise proxies such as nginx collect events before they forward them.
        super().__init__(headers={**headers, "Cache-Control": "no-cache", "X-Accel-Buffering": "no"})
        del self.headers["content-length"]
        self._events = events
        self._writer = writer
        self._call = call
        self._write_timeout_s = write_timeout_s
        self.on_left: Callable[[], Awaitable[None]] | None = None
        """Called when the client disconnects, or stops reading, before the end."""

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            async with aclosing(self._events):
                await while_connected(receive, self._send_all(send))
        except (ClientLeft, OSError):
            await self._left()
        except TimeoutError:
            log.warning("reader too slow, stream aborted", write_timeout_s=self._write_timeout_s)
            await self._left()
            raise

    async def _left(self) -> None:
        self._call.code = CLIENT_CLOSED_REQUEST
        if self.on_left is not None:
            await self.on_left()

    async def _send_all(self, send: Send) -> None:
        await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
        async for part in self._parts():
            async with asyncio.timeout(self._write_timeout_s):
                await send({"type": "http.response.body", "body": part, "more_body": True})
        await send({"type": "http.response.body", "body": b"", "more_body": False})

    async def _parts(self) -> AsyncIterator[bytes]:
        try:
            async for event in self._events:
                if part := self._writer.write(event):
                    yield part
            yield self._writer.close()
        except RyzansteinError as error:
            yield self._failed(error)
        except Exception:
            log.exception("stream failed")
            yield self._failed(errors.internal(f"internal error, request {self._call.request_id}"))

    def _failed(self, error: RyzansteinError) -> bytes:
        failure = failure_from_error(error)
        self._call.code = failure.status
        return error_event(failure)
