"""What survives a restart, in Redis, for orchestrators that take each other's place.

One hash for each kind. Every write is a script that compares epochs first: what an earlier leader
writes is refused, however late it comes. Every write is safe to repeat. A write whose answer is lost
fails with STORE_UNAVAILABLE and may have been done; the next leader then has it. So may one that fails with NOT_LEADER: the
client repeats a write whose answer is lost, and another leader may have begun before that. A write may also arrive after a
later one of the same leader, which was sent on another connection: writes have numbers, and it is then refused.
"""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from typing import Any

import structlog
from redis.asyncio import Redis

from ryzanstein import errors
from ryzanstein.adapters import DeployedAdapter
from ryzanstein.auth.audit.audit_record import AuditRecord, clipped_facts
from ryzanstein.cluster import Deployment
from ryzanstein.orchestrator.state.audit_table import MOST_ROWS, AuditPage, AuditQuery
from ryzanstein.orchestrator.state.stored import (
    StoredHalt,
    StoredMembership,
    StoredRefusal,
    StoreError,
    deployment_facts,
    deployment_of,
    made,
    not_leader,
)
from ryzanstein.orchestrator.telemetry import OrchestratorTelemetry
from ryzanstein.storage.redis_client import redis_failures

log = structlog.get_logger(__name__)

_KINDS = ("deployments", "adapters", "members", "drains", "refusals", "halts")
_AUDIT = ("numbers", "acts", "outcomes", "names", "last")
_BATCH = 500

# KEYS[1]: the epoch. ARGV[1]: that of the writer. Numbers of Lua are whole up to 2^53, which epochs never reach.
_FENCE = """
local held = tonumber(redis.call('GET', KEYS[1]) or '0')
if held > tonumber(ARGV[1]) then return held end
if held < tonumber(ARGV[1]) then redis.call('SET', KEYS[1], ARGV[1]) end
"""
_NEXT_EPOCH = """
local held = tonumber(redis.call('GET', KEYS[1]) or '0')
local epoch = string.format('%.0f', math.max(held, tonumber(ARGV[1])) + 1)
redis.call('SET', KEYS[1], epoch)
return epoch
"""
# KEYS[2]: epoch and number of the last write. ARGV[2]: the number of this one.
_ORDER = """
local epoch, number = string.match(redis.call('GET', KEYS[2]) or '', '(%d+) (%d+)')
if epoch == ARGV[1] and tonumber(number) > tonumber(ARGV[2]) then return -1 end
redis.call('SET', KEYS[2], ARGV[1] .. ' ' .. ARGV[2])
"""
# ARGV, for each hash of KEYS from the third: how many names to remove, the names, how many to set, names and values.
_CHANGE = (
    _FENCE
    + _ORDER
    + """
local at = 3
for i = 3, #KEYS do
    local removed = tonumber(ARGV[at])
    for j = at + 1, at + removed do redis.call('HDEL', KEYS[i], ARGV[j]) end
    at = at + removed + 1
    local set = tonumber(ARGV[at])
    for j = at + 1, at + 2 * set, 2 do redis.call('HSET', KEYS[i], ARGV[j], ARGV[j + 1]) end
    at = at + 2 * set + 1
end
return 0
"""
)
# KEYS: the epoch; the hashes of numbers by id, and by number of acts, outcomes and ids; the last number.
# ARGV: epoch, id, act, outcome, how many are kept
_ACT = (
    _FENCE
    + """
local number = redis.call('HGET', KEYS[2], ARGV[2])
if not number then
    number = redis.call('INCR', KEYS[6])
    redis.call('HSET', KEYS[2], ARGV[2], number)
    redis.call('HSET', KEYS[3], number, ARGV[3])
    redis.call('HSET', KEYS[5], number, ARGV[2])
    local old = number - ARGV[5]
    local name = redis.call('HGET', KEYS[5], old)
    if name then
        redis.call('HDEL', KEYS[2], name)
        for i = 3, 5 do redis.call('HDEL', KEYS[i], old) end
    end
end
redis.call('HSET', KEYS[4], number, ARGV[4])
return 0
"""
)

_Hash = dict[str, str]


class RedisStore:
    """A `StateStore` in a Redis server. The client decodes answers; `close` closes it.

    `fenced` is called with the epoch of a later leader whenever one has written.
    """

    def __init__(
        self,
        client: Redis,
        prefix: str,
        telemetry: OrchestratorTelemetry,
        fenced: Callable[[int], None] = lambda epoch: None,
        *,
        most_acts: int = MOST_ROWS,
    ) -> None:
        self._redis, self._telemetry, self._most_acts = client, telemetry, most_acts
        self.fenced = fenced
        base = f"{prefix}orchestrator:"
        self._epoch_key, self._last_key = f"{base}epoch", f"{base}last-write"
        self._keys = {kind: f"{base}{kind}" for kind in _KINDS}
        self._audit_keys = [f"{base}audit:{part}" for part in _AUDIT]
        self._next, self._change, self._act = (client.register_script(text) for text in (_NEXT_EPOCH, _CHANGE, _ACT))
        self._epoch = self._number = 0
        self._written: dict[str, _Hash] = {}
        self._writing = asyncio.Lock()

    @classmethod
    async def open(cls, client: Redis, prefix: str, telemetry: OrchestratorTelemetry) -> RedisStore:
        """Returns a store whose server answers. Raises StoreError when it does not."""
        try:
            with redis_failures():
                await _awaited(client.ping())
        except ConnectionError as error:
            await client.aclose()
            raise StoreError(f"cannot reach the store in Redis: {error}") from error
        return cls(client, prefix, telemetry)

    async def next_epoch(self, known: int = 0) -> int:
        with self._operation("epoch"):
            self._epoch = int(await self._next([self._epoch_key], [known]))
        return self._epoch

    async def begin(self, epoch: int) -> None:
        self._epoch = epoch
        self._written = {}
        async with self._writing:
            await self._write("epoch", {})

    async def deployments(self) -> tuple[Deployment, ...]:
        return tuple(deployment_of(json.loads(row)) for _, row in sorted((await self._all("deployments")).items()))

    async def put_deployment(self, deployment: Deployment) -> None:
        await self._put("deployment", "deployments", deployment.model, json.dumps(deployment_facts(deployment)))

    async def remove_deployment(self, model: str) -> None:
        await self._remove("deployment", "deployments", model)

    async def adapters(self) -> tuple[DeployedAdapter, ...]:
        return tuple(made(DeployedAdapter, json.loads(row)) for _, row in sorted((await self._all("adapters")).items()))

    async def put_adapter(self, adapter: DeployedAdapter) -> None:
        await self._put("adapter", "adapters", adapter.name, json.dumps(asdict(adapter)))

    async def remove_adapter(self, name: str) -> None:
        await self._remove("adapter", "adapters", name)

    async def membership(self) -> StoredMembership:
        members, drains = await self._known("members"), await self._known("drains")
        return StoredMembership(frozenset(members), dict(drains))

    async def save_membership(self, membership: StoredMembership) -> None:
        await self._save("membership", {"members": dict.fromkeys(membership.members, ""), "drains": dict(membership.drains)})

    async def refusals(self) -> tuple[StoredRefusal, ...]:
        found = [made(StoredRefusal, json.loads(row)) for row in (await self._known("refusals")).values()]
        return tuple(sorted(found, key=lambda each: (each.node_id, each.model)))

    async def save_refusals(self, refusals: Iterable[StoredRefusal]) -> None:
        rows = {json.dumps([each.node_id, each.model]): json.dumps(asdict(each)) for each in refusals}
        await self._save("refusals", {"refusals": rows})

    async def halts(self) -> tuple[StoredHalt, ...]:
        return tuple(made(StoredHalt, json.loads(row)) for _, row in sorted((await self._known("halts")).items()))

    async def save_halts(self, halts: Iterable[StoredHalt]) -> None:
        await self._save("halts", {"halts": {each.model: json.dumps(asdict(each)) for each in halts}})

    async def write(self, record: AuditRecord) -> None:
        act = [record.id, record.time, record.actor, record.via, record.method, record.target, record.request_id]
        fixed = json.dumps([*act, clipped_facts(record.before)])
        outcome = json.dumps([record.outcome, record.reason, clipped_facts(record.after)])
        keys = [self._epoch_key, *self._audit_keys]
        args: list[Any] = [self._epoch, record.id, fixed, outcome, self._most_acts]
        with self._operation("audit"):
            self._check(await self._act(keys, args))

    async def audit(self, query: AuditQuery) -> AuditPage:
        """Returns a page. It reads acts from the newest on until enough of them match."""
        found: list[tuple[int, AuditRecord]] = []
        with self._operation("audit"):
            last = int(await _awaited(self._redis.get(self._audit_keys[4])) or 0)
            number = min(last, query.before - 1)
            while number > max(0, last - self._most_acts) and len(found) <= query.size:
                numbers = range(number, max(0, number - _BATCH), -1)
                found += [(n, each) for n, each in await self._acts(numbers) if _matches(each, query)]
                number -= _BATCH
        more = len(found) > query.size
        return AuditPage(tuple(each for _, each in found[: query.size]), found[query.size - 1][0] if more else 0)

    async def close(self) -> None:
        await self._redis.aclose()

    async def _acts(self, numbers: Sequence[int]) -> list[tuple[int, AuditRecord]]:
        names = [str(number) for number in numbers]
        acts = await _awaited(self._redis.hmget(self._audit_keys[1], names))
        outcomes = await _awaited(self._redis.hmget(self._audit_keys[2], names))
        rows = zip(numbers, acts, outcomes, strict=True)
        return [(number, _record(act, outcome)) for number, act, outcome in rows if act is not None and outcome is not None]

    async def _all(self, kind: str) -> _Hash:
        with self._operation("read"):
            return dict(await _awaited(self._redis.hgetall(self._keys[kind])))

    async def _known(self, kind: str) -> _Hash:
        """Returns a hash that only this leader writes, as it was last read or written."""
        if kind not in self._written:
            self._written[kind] = await self._all(kind)
        return self._written[kind]

    async def _put(self, operation: str, kind: str, name: str, row: str) -> None:
        async with self._writing:
            await self._write(operation, {kind: ((), {name: row})})

    async def _remove(self, operation: str, kind: str, name: str) -> None:
        async with self._writing:
            await self._write(operation, {kind: ((name,), {})})

    async def _save(self, operation: str, wanted: dict[str, _Hash]) -> None:
        """Writes what differs from what was written last; until it is known, all of it is unknown again."""
        async with self._writing:
            changes = {}
            for kind, rows in wanted.items():
                known = await self._known(kind)
                changed = {name: value for name, value in rows.items() if known.get(name) != value}
                changes[kind] = (tuple(known.keys() - rows.keys()), changed)
            if any(removed or changed for removed, changed in changes.values()):
                for kind in wanted:
                    del self._written[kind]  # a write without an answer may have been done
                await self._write(operation, changes)
                self._written.update(wanted)

    async def _write(self, operation: str, changes: dict[str, tuple[tuple[str, ...], _Hash]]) -> None:
        """Writes after all writes before. Call it with the lock."""
        self._number += 1
        keys: list[str] = [self._epoch_key, self._last_key]
        args: list[Any] = [self._epoch, self._number]
        for kind, (removed, changed) in changes.items():
            keys.append(self._keys[kind])
            args += [len(removed), *removed, len(changed), *(each for pair in changed.items() for each in pair)]
        with self._operation(operation):
            self._check(await self._change(keys, args))

    def _check(self, later: int) -> None:
        """Raises NOT_LEADER when a leader of a later epoch has written, UNAVAILABLE when a later write was done."""
        if later < 0:
            raise errors.unavailable("STORE_UNAVAILABLE", "the write came after a later one, and was not done")
        if later:
            log.warning("write refused by the store, a later leader has written", epoch=self._epoch, later=later)
            self.fenced(later)
            raise not_leader(why=f"a leader of epoch {later} has written, this one has {self._epoch}")

    @contextmanager
    def _operation(self, operation: str) -> Iterator[None]:
        started = time.monotonic()
        try:
            with redis_failures():
                yield
        except (ConnectionError, ValueError, TypeError) as error:
            self._telemetry.store_errors.labels(operation).inc()
            log.error("store failed", operation=operation, error=str(error))
            raise errors.unavailable("STORE_UNAVAILABLE", f"the orchestrator's store failed: {error}") from error
        finally:
            self._telemetry.store_access.labels(operation).observe(time.monotonic() - started)


async def _awaited(answer: Any) -> Any:
    """Returns what a command answers; its types say that it may be answered at once."""
    return await answer


def _record(act: str, outcome: str) -> AuditRecord:
    *first, before = json.loads(act)
    ended, reason, after = json.loads(outcome)
    values: list[Any] = [*first, ended, reason, before, after]
    return AuditRecord(*values)


def _matches(record: AuditRecord, query: AuditQuery) -> bool:
    return query.method in ("", record.method) and record.target.startswith(query.target_prefix)
