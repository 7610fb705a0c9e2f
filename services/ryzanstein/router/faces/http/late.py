"""Streams that begin late: what waits long for a node gets its headers, and then comments, before it has begun.

Until then an error has its own status, and a client may send the request again as it is.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Coroutine
from contextlib import AbstractContextManager
from typing import Any, TypeVar

import structlog
from starlette.responses import Response
from starlette.types import Message, Receive, Scope, Send

from ryzanstein.errors import RyzansteinError
from ryzanstein.router.faces.http.gate import ROUTER_STOPS, HttpLimits, call_of
from ryzanstein.router.faces.http.serving.presence import ClientLeft, write_may_wait
from ryzanstein.router.faces.http.stream import COMMENT, STREAM_HEADERS
from ryzanstein.router.faces.openai.answers.failures import CLIENT_CLOSED_REQUEST, HttpFailure, failure_from_exception

log = structlog.get_logger(__name__)
_Opened = TypeVar("_Opened")


async def begun(opening: Coroutine[Any, Any, Response], limits: HttpLimits, failed: Callable[[HttpFailure], bytes]) -> Response:
    """Returns the response, or after `max_opening_s` one that waits for it. `failed`: how a stream tells an error."""
    task = asyncio.create_task(opening)
    try:
        await asyncio.wait((task,), timeout=limits.max_opening_s)
    except BaseException:
        await _end(task)
        raise
    return task.result() if task.done() else LateResponse(task, limits.max_silence_s, failed)


async def within(context: AbstractContextManager[None], opening: Awaitable[_Opened]) -> _Opened:
    """Waits for it in a context, which names the client's fields in its errors however late they come."""
    with context:
        return await opening


class LateResponse(Response):
    """A stream whose response is still to come."""

    media_type = "text/event-stream"

    def __init__(self, task: asyncio.Task[Response], silence_s: float, failed: Callable[[HttpFailure], bytes]) -> None:
        super().__init__(headers=STREAM_HEADERS)
        del self.headers["content-length"]
        self._task, self._silence_s, self._failed = task, silence_s, failed

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async def rest(message: Message) -> None:
            if message["type"] != "http.response.start":
                await send(message)

        try:
            await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
            await self._wait(scope, send)
            await self._task.result()(scope, receive, rest)
        except ClientLeft:
            call_of(scope).code = CLIENT_CLOSED_REQUEST
        except Exception as error:
            if not self._task.done() or self._task.exception() is not error:
                raise
            await send({"type": "http.response.body", "body": self._error_bytes(scope, error), "more_body": False})
        finally:
            await _end(self._task)

    async def _wait(self, scope: Scope, send: Send) -> None:
        """Sends comments until the response has come."""
        try:
            while not self._task.done():
                await send({"type": "http.response.body", "body": COMMENT, "more_body": True})
                await asyncio.wait((self._task,), timeout=self._silence_s)
        except asyncio.CancelledError:  # the server stops
            if not write_may_wait(scope):
                await send({"type": "http.response.body", "body": self._error_bytes(scope, ROUTER_STOPS), "more_body": False})
            raise

    def _error_bytes(self, scope: Scope, error: Exception) -> bytes:
        if not isinstance(error, RyzansteinError):
            log.error("stream failed", exc_info=error)
        failure = failure_from_exception(error, call_of(scope).request_id)
        call_of(scope).code = failure.status
        return self._failed(failure)


async def _end(task: asyncio.Task[Response]) -> None:
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
