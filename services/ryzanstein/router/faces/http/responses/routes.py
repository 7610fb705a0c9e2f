"""The routes of /v1/responses: create, retrieve, list its input, delete, cancel."""

from __future__ import annotations

import json
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from dataclasses import dataclass, replace
from functools import partial
from typing import Annotated, Any, Literal

import msgspec
from fastapi import FastAPI, Query, Request
from starlette.responses import JSONResponse, Response

from ryzanstein import errors
from ryzanstein.generation.prompts import Message
from ryzanstein.generation.request import NO_DEFAULTS, SamplingDefaults
from ryzanstein.generation.tokens import FinishReason, GenerationEvent
from ryzanstein.router.core.core import Core
from ryzanstein.router.faces.answer import read_start
from ryzanstein.router.faces.disconnect import Departing, on_disconnect
from ryzanstein.router.faces.http.bodies import BodyReader
from ryzanstein.router.faces.http.gate import HttpLimits, call_of
from ryzanstein.router.faces.http.generate import NODE
from ryzanstein.router.faces.http.late import begun, within
from ryzanstein.router.faces.http.responses.body import Asked, ResponsesRequest, asked, naming_fields, refers
from ryzanstein.router.faces.http.responses.events import ResponseEvents, ResponseWriter, error_of_stream
from ryzanstein.router.faces.http.responses.kept import KeptResponses
from ryzanstein.router.faces.http.responses.shapes import PREFIX, Shape
from ryzanstein.router.faces.http.serving.presence import ClientLeft, while_connected
from ryzanstein.router.faces.http.stream import EventStreamResponse
from ryzanstein.router.faces.openai.answers.types import CancelledWork, DeletedResponse, InputItemList, ResponseAnswer
from ryzanstein.router.faces.openai.openapi import described
from ryzanstein.router.faces.request_key import HEADER, key_of_header, keyed

MAX_PAGE = 100


@dataclass(frozen=True, slots=True)
class ListPage:
    """Which items of a list are wanted: so many behind the one with this id, the newest first or last."""

    after: str
    limit: int
    newest_first: bool

    def of(self, items: Sequence[Shape]) -> Shape:
        """Returns the page. Raises INVALID_ARGUMENT where no item has the id."""
        ordered = list(reversed(items)) if self.newest_first else list(items)
        ids = [item["id"] for item in ordered]
        if self.after and self.after not in ids:
            raise errors.invalid("after", "names no item of this response", self.after[:64])
        begin = ids.index(self.after) + 1 if self.after else 0
        form = ordered[begin : begin + self.limit]
        ends = {"first_id": form[0]["id"], "last_id": form[-1]["id"]} if form else {"first_id": None, "last_id": None}
        return {"object": "list", "data": form, **ends, "has_more": begin + self.limit < len(ordered)}


class ResponseRoutes:
    """Answers requests in the shape of the Responses API."""

    def __init__(self, core: Core, kept: KeptResponses, limits: HttpLimits) -> None:
        self._core = core
        self._kept = kept
        self._limits = limits

    async def create(self, http: Request, asked_for: Asked) -> Response:
        """Returns the response, or its events. A client that disconnects cancels it, unless it runs detached or has a key."""
        tenant, previous = call_of(http.scope).tenant, asked_for.body.previous_response_id
        history: tuple[Message, ...] = ()
        if previous:
            history = await self._kept.conversation(tenant, previous, "previous_response_id")
        kept = asked_for.stored or bool(previous)
        request = replace(asked_for.request, prompt=asked_for.with_history(history), kept=kept)
        # With its history: what it continues is a part of what a client repeats.
        request = keyed(request, key_of_header(http.headers.get(HEADER)), HEADER)
        departing = Departing.of(request, on_disconnect(http.headers), can_return=False)
        generation_id = await departing.submit(self._core)
        events = self._core.follow(generation_id)
        try:
            started = await while_connected(http.receive, read_start(events))
            writer = ResponseEvents(started, asked_for.body, self._defaults_of(started.model))
            keep = partial(self._keep, writer, asked_for, tenant, history)
            headers = {NODE: started.node_id}
            if asked_for.body.stream:
                response = EventStreamResponse(events, ResponseWriter(writer), call_of(http.scope), self._limits, headers)
                response.before_end = keep
                response.on_left = partial(departing.left, self._core, generation_id)
                return response
            await while_connected(http.receive, _drained(events, writer))
        except BaseException as error:
            await events.aclose()
            if isinstance(error, ClientLeft):
                await departing.left(self._core, generation_id)
            raise
        list(writer.end())
        await keep()
        return _json(writer.response, headers)

    async def with_items(self, http: Request, body: ResponsesRequest) -> ResponsesRequest:
        """Returns the body with the kept items that its input refers to. Raises NOT_FOUND naming one."""
        items = body.input if isinstance(body.input, list) else []
        if len(items) > self._limits.max_messages:
            return body  # which is refused for that
        return msgspec.structs.replace(body, input=await self._kept.with_items(call_of(http.scope).tenant, items))

    def _defaults_of(self, model: str) -> SamplingDefaults:
        return next((each.sampling_defaults for each in self._core.models() if each.name == model), NO_DEFAULTS)

    async def retrieve(self, tenant: str, response_id: str) -> Response:
        return _json(await self._kept.retrieve(tenant, response_id), {})

    async def input_items(self, tenant: str, response_id: str, page: ListPage) -> Response:
        """Returns a page of the items that a response answered. Raises INVALID_ARGUMENT for an item that is not there."""
        items = await self._kept.input_items(tenant, response_id)
        return _json(page.of(items), {})

    async def delete(self, tenant: str, response_id: str) -> Response:
        await self._kept.delete(tenant, response_id)
        return JSONResponse({"id": response_id, "object": "response", "deleted": True})

    async def cancel(self, tenant: str, response_id: str) -> Response:
        """Cancels a response that runs. Raises NOT_FOUND when it does not."""
        if not response_id.startswith(PREFIX):
            raise errors.not_found("response", response_id)
        await self._core.cancel(response_id.removeprefix(PREFIX), tenant=tenant)
        return JSONResponse({"id": response_id, "object": "response", "status": "cancelled"})

    async def _keep(self, writer: ResponseEvents, asked_for: Asked, tenant: str, history: tuple[Message, ...]) -> None:
        if not asked_for.stored or writer.reason in (None, FinishReason.CANCELLED):
            return
        await self._kept.keep(tenant, writer.response, (*asked_for.new_messages, writer.message), history)


async def _drained(events: AsyncGenerator[GenerationEvent, None], writer: ResponseEvents) -> None:
    async with aclosing(events):
        async for event in events:
            for _ in writer.of(event):
                pass


def _json(response: Shape, headers: dict[str, Any]) -> Response:
    content = json.dumps(response, ensure_ascii=False).encode("utf-8", "replace")
    return Response(content, headers=headers, media_type="application/json")


def add_response_routes(app: FastAPI, routes: ResponseRoutes, reader: BodyReader, limits: HttpLimits) -> None:
    decoder = msgspec.json.Decoder(ResponsesRequest)

    @app.post("/v1/responses", openapi_extra=described(ResponsesRequest, ResponseAnswer))
    async def create(http: Request) -> Response:
        origin = call_of(http.scope).origin

        def convert(body: ResponsesRequest) -> Asked:
            return asked(body, http.headers, origin, limits.max_messages)

        body, converted = await reader.read(http, decoder, lambda body: None if refers(body) else convert(body))
        asked_for = converted or convert(await routes.with_items(http, body))
        with naming_fields(asked_for.body):
            if asked_for.body.stream:
                opening = within(naming_fields(asked_for.body), routes.create(http, asked_for))
                return await begun(opening, limits, error_of_stream)
            return await routes.create(http, asked_for)

    @app.get("/v1/responses/{response_id}", openapi_extra=described(None, ResponseAnswer))
    async def retrieve(response_id: str, http: Request) -> Response:
        return await routes.retrieve(call_of(http.scope).tenant, response_id)

    @app.get("/v1/responses/{response_id}/input_items", openapi_extra=described(None, InputItemList))
    async def input_items(
        response_id: str,
        http: Request,
        after: str = "",
        limit: Annotated[int, Query(ge=1, le=MAX_PAGE)] = 20,
        order: Literal["asc", "desc"] = "desc",
    ) -> Response:
        return await routes.input_items(call_of(http.scope).tenant, response_id, ListPage(after, limit, order == "desc"))

    @app.delete("/v1/responses/{response_id}", openapi_extra=described(None, DeletedResponse))
    async def delete(response_id: str, http: Request) -> Response:
        return await routes.delete(call_of(http.scope).tenant, response_id)

    @app.post("/v1/responses/{response_id}/cancel", openapi_extra=described(None, CancelledWork))
    async def cancel(response_id: str, http: Request) -> Response:
        return await routes.cancel(call_of(http.scope).tenant, response_id)
