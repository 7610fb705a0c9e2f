"""Sessions in one Redis server, for routers on several hosts.

Atomic operations are scripts (`redis_scripts`). The server must not evict (`maxmemory-policy
noeviction`): a session that has lost its messages is refused as damaged. How much a crash of the
server loses is its own setting (`appendfsync`).
"""

from __future__ import annotations

import contextlib
import json
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence, Set
from typing import Any

import structlog
from redis.asyncio import Redis
from redis.exceptions import AuthenticationError, AuthorizationError

from ryzanstein import errors
from ryzanstein.auth.caller import tenant_digest
from ryzanstein.generation.prompts import Message
from ryzanstein.router.sessions.claims import EXPIRED_CLAIM_KEEP_S, ClaimRequest, SessionBusyError
from ryzanstein.router.sessions.store import (
    MOST_EVICTED,
    OBJECT_MARK,
    Session,
    SessionBounds,
    SessionPage,
    checked_id,
    checked_page_size,
    digest_of,
    is_object,
    is_response,
    needed_by,
    page_of,
    read_page_token,
    store_unavailable,
)
from ryzanstein.router.sessions.stores import redis_scripts as scripts
from ryzanstein.router.sessions.stores.message_rows import read_rows, readable, rows_of
from ryzanstein.storage.redis_client import redis_failures

log = structlog.get_logger(__name__)

_SCRIPTS = ("CREATE", "APPEND", "DELETE", "LIST", "OWN", "CLAIM", "RENEW", "RELEASE")
_ADDED = 2
_OF_ALL = ("sessions", "responses", "objects", "changed")
_MOST_AT_ONCE = 1000


class RedisSessions:
    """A `SessionStore` that several routers share.

    Create it with `open`, which detects wrong credentials.
    """

    def __init__(self, client: Redis, prefix: str, bounds: SessionBounds, on_evicted: Callable[[int], None]) -> None:
        self._client = client
        self._prefix = prefix
        self._bounds = bounds
        self._on_evicted = on_evicted
        self._scripts = {name: client.register_script(getattr(scripts, name)) for name in _SCRIPTS}
        self._listed_by_owner = False
        self.origin = uuid.uuid4().hex
        """Marks what this store publishes on `changed`."""

    @classmethod
    async def open(cls, client: Redis, prefix: str, bounds: SessionBounds, on_evicted: Callable[[int], None]) -> RedisSessions:
        """Returns a store. Raises FAILED_PRECONDITION when the server refuses this router.

        A server that is away is not an error: it may come back.
        """
        try:
            policy = await client.config_get("maxmemory-policy")
        except (AuthenticationError, AuthorizationError) as error:
            await client.aclose()
            raise errors.failed_precondition("SESSION_STORE_REFUSED", f"Redis refuses this router: {error}") from None
        except Exception as error:
            # CONFIG may be forbidden; if the server is away, its first user reports that.
            log.info("Redis eviction policy unknown", error=str(error))
        else:
            if policy.get("maxmemory-policy") != "noeviction":
                log.warning("Redis may evict sessions", policy=policy, want="noeviction")
        return cls(client, prefix, bounds, on_evicted)

    async def create(
        self,
        session_id: str,
        model: str,
        messages: Sequence[Message] = (),
        *,
        tenant: str = "",
        fresh: bool = False,
        parent: str = "",
    ) -> Session:
        checked_id(session_id)
        self._bounds.check(messages)
        # The nonce distinguishes a command that was sent twice from an id that is taken.
        most, needed = self._bounds.most_like(session_id), needed_by(session_id, parent)
        values = (session_id, model, uuid.uuid4().hex, most, self._prefix, self.origin, tenant)
        owner, share = self._owner(session_id, tenant)
        chain = (parent, needed, _mark(session_id), MOST_EVICTED, owner, share)
        keys = self._keys(session_id, "session", "messages", "sessions", "changed")
        rows = map(_packed, rows_of(parent, messages))
        made = await self._run("CREATE", keys, (*values, *chain, *rows), session_id)
        if not made:
            raise errors.already_exists("session", session_id)
        if made == ["gone"]:
            raise errors.not_found("session", needed)
        if evicted := int(made[1]):
            self._on_evicted(evicted)
        return Session(session_id, model, float(made[0]), float(made[0]), tuple(messages), tenant=tenant, parent=parent)

    async def get(self, session_id: str) -> Session:
        with _as_unavailable(session_id):
            pipeline = self._client.pipeline(transaction=True)
            pipeline.hgetall(f"{self._prefix}session:{session_id}")
            pipeline.lrange(f"{self._prefix}messages:{session_id}", 0, -1)
            fields, packed = await pipeline.execute()
        if not fields:
            raise errors.not_found("session", session_id)
        if len(packed) != int(fields["num_messages"]):
            what = f"session {session_id[:128]!r} is damaged: Redis has {len(packed)} of {fields['num_messages']} messages"
            raise errors.failed_precondition("SESSION_DAMAGED", what)
        with readable(session_id):
            parent, messages = read_rows([(kind, content) for kind, content in map(json.loads, packed)])
        return Session(
            session_id,
            fields["model"],
            float(fields["create_time"]),
            float(fields["update_time"]),
            messages,
            fields["node_id"],
            fields.get("tenant", ""),
            parent,
            "deleted" in fields,
        )

    async def owner(self, session_id: str) -> str | None:
        with _as_unavailable(session_id):
            model, tenant = await self._client.hmget(f"{self._prefix}session:{session_id}", ["model", "tenant"])
        return None if model is None else str(tenant or "")

    async def list(self, page_size: int = 0, page_token: str = "", *, tenant: str = "") -> SessionPage:
        size, position = checked_page_size(page_size), read_page_token(page_token)
        await self._list_those_of_earlier_versions()
        values = (repr(position[0]), position[1], size + 1, self._prefix)
        num_ids = -1
        while num_ids < 0:  # each time it puts right some that are listed wrongly
            num_ids, rows = await self._run("LIST", (f"{self._prefix}owned:tenant:{tenant}",), values)
        return page_of(list(map(_listed, rows)), size)

    async def _list_those_of_earlier_versions(self) -> None:
        """Lists by their owners, once, all sessions that routers of an earlier version made before this one began."""
        first = 0
        while not self._listed_by_owner:
            values = (first, first + _MOST_AT_ONCE - 1, self._prefix)
            num_ids = await self._run("OWN", (f"{self._prefix}sessions",), values)
            self._listed_by_owner = num_ids < _MOST_AT_ONCE
            first += _MOST_AT_ONCE

    async def delete(self, session_id: str) -> None:
        values = (session_id, self.origin, self._prefix, _mark(session_id))
        if not await self._run("DELETE", self._keys(session_id, "session", "changed"), values, session_id):
            raise errors.not_found("session", session_id)

    async def append(
        self, session_id: str, messages: Sequence[Message], *, model: str, node_id: str, generation_id: str = ""
    ) -> bool:
        keys = self._keys(session_id, "session", "messages", "turns", "sessions", "claim", "changed", "claimed")
        values = (session_id, generation_id, model, node_id, self.origin, self._prefix, *map(_packed, rows_of("", messages)))
        found = await self._run("APPEND", keys, values, session_id)
        if not found:
            raise errors.not_found("session", session_id)
        return bool(found == _ADDED)

    async def claim(self, request: ClaimRequest) -> None:
        session_id = request.session_id
        values = (request.generation_id, request.owner, *_lasting_ms(request.ttl_s), request.gone, request.expired_of)
        if held := await self._run("CLAIM", self._keys(session_id, "claim", "claimed"), values, session_id):
            holder_id, of, expired = held
            raise SessionBusyError(session_id, holder_id, of, expired=bool(expired))

    async def renew(self, held: Mapping[str, str], owner: str, ttl_s: float) -> Set[str]:
        keys = [key for session_id in held for key in self._keys(session_id, "claim", "claimed")]
        lost = await self._run("RENEW", keys, (owner, *_lasting_ms(ttl_s), *held.values()))
        session_ids = list(held)
        return {session_ids[number - 1] for number in lost}

    async def release(self, session_id: str, generation_id: str, owner: str) -> None:
        await self._run("RELEASE", self._keys(session_id, "claim", "claimed"), (generation_id, owner), session_id)

    async def close(self) -> None:
        await self._client.aclose()

    async def _run(self, script: str, keys: Sequence[str], values: Sequence[str | int], session_id: str = "") -> Any:
        with _as_unavailable(session_id):
            return await self._scripts[script](keys=keys, args=values)

    def _owner(self, session_id: str, tenant: str) -> tuple[str, int]:
        """Returns what a session is listed by, and how many its tenant may have; 0: as many as all."""
        most = self._bounds.most_of_a_tenant(session_id, tenant)
        if not is_response(session_id):
            return f"tenant:{tenant}", most if tenant else 0
        digest = digest_of(session_id)
        return f"response:{digest}", 0 if digest == tenant_digest("") else most

    def _keys(self, session_id: str, *kinds: str) -> tuple[str, ...]:
        """Returns the keys of a session. The ids of what is kept of responses are in sets of their own."""
        by_use = "objects" if is_object(session_id) else "responses" if is_response(session_id) else "sessions"
        named = (by_use if kind == "sessions" else kind for kind in kinds)
        return tuple(self._prefix + (kind if kind in _OF_ALL else f"{kind}:{session_id}") for kind in named)


@contextlib.contextmanager
def _as_unavailable(session_id: str) -> Iterator[None]:
    try:
        with redis_failures():
            yield
    except ConnectionError as error:
        raise store_unavailable(f"Redis failed: {error}", session_id) from error


def _lasting_ms(ttl_s: float) -> tuple[int, int]:
    """Returns how long a claim is valid, and how long it is remembered."""
    return round(ttl_s * 1000), round((ttl_s + EXPIRED_CLAIM_KEEP_S) * 1000)


def _mark(session_id: str) -> str:
    """Returns what ends the ids of objects, empty for a conversation."""
    return OBJECT_MARK if is_response(session_id) else ""


def _packed(row: tuple[str, str]) -> str:
    return json.dumps(row, ensure_ascii=False)


def _listed(row: Sequence[str]) -> Session:
    session_id, model, create_time, update_time, node_id, tenant = row
    return Session(session_id, model, float(create_time), float(update_time), (), node_id, tenant)
