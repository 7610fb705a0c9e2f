"""Answers requests: submits a generation, then collects the whole answer or streams it.

A client that disconnects from a plain request, or before it has received the generation's id,
cannot come back: its generation is cancelled. A client that disconnects from a stream may come
back, see `attach`. So may a client with an Idempotency-Key, by sending its request again.
X-Cancel-On-Disconnect and X-Run-Detached change this, see `disconnect`.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Iterator, Mapping
from contextlib import aclosing, asynccontextmanager, contextmanager
from dataclasses import replace
from functools import partial
from typing import Any

from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from ryzanstein import errors
from ryzanstein.auth.caller import ANYONE, Caller
from ryzanstein.errors import RyzansteinError
from ryzanstein.generation.request import GenerationRequest
from ryzanstein.generation.tokens import Delta, GenerationEvent, Started
from ryzanstein.router.access.live import LiveCallers
from ryzanstein.router.core.core import Core
from ryzanstein.router.faces.answer import Answer, read_start
from ryzanstein.router.faces.disconnect import Departing, OnDisconnect, on_disconnect
from ryzanstein.router.faces.http.gate import HttpLimits, call_of
from ryzanstein.router.faces.http.merged import Merged, MergedWriter, merged
from ryzanstein.router.faces.http.serving.presence import ClientLeft, while_connected
from ryzanstein.router.faces.http.stream import ChunkWriter, EventStreamResponse
from ryzanstein.router.faces.openai.answers.alignment import aligned
from ryzanstein.router.faces.openai.answers.completions import completion_body, echoed_texts
from ryzanstein.router.faces.openai.answers.cursor import LAST_EVENT_ID, Cursor, cursor_of, generation_of
from ryzanstein.router.faces.openai.answers.dialect import (
    AnswerDialect,
    AnswerForm,
    ChatDialect,
    CompletionDialect,
    prompt_logprobs_body,
    usage_body,
)
from ryzanstein.router.faces.openai.answers.writing import OneByOne, written
from ryzanstein.router.faces.openai.requests.prompts import Completions


async def first_wanted(core: Core, generation_id: str, cursor: Cursor, tenant: str = "") -> dict[int, int]:
    """Returns the index of the first token wanted of each choice.

    Log probabilities are aligned with the text from its beginning, and calls are read from there.
    Such a stream therefore also reads the tokens that the reader has seen, for its `Pieces` alone.
    """
    seen = cursor.from_index
    if not any(seen.values()):
        return seen
    async with aclosing(core.follow(generation_id, seen, tenant=tenant)) as events:
        started = await read_start(events)  # checks the position
    if started.reply is not None:
        return {}
    async with aclosing(core.follow(generation_id, {}, tenant=tenant)) as events:
        async for event in events:
            if isinstance(event, Delta):
                return {} if event.tokens[0].logprobs is not None else seen
    return seen


NODE = "X-Ryzanstein-Node"
SHOW_NODES = "x-ryzanstein-show-nodes"
"""A client sends it with `true` to have `node` in the first chunk of each part that another node wrote."""

Events = AsyncGenerator[GenerationEvent, None]


class GenerationRoutes:
    """Serves generations of one core over HTTP."""

    def __init__(self, core: Core, limits: HttpLimits, live: LiveCallers) -> None:
        self._core = core
        self._limits = limits
        self._live = live

    async def answer(self, http: Request, request: GenerationRequest, dialect: AnswerDialect) -> Response:
        """Returns the complete answer as JSON. Raises ClientLeft when the client disconnects."""
        departing = Departing.of(request, on_disconnect(http.headers), can_return=False)
        generation_id = await departing.submit(self._core)
        async with self._noticing_departure(departing, generation_id):
            answer = await while_connected(http.receive, self._read(generation_id))
        content = await asyncio.to_thread(_content, answer, dialect) if answer.is_large else _content(answer, dialect)
        return Response(content, headers={NODE: answer.node_id}, media_type="application/json")

    async def complete(self, http: Request, asked: Completions) -> Response:
        """Returns the answers to all prompts as JSON. Raises as `answer` does."""
        choice = on_disconnect(http.headers)
        echoed = await echoed_texts(self._core, asked)
        running: dict[str, Departing] = {}
        try:
            await self._submit_all(asked, choice, running)
            answers = await while_connected(http.receive, self._read_all(list(running)))
        except BaseException:
            await self._leave_all(running)
            raise
        write = partial(completion_body, asked, answers, echoed)
        is_large = asked.echo or len(answers) > 1 or answers[0].is_large
        content = await asyncio.to_thread(write) if is_large else write()
        return Response(content, headers={NODE: answers[0].node_id}, media_type="application/json")

    async def stream_all(self, http: Request, asked: Completions, form: AnswerForm) -> Response:
        """Returns the answers to all prompts as events of one stream. Raises an error that comes before any of them."""
        if len(asked.requests) == 1 and not asked.echo:
            return await self.stream(http, asked.requests[0], form)
        choice = on_disconnect(http.headers)
        echoed = await echoed_texts(self._core, asked)
        running: dict[str, Departing] = {}
        try:
            await self._submit_all(asked, choice, running)
        except BaseException:
            await self._leave_all(running)
            raise
        follow = [self._core.follow(generation_id) for generation_id in running]
        events = merged(follow, partial(self._leave_all, running))
        try:
            first = await while_connected(http.receive, anext(events))
        except BaseException:
            await events.aclose()
            raise
        writer = MergedWriter(form, asked.num_returned, echoed, silent=asked.silent)
        return EventStreamResponse(_with_first(first, events), writer, call_of(http.scope), self._limits, {})

    async def stream(self, http: Request, request: GenerationRequest, form: AnswerForm) -> Response:
        """Returns the answer as events. Raises an error that comes before the first event.

        A request with a `Last-Event-ID` that names a generation goes on in that one.
        """
        position = http.headers.get(LAST_EVENT_ID, "")
        if generation_id := generation_of(position):
            return await self.attach(http, generation_id, position, kind=form.dialect.kind)
        request, choice = replace(request, answer_form=form.written), on_disconnect(http.headers)
        departing = Departing.of(request, choice, can_return=True)
        generation_id = await departing.submit(self._core)
        # Until the first event the client knows no id with which it could return.
        unknown = Departing.of(request, choice, can_return=False)
        async with self._noticing_departure(unknown, generation_id):
            response = await self._open(http, generation_id, Cursor(), lambda _: form)
        response.on_left = partial(departing.left, self._core, generation_id)
        return response

    async def attach(
        self, http: Request, response_id: str, position: str, include_usage: bool | None = None, kind: str = ""
    ) -> Response:
        """Returns the rest of a stream, from `position`, a `Last-Event-ID`, on.

        It is shown as the request asked for. `include_usage` None: also what is said of usage.

        Raises NOT_FOUND when the generation is unknown or its re-attach window is over, and
        INVALID_ARGUMENT for a position that it does not have, or an answer of another `kind`.
        """
        generation_id = bare_id(response_id)
        cursor = cursor_of(position, generation_id)
        form_of = partial(_form_of, response_id, include_usage, kind)
        return await self._open(http, generation_id, cursor, form_of, call_of(http.scope).caller)

    async def cancel(self, http: Request, response_id: str) -> Response:
        """Cancels a generation. Raises NOT_FOUND when it does not run."""
        await self._core.cancel(bare_id(response_id), tenant=call_of(http.scope).tenant)
        return JSONResponse({"id": response_id, "object": "generation", "status": "cancelled"})

    async def _open(
        self,
        http: Request,
        generation_id: str,
        cursor: Cursor,
        form_of: Callable[[Started], AnswerForm],
        reader: Caller = ANYONE,
    ) -> EventStreamResponse[GenerationEvent]:
        """Returns a stream of the generation, for a reader that came back; by default for who has just begun it."""
        with _naming_the_position():
            wanted = await while_connected(http.receive, first_wanted(self._core, generation_id, cursor, reader.tenant))
            following = self._core.follow(generation_id, wanted, tenant=reader.tenant)
            events: Events = self._live.while_in(reader, following)
            try:
                started = await while_connected(http.receive, read_start(events))
                form = form_of(started)
            except BaseException:
                await events.aclose()
                raise
        writer = ChunkWriter(started, form, cursor, show_nodes=http.headers.get(SHOW_NODES) == "true")
        headers = {NODE: started.node_id}
        return EventStreamResponse(events, writer, call_of(http.scope), self._limits, headers)

    async def _read_all(self, generation_ids: list[str]) -> list[Answer]:
        """Returns all answers. When one fails the others are read no more."""
        reading = [asyncio.create_task(self._read(generation_id)) for generation_id in generation_ids]
        try:
            return await asyncio.gather(*reading)
        finally:
            for task in reading:
                task.cancel()
            await asyncio.gather(*reading, return_exceptions=True)

    async def _read(self, generation_id: str) -> Answer:
        async with aclosing(self._core.follow(generation_id, whole=True)) as events:
            return await Answer.read(events)

    async def _submit_all(self, asked: Completions, choice: OnDisconnect, running: dict[str, Departing]) -> None:
        """Adds the generations of all prompts to `running`, by id. Those that began before an error are there too."""
        for request in asked.requests:
            departing = Departing.of(request, choice, can_return=False)
            running[await departing.submit(self._core)] = departing

    async def _leave_all(self, running: Mapping[str, Departing]) -> None:
        for generation_id, departing in running.items():
            await departing.left(self._core, generation_id)

    @asynccontextmanager
    async def _noticing_departure(self, departing: Departing, generation_id: str) -> AsyncIterator[None]:
        try:
            yield
        except ClientLeft:
            await departing.left(self._core, generation_id)
            raise


async def _with_first(first: Merged, events: AsyncGenerator[Merged, None]) -> AsyncGenerator[Merged, None]:
    async with aclosing(events):
        yield first
        async for event in events:
            yield event


def bare_id(response_id: str) -> str:
    """Returns the generation's id of the id that an answer had."""
    for dialect in (ChatDialect, CompletionDialect):
        response_id = response_id.removeprefix(dialect.id_prefix)
    return response_id


def _form_of(response_id: str, include_usage: bool | None, kind: str, started: Started) -> AnswerForm:
    form = AnswerForm.read(started.answer_form, response_id)
    if kind and form.dialect.kind != kind:
        raise errors.invalid(LAST_EVENT_ID, f"must be of a {kind} request's event, not of a {form.dialect.kind}'s")
    return form if include_usage is None else replace(form, usage=include_usage)


@contextmanager
def _naming_the_position() -> Iterator[None]:
    """Names the header, not the core's own argument, in the error for a position."""
    try:
        yield
    except RyzansteinError as error:
        if error.violations and error.violations[0].field == "from_index":
            raise errors.invalid(LAST_EVENT_ID, error.violations[0].description) from None
        raise


def _content(answer: Answer, dialect: AnswerDialect) -> bytes:
    body: dict[str, Any] = {
        "id": dialect.id_prefix + answer.started.generation_id,
        "object": dialect.object,
        "created": answer.started.created or int(time.time()),
        "model": answer.started.model,
        "system_fingerprint": None,
        "choices": OneByOne(_choice(answer, choice, dialect) for choice in sorted(answer.reasons)),
        "usage": usage_body(answer.usage),
    }
    if answer.prompt:
        body["prompt_logprobs"] = prompt_logprobs_body(answer.prompt)
    return written(body)


def _choice(answer: Answer, choice: int, dialect: AnswerDialect) -> dict[str, Any]:
    message = answer.message(choice)
    tokens = answer.tokens[choice]
    rows = aligned(tokens)[1] if tokens and tokens[0].logprobs is not None else None
    return dialect.answer(choice, message, rows, answer.reason(choice, message))
