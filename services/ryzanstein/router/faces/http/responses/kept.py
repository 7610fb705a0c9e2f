"""Responses that are kept: retrieved, continued by `previous_response_id`, and deleted.

The turn of a response is a session of its own, in the store of sessions: bounded, shared by the
routers of a cluster, and never changed, so that two responses may continue the same one. It names
the response that it continues, and the conversation is read by following these. (Versions up to
the one before this kept the whole conversation, which continues nothing.) Its id has a digest of the
tenant in it: what another tenant keeps is not found. The response itself is kept beside it, as the
only message of another session. Where that is gone, or a router of an early version kept the
response, it is rebuilt from its turn, without its usage.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from contextlib import suppress
from itertools import chain

import msgspec
import structlog
from prometheus_client import Counter

from ryzanstein import errors
from ryzanstein.auth.caller import tenant_digest
from ryzanstein.errors import Code, RyzansteinError
from ryzanstein.generation.prompts import Message, Role
from ryzanstein.generation.tokens import Started
from ryzanstein.router.faces.http.responses import shapes
from ryzanstein.router.faces.http.responses.body import ResponsesRequest
from ryzanstein.router.faces.http.responses.input_items import InputItem, items_spoken
from ryzanstein.router.faces.http.responses.items import items_of
from ryzanstein.router.faces.http.responses.shapes import PREFIX, Shape
from ryzanstein.router.sessions.store import OBJECT_MARK, Session, SessionStore
from ryzanstein.router.telemetry import RouterTelemetry

log = structlog.get_logger(__name__)

_MAX_ID_CHARS = 80
_ITEM = re.compile(r"(?:msg|rs|fc|fco)_([0-9A-Za-z-]+)(?:_(in)?[0-9]+)?")
MOST_TURNS = 4_096
"""Responses in a chain. The bounds on messages end a conversation long before, unless they are raised."""


class KeptResponses:
    """The responses of all tenants."""

    def __init__(self, sessions: SessionStore, telemetry: RouterTelemetry) -> None:
        self._sessions = sessions
        self._unstored = Counter(
            "ryzanstein_router_responses_unstored_total",
            "Responses of which a part was not stored, by part and cause",
            ("part", "cause"),
            registry=telemetry.registry,
        )

    async def keep(self, tenant: str, response: Shape, text: Sequence[Message], history: Sequence[Message] = ()) -> None:
        """Keeps a response: what was said in its turn, after the history of the response that it continues.

        A store that refuses or fails loses it, which is counted; the answer is not lost.
        """
        key, previous = _key(tenant, response["id"]), response.get("previous_response_id")
        parent = _key(tenant, previous) if previous else ""
        if await self._stored("conversation", key, response["model"], text, parent=parent, history=history):
            writer = (Message(Role.ASSISTANT, json.dumps(response)),)
            await self._stored("object", key + OBJECT_MARK, response["model"], writer)

    async def _stored(
        self, part: str, key: str, model: str, messages: Sequence[Message], *, parent: str = "", history: Sequence[Message] = ()
    ) -> bool:
        """Stores a part of a response; returns whether it is there now. A repeated request stores it again.

        Where the parent was deleted or evicted since its history was read, that is stored, too.
        """
        try:
            await self._sessions.create(key, model, messages, parent=parent)
        except RyzansteinError as error:
            if error.code is Code.ALREADY_EXISTS:
                return True
            if error.code is Code.NOT_FOUND and parent:
                return await self._stored(part, key, model, (*history, *messages))
            self._unstored.labels(part, error.reason.lower()).inc()
            log.warning("response not stored", part=part, reason=error.reason, message=error.message)
            return False
        return True

    async def conversation(self, tenant: str, response_id: str, field: str) -> tuple[Message, ...]:
        """Returns what was said until the end of a response.

        Raises NOT_FOUND naming the field, also when a response that it continues is not stored any
        more, and FAILED_PRECONDITION when there are too many of those.
        """
        session = await self._session(tenant, response_id, field)
        turns = [session.messages]
        while session.parent:
            if len(turns) == MOST_TURNS:
                raise errors.failed_precondition(
                    "SESSION_FULL", f"{field}: continues {MOST_TURNS} responses, the most there may be"
                )
            try:
                session = await self._sessions.get(session.parent)
            except RyzansteinError as error:
                raise _not_found(error, field, response_id, "continues a response that is not stored any more") from None
            turns.append(session.messages)
        return tuple(chain.from_iterable(reversed(turns)))

    async def _session(self, tenant: str, response_id: str, field: str) -> Session:
        """Returns the turn of a response that was not deleted."""
        try:
            session = await self._sessions.get(_key(tenant, response_id))
            if session.deleted:
                raise errors.not_found("response", response_id)
        except RyzansteinError as error:
            raise _not_found(error, field, response_id, "names no response") from None
        return session

    async def retrieve(self, tenant: str, response_id: str) -> Shape:
        """Returns a response. Raises NOT_FOUND, also when it was deleted or evicted."""
        messages = (await self._found(tenant, response_id)).messages
        if (kept := await self._object(_key(tenant, response_id))) is not None:
            return kept
        generation_id = response_id.removeprefix(PREFIX)
        writer = shapes.begun(Started(generation_id, "", "", 0), ResponsesRequest(input=""))
        return writer | {"status": "completed", "output": items_of(generation_id, messages[-1])}

    async def input_items(self, tenant: str, response_id: str) -> list[Shape]:
        """Returns what a response answered, oldest first, with what it continues. Raises NOT_FOUND."""
        await self._found(tenant, response_id)
        messages = await self.conversation(tenant, response_id, "response_id")
        return items_spoken(response_id.removeprefix(PREFIX), messages[:-1])

    async def with_items(self, tenant: str, given: Sequence[InputItem]) -> list[InputItem]:
        """Returns an input with the kept items that it refers to. Raises NOT_FOUND naming the field."""
        known: dict[str, InputItem] = {}
        for i, item in enumerate(given):
            if item.refers and (item.id or "") not in known:
                known |= await self._items_alongside(tenant, item.id or "", f"input[{i}].id")
        return [known[item.id or ""] if item.refers else item for item in given]

    async def _items_alongside(self, tenant: str, item_id: str, field: str) -> dict[str, InputItem]:
        """Returns by their ids the items of the response that has this one, or that it answered."""
        found = _ITEM.fullmatch(item_id)
        shapes: list[Shape] = []
        try:
            if found is not None and found[2]:
                shapes = await self.input_items(tenant, PREFIX + found[1])
            elif found is not None:
                shapes = (await self.retrieve(tenant, PREFIX + found[1]))["output"]
        except RyzansteinError as error:
            if error.code is not Code.NOT_FOUND:
                raise
        items = {shape["id"]: msgspec.convert(shape, InputItem) for shape in shapes}
        if item_id in items:
            return items
        message = f"{field}: no such item: {item_id[:64]!r}; send the item itself, or store its response"
        violation = errors.FieldViolation(field, "names no item of a stored response")
        raise RyzansteinError(message, Code.NOT_FOUND, "ITEM_NOT_FOUND", violations=(violation,))

    async def delete(self, tenant: str, response_id: str) -> None:
        """Forgets a response. Raises NOT_FOUND. Responses that continue it keep what was said, until the last one goes."""
        await self._found(tenant, response_id)
        key = _key(tenant, response_id)
        with suppress(RyzansteinError):  # without the conversation it is not found
            await self._sessions.delete(key + OBJECT_MARK)
        await self._sessions.delete(key)

    async def _object(self, key: str) -> Shape | None:
        try:
            (message,) = (await self._sessions.get(key + OBJECT_MARK)).messages
            found = json.loads(message.content)
        except (RyzansteinError, ValueError):
            return None
        return found if isinstance(found, dict) else None  # clients of earlier versions may have written into such a session

    async def _found(self, tenant: str, response_id: str) -> Session:
        try:
            session = await self._session(tenant, response_id, "response_id")
        except RyzansteinError as error:
            if error.reason != "RESPONSE_NOT_FOUND":
                raise
            raise errors.not_found("response", response_id) from None
        if not session.messages or session.messages[-1].role is not Role.ASSISTANT:
            raise errors.not_found("response", response_id)
        return session


def _not_found(error: RyzansteinError, field: str, response_id: str, why: str) -> RyzansteinError:
    """Returns what a caller gets for a response that the store does not have; another error as it is."""
    if error.code is not Code.NOT_FOUND:
        return error
    return RyzansteinError(
        f"{field}: {response_id[:64]!r} {why}",
        Code.NOT_FOUND,
        "RESPONSE_NOT_FOUND",
        violations=(errors.FieldViolation(field, why),),
    )


def _key(tenant: str, response_id: str) -> str:
    if not response_id.startswith(PREFIX) or len(response_id) > _MAX_ID_CHARS or response_id.endswith(OBJECT_MARK):
        raise errors.not_found("response", response_id)
    return f"{tenant_digest(tenant)}-{response_id}"
