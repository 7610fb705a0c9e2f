"""Responses that are kept: retrieved, continued by `previous_response_id`, and deleted.

The conversation of a response is a session of its own, in the store of sessions: bounded, shared by
the routers of a cluster, and never changed, so that two responses may continue the same one. Its
id has a digest of the tenant in it: what another tenant keeps is not found. The response itself is
kept in this router's memory, as long as there is room; without it a response is rebuilt from its
conversation, without its usage.
"""

from __future__ import annotations

import json
from collections import OrderedDict
from collections.abc import Sequence
from hashlib import blake2b

import structlog
from prometheus_client import Counter

from ryzanstein import errors
from ryzanstein.errors import Code, RyzansteinError
from ryzanstein.generation import Message, Role, Started
from ryzanstein.router.faces.http.responses import shapes
from ryzanstein.router.faces.http.responses.body import ResponsesRequest
from ryzanstein.router.faces.http.responses.items import items_of
from ryzanstein.router.faces.http.responses.shapes import PREFIX, Shape
from ryzanstein.router.sessions.store import SessionStore
from ryzanstein.router.telemetry import RouterTelemetry

log = structlog.get_logger(__name__)

_MAX_KEPT = 4096
_MAX_KEPT_BYTES = 16_000_000
_MAX_ID_CHARS = 80


class KeptResponses:
    """The responses of all tenants."""

    def __init__(self, sessions: SessionStore, telemetry: RouterTelemetry) -> None:
        self._sessions = sessions
        self._evicted = Counter(
            "ryzanstein_router_responses_evicted_total",
            "Responses forgotten for lack of room; their conversations stay",
            registry=telemetry.registry,
        )
        self._unstored = Counter(
            "ryzanstein_router_responses_unstored_total",
            "Responses whose conversation was not stored, by cause",
            ("cause",),
            registry=telemetry.registry,
        )
        # As JSON: what a client sent takes no more memory than is counted.
        self._kept: OrderedDict[str, bytes] = OrderedDict()
        self._num_bytes = 0

    async def keep(self, tenant: str, response: Shape, conversation: Sequence[Message]) -> None:
        """Keeps a response. A store that refuses or fails loses it, which is counted; the answer is not lost."""
        key = _key(tenant, response["id"])
        try:
            await self._sessions.create(key, response["model"], conversation)
        except RyzansteinError as error:
            self._unstored.labels(error.reason.lower()).inc()
            log.warning("response not stored", reason=error.reason, message=error.message)
            return
        self._kept[key] = kept = json.dumps(response).encode()
        self._num_bytes += len(kept)
        while len(self._kept) > _MAX_KEPT or self._num_bytes > _MAX_KEPT_BYTES:
            self._evicted.inc()
            self._forget(next(iter(self._kept)))

    async def conversation(self, tenant: str, response_id: str, field: str) -> tuple[Message, ...]:
        """Returns what was said until the end of a response. Raises INVALID_ARGUMENT naming the field, or NOT_FOUND."""
        try:
            return tuple((await self._sessions.get(_key(tenant, response_id))).messages)
        except RyzansteinError as error:
            if error.code is not Code.NOT_FOUND:
                raise
            raise RyzansteinError(
                f"{field}: no such response: {response_id[:64]!r}",
                Code.NOT_FOUND,
                "RESPONSE_NOT_FOUND",
                violations=(errors.FieldViolation(field, "names no response"),),
            ) from None

    async def retrieve(self, tenant: str, response_id: str) -> Shape:
        """Returns a response. Raises NOT_FOUND, also when another router deleted it or its conversation expired."""
        messages = await self._found(tenant, response_id)
        if (kept := self._kept.get(_key(tenant, response_id))) is not None:
            return dict(json.loads(kept))
        generation_id = response_id.removeprefix(PREFIX)
        told = shapes.begun(Started(generation_id, "", "", 0), ResponsesRequest(input=""))
        return told | {"status": "completed", "output": items_of(generation_id, messages[-1])}

    async def delete(self, tenant: str, response_id: str) -> None:
        """Forgets a response. Raises NOT_FOUND. Responses that continue it keep what was said."""
        await self._found(tenant, response_id)
        key = _key(tenant, response_id)
        self._forget(key)
        await self._sessions.delete(key)

    async def _found(self, tenant: str, response_id: str) -> tuple[Message, ...]:
        try:
            messages = await self.conversation(tenant, response_id, "response_id")
        except RyzansteinError as error:
            if error.reason != "RESPONSE_NOT_FOUND":
                raise
            self._forget(_key(tenant, response_id))
            raise errors.not_found("response", response_id) from None
        if not messages or messages[-1].role is not Role.ASSISTANT:
            raise errors.not_found("response", response_id)
        return messages

    def _forget(self, key: str) -> None:
        self._num_bytes -= len(self._kept.pop(key, b""))


def _key(tenant: str, response_id: str) -> str:
    if not response_id.startswith(PREFIX) or len(response_id) > _MAX_ID_CHARS:
        raise errors.not_found("response", response_id)
    return f"{blake2b(tenant.encode(), digest_size=8).hexdigest()}-{response_id}"
