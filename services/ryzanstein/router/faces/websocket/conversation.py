"""A socket's conversation: messages in, streams out, each stream on its own.

An error goes to the request that caused it. The socket itself is closed for what is wrong with
all of it: see `closes`.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Coroutine, Mapping
from dataclasses import replace
from typing import Any

import structlog
from opentelemetry.trace import SpanKind, Status, StatusCode
from structlog.contextvars import bound_contextvars

from ryzanstein import errors
from ryzanstein.auth.caller import Caller
from ryzanstein.observe.tracing import Tracing, traceparent
from ryzanstein.router.core.core import Core
from ryzanstein.router.faces.http.generate import bare_id
from ryzanstein.router.faces.openai.answers.cursor import Cursor
from ryzanstein.router.faces.openai.answers.failures import HttpRefused, failure_from_exception
from ryzanstein.router.faces.websocket.connection import WebSocketConnection
from ryzanstein.router.faces.websocket.frames import (
    Attach,
    Cancel,
    Cancelled,
    CreditFrame,
    Draining,
    ServerFrame,
    Submit,
    encoded,
    error_frame,
)
from ryzanstein.router.faces.websocket.limits import CloseCode, Credit, SocketLimits
from ryzanstein.router.faces.websocket.requests import SocketRequests
from ryzanstein.router.faces.websocket.stream import SocketStream, StreamEnd
from ryzanstein.router.faces.websocket.telemetry import SocketTelemetry

log = structlog.get_logger(__name__)

_RETRY_S = 0.1


class Conversation:
    """One socket. `run` it; its cancellation means that the router stops now."""

    def __init__(
        self,
        *,
        connection: WebSocketConnection,
        core: Core,
        requests: SocketRequests,
        limits: SocketLimits,
        headers: Mapping[str, str],
        caller: Caller,
        telemetry: SocketTelemetry,
        tracing: Tracing,
    ) -> None:
        self._connection = connection
        self._core = core
        self._requests = requests
        self._limits = limits
        self._headers = headers
        self._caller = caller
        self._telemetry, self._tracing = telemetry, tracing
        self._streams: dict[str, SocketStream] = {}
        self._tasks: dict[asyncio.Task[None], SocketStream | None] = {}
        self._draining = False
        self._mistakes = 0.0
        self._forgiven = time.monotonic()
        connection.busy = lambda: bool(self._tasks)
        connection.on_drain = self.drain

    async def run(self) -> None:
        """Answers messages until the socket closes. What it still streams then has no reader."""
        try:
            while (raw := await self._connection.next_message()) is not None:
                await self._answer(raw)
            await self._end(StreamEnd.LEFT)
        except asyncio.CancelledError:
            # Each client learns that it can read its generation elsewhere.
            await self._end(StreamEnd.STOPPED)
            self._connection.close(CloseCode.SERVICE_RESTART, "the router stops")
        except Exception:
            log.exception("socket failed")
            self._connection.close(CloseCode.INTERNAL_ERROR)
            await self._end(StreamEnd.LEFT)

    def drain(self) -> None:
        """Takes no new streams. The socket closes when the last stream has ended."""
        if not self._draining:
            self._draining = True
            self._write(Draining(round(_RETRY_S * 1000)))
            self._close_if_drained()

    async def _answer(self, raw: bytes) -> None:
        try:
            frame = await self._requests.frame(raw)
        except HttpRefused as refused:
            self._mistake(refused, raw)
            return
        match frame:
            case Submit():
                await self._begin(frame.id, frame.credit, lambda stream: self._submitted(frame, stream), frame.url)
            case Attach():
                await self._begin(frame.id, frame.credit, lambda stream: self._attached(frame, stream), "attach")
            case Cancel():
                self._cancel(frame)
            case CreditFrame():
                if (stream := self._streams.get(frame.id)) is not None:
                    stream.credit.give(frame.chunks)

    async def _begin(
        self,
        stream_id: str,
        credit: int | None,
        work: Callable[[SocketStream], Coroutine[Any, Any, None]],
        method: str,
    ) -> None:
        stream = SocketStream(
            stream_id=stream_id,
            credit=Credit(credit),
            connection=self._connection,
            core=self._core,
            limits=self._limits,
            unread=self._telemetry.unread.inc,
        )
        try:
            self._check_room(stream_id)
        except errors.RyzansteinError as error:
            self._refuse(error, stream_id, method)
            return
        self._streams[stream_id] = stream
        self._spawn(self._run(stream, work(stream), method), stream)
        await asyncio.sleep(0)  # many messages at once do not keep other sockets waiting

    def _check_room(self, stream_id: str) -> None:
        if self._draining:
            raise errors.unavailable("DRAINING", "the router stops: use another router", _RETRY_S)
        if stream_id in self._streams:
            raise errors.invalid("id", "is that of an open stream of this socket", stream_id)
        if len(self._tasks) >= self._limits.max_streams:
            raise errors.queue_full(len(self._tasks), self._limits.max_streams)

    def _refuse(self, error: Exception, stream_id: str, method: str) -> None:
        failure = failure_from_exception(error, "")
        # An open stream with this id goes on: an error that names it would be its end.
        self._write(error_frame(failure, None if stream_id in self._streams else stream_id))
        self._telemetry.ended(method, failure.status)

    async def _submitted(self, submit: Submit, stream: SocketStream) -> None:
        submission = await self._requests.submission(submit, self._headers, self._caller)
        stream.request_id = submission.request.request_id
        about = {"url.path": submit.url[:256], "network.protocol.name": "websocket"}
        span = self._tracing.start("SUBMIT", submission.request.traceparent, about, kind=SpanKind.SERVER)
        request = replace(submission.request, traceparent=traceparent(span, submission.request.traceparent))
        try:
            with bound_contextvars(request_id=request.request_id), submission.naming():
                await stream.submit(replace(submission, request=request))
        except errors.RyzansteinError as error:
            span.set_status(Status(StatusCode.ERROR, error.reason))
            raise
        finally:
            span.end()

    async def _attached(self, attach: Attach, stream: SocketStream) -> None:
        cursor = Cursor({**dict.fromkeys(attach.ended, 0), **attach.from_index}, set(attach.ended))
        await stream.attach(attach.generation, cursor, attach.include_usage, self._caller.tenant)

    async def _run(self, stream: SocketStream, work: Coroutine[Any, Any, None], method: str) -> None:
        """Runs a stream to its end, and tells its client how it failed."""
        code, began = 200, time.monotonic()
        try:
            await work
        except asyncio.CancelledError:
            code = self._fail(_end_of(stream), stream)
        except Exception as error:
            code = self._fail(error, stream)
        finally:
            self._streams.pop(stream.id, None)
            duration_s = time.monotonic() - began
            self._telemetry.ended(method, code, duration_s)
            log.info(
                "websocket stream",
                method=method[:64],
                code=code,
                generation=stream.generation,
                request_id=stream.request_id,
                duration_s=round(duration_s, 6),
            )

    def _fail(self, error: Exception, stream: SocketStream) -> int:
        if not isinstance(error, errors.RyzansteinError | HttpRefused):
            log.exception("stream failed", generation=stream.generation)
        failure = failure_from_exception(error, stream.request_id or stream.generation)
        self._write(error_frame(failure, stream.id, stream.generation or None))
        return failure.status

    def _cancel(self, frame: Cancel) -> None:
        """Cancels a generation: that of a stream of this socket, or any by its own id."""
        stream = self._streams.get(frame.id or "")
        if stream is not None and not stream.generation:
            # It is not admitted yet. Nothing begins, and its end says so.
            stream.end = StreamEnd.WITHDRAWN
            next(task for task, of in self._tasks.items() if of is stream).cancel()
            return
        generation = frame.generation if stream is None else stream.generation
        self._spawn(self._cancel_generation(frame, generation), None)

    async def _cancel_generation(self, frame: Cancel, generation: str | None) -> None:
        code = 200
        try:
            if (frame.id is None) is (frame.generation is None):
                raise errors.invalid("generation", "either id or generation must be given")
            if generation is None:
                raise errors.not_found("generation", frame.id or "")
            if len(self._tasks) > 2 * self._limits.max_streams:
                raise errors.queue_full(len(self._tasks), 2 * self._limits.max_streams)
            await self._core.cancel(bare_id(generation), tenant=self._caller.tenant)
            self._write(Cancelled(generation))
        except Exception as error:
            failure = failure_from_exception(error, "")
            code = failure.status
            self._write(error_frame(failure, None, generation))
        self._telemetry.ended("cancel", code)

    def _mistake(self, refused: HttpRefused, raw: bytes) -> None:
        """Answers a message that is no request. Who sends nothing else is closed."""
        now = time.monotonic()
        self._mistakes = max(0.0, self._mistakes - (now - self._forgiven)) + 1
        self._forgiven = now
        self._telemetry.malformed.labels(refused.reason).inc()
        self._write(error_frame(refused.failure, self._requests.id_of(raw)))
        if self._mistakes > self._limits.max_mistakes:
            self._connection.close(CloseCode.POLICY_VIOLATION, "too many messages that are no valid request")

    def _spawn(self, work: Coroutine[Any, Any, None], stream: SocketStream | None) -> None:
        task = self._telemetry.background.once("websocket_stream", work)
        self._tasks[task] = stream
        task.add_done_callback(self._ended)

    def _ended(self, task: asyncio.Task[None]) -> None:
        del self._tasks[task]
        self._connection.touch()
        self._close_if_drained()

    def _close_if_drained(self) -> None:
        if self._draining and not self._tasks:
            self._connection.close(CloseCode.SERVICE_RESTART, "the router stops")

    async def _end(self, why: StreamEnd) -> None:
        for task, stream in self._tasks.items():
            if stream is not None:
                stream.end = why
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    def _write(self, frame: ServerFrame) -> None:
        self._connection.write(encoded(frame))


def _end_of(stream: SocketStream) -> errors.RyzansteinError:
    if stream.end is StreamEnd.STOPPED:
        return errors.unavailable("GENERATION_MOVED", "the router stops: attach at another one", _RETRY_S)
    return errors.cancelled()
