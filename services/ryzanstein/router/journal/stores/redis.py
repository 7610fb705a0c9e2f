"""A journal in Redis, for routers on several hosts.

A generation is a hash (owner, epoch, request, time of the last append, when it expires), a list of
batches, and a key with its epoch that outlives them. A lease is a key; its owner's address is
another one that outlives it. A sorted set has the owners by the time of their last renewal. Redis
expires keys. Generations expire by `attended`, a clock that stands while no router renews its lease,
because no client can come then; a sorted set says which to remove. Everything that compares an epoch
is a script, so it is atomic. A call that exceeds its timeout counts as an outage instead of being
waited for. Every call is safe to repeat.
"""

from __future__ import annotations

from collections.abc import Awaitable, Sequence
from typing import Any, TypeVar

from redis.asyncio import Redis

from ryzanstein.router.journal.journal import (
    KEY_HOLD_S,
    LAST_KNOWN_KEEP_S,
    Append,
    AppendOutcome,
    Head,
    JournalRecord,
    JournalUnavailableError,
    KeyClaim,
    Owner,
)
from ryzanstein.storage.redis_client import redis_failures

_OUTCOMES = (AppendOutcome.WRITTEN, AppendOutcome.FENCED, AppendOutcome.MISSING, AppendOutcome.EXPIRED)

# How long Redis keeps what no router has removed: routers that are away for longer find nothing.
_ABSENCE_KEEP_S = 3600.0
_MOST_SWEPT = 200

# ARGV[1]: lease in ms. KEYS[1]: the clock, KEYS[2]: when each generation expires by it.
_CLOCK = """
local time = redis.call('TIME')
local now = time[1] * 1000 + math.floor(time[2] / 1000)
local seen = redis.call('HMGET', KEYS[1], 'at_ms', 'attended_ms')
local attended = seen[1] and seen[2] + math.max(0, math.min(now - seen[1], tonumber(ARGV[1]))) or now
local function whole(number) return string.format('%.0f', number) end
-- Routers of an earlier version take a generation over, with another epoch, and do not say when it expires.
local function lives(head)
    local fields = redis.call('HMGET', head, 'epoch', 'expires_ms', 'expires_of')
    return fields[1] and (fields[3] ~= fields[1] or not fields[2] or tonumber(fields[2]) > attended)
end
local function keep(head, rows, last, id, epoch, retention_ms, kept_ms)
    local expires = whole(attended + retention_ms)
    redis.call('HSET', head, 'expires_ms', expires, 'expires_of', epoch)
    redis.call('ZADD', KEYS[2], expires, id)
    redis.call('PEXPIRE', head, kept_ms)
    redis.call('PEXPIRE', rows, kept_ms)
    redis.call('SET', last, epoch, 'PX', 2 * kept_ms)
end
"""
# ARGV: retention in ms, how long it is kept in Redis in ms, owner id, address, then epoch, batch, request
# and id of each generation
# KEYS: its hash, its list and its epoch
_WRITE = (
    _CLOCK
    + """
local outcomes = {}
for i = 1, (#KEYS - 2) / 3 do
    local head, rows, last = KEYS[3 * i], KEYS[3 * i + 1], KEYS[3 * i + 2]
    local epoch, batch, request, id = ARGV[4 * i + 2], ARGV[4 * i + 3], ARGV[4 * i + 4], ARGV[4 * i + 5]
    local known = redis.call('HGET', head, 'epoch')
    if known and known ~= epoch then
        outcomes[i] = 1
    elseif not known and request == '' then
        outcomes[i] = redis.call('GET', last) == epoch and 3 or 2
    else
        if not known then
            redis.call('DEL', rows)
            redis.call('HSET', head, 'epoch', epoch, 'owner_id', ARGV[4], 'address', ARGV[5], 'request', request)
        end
        redis.call('HSET', head, 'written_ms', whole(now), 'attended_ms', whole(attended))
        if batch ~= '' then redis.call('RPUSH', rows, batch) end
        keep(head, rows, last, id, epoch, ARGV[2], ARGV[3])
        outcomes[i] = 0
    end
end
return outcomes
"""
)
# ARGV: epoch and id of each generation
_REMOVE = """
for i = 1, (#KEYS - 1) / 3 do
    if redis.call('HGET', KEYS[3 * i - 1], 'epoch') == ARGV[2 * i - 1] then
        redis.call('DEL', KEYS[3 * i - 1], KEYS[3 * i], KEYS[3 * i + 1])
        redis.call('ZREM', KEYS[1], ARGV[2 * i])
    end
end
"""
_HEAD = (
    _CLOCK
    + """
if not lives(KEYS[3]) then return false end
return redis.call('HMGET', KEYS[3], 'owner_id', 'address', 'epoch')
"""
)
_TAKE = (
    _CLOCK
    + """
local head, rows, last = KEYS[3], KEYS[4], KEYS[5]
if redis.call('HGET', head, 'epoch') ~= ARGV[4] or not lives(head) then return false end
redis.call('HSET', head, 'epoch', ARGV[4] + 1, 'owner_id', ARGV[5], 'address', ARGV[6])
keep(head, rows, last, ARGV[7], whole(ARGV[4] + 1), ARGV[2], ARGV[3])
-- A clock that was set back makes nothing younger than the routers that lived say.
local written = redis.call('HMGET', head, 'written_ms', 'attended_ms')
local age_ms = written[1] and math.max(0, now - written[1], attended - (written[2] or attended)) or 0
return {redis.call('HGET', head, 'request'), redis.call('LRANGE', rows, 0, -1), age_ms}
"""
)
# ARGV: generation, body, how long a claim holds before its generation is opened, how long it is
# kept, prefix of the heads. It is not known in advance which head is read, so it cannot be in KEYS,
# as a Redis cluster would require.
_CLAIM_KEY = (
    _CLOCK
    + """
local held = redis.call('HMGET', KEYS[3], 'generation_id', 'body', 'kept_ms')
if held[1] and held[1] ~= ARGV[2] then
    local begun = lives(ARGV[6] .. held[1]) and 1 or 0
    if begun == 1 or tonumber(held[3]) - redis.call('PTTL', KEYS[3]) < tonumber(ARGV[4]) then
        return {held[1], held[2], begun}
    end
end
redis.call('DEL', KEYS[3])
redis.call('HSET', KEYS[3], 'generation_id', ARGV[2], 'body', ARGV[3], 'kept_ms', ARGV[5])
redis.call('PEXPIRE', KEYS[3], ARGV[5])
return false
"""
)
# Also removes generations that have expired, some at a time; their epochs are kept.
# KEYS: lease, address, public address, owners by their last renewal. ARGV: address, how long that is kept in ms, how many to
# remove, prefixes of heads and lists, public address, owner id
_RENEW = (
    _CLOCK
    + """
if ARGV[2] ~= '' then redis.call('HSET', KEYS[1], 'at_ms', whole(now), 'attended_ms', whole(attended)) end
redis.call('SET', KEYS[3], ARGV[2], 'PX', ARGV[1])
redis.call('SET', KEYS[4], ARGV[2], 'PX', ARGV[3])
redis.call('SET', KEYS[5], ARGV[7], 'PX', ARGV[1])
redis.call('ZADD', KEYS[6], whole(now), ARGV[8])
redis.call('ZREMRANGEBYSCORE', KEYS[6], '-inf', whole(now - ARGV[3]))
for _, id in ipairs(redis.call('ZRANGEBYSCORE', KEYS[2], '-inf', whole(attended), 'LIMIT', 0, ARGV[4])) do
    if not lives(ARGV[5] .. id) then redis.call('DEL', ARGV[5] .. id, ARGV[6] .. id) end
    redis.call('ZREM', KEYS[2], id)
end
"""
)
_FREE_KEY = """
if redis.call('HGET', KEYS[1], 'generation_id') == ARGV[1] then redis.call('DEL', KEYS[1]) end
"""
_SCRIPTS = {
    "write": _WRITE,
    "remove": _REMOVE,
    "head": _HEAD,
    "take": _TAKE,
    "claim_key": _CLAIM_KEY,
    "free_key": _FREE_KEY,
    "renew": _RENEW,
}
_Result = TypeVar("_Result")


class RedisJournal:
    """A `Journal` in a Redis server.

    It connects with the first call; a server that is not there yet is an outage.
    """

    def __init__(self, client: Redis, prefix: str, lease_s: float, retention_s: float) -> None:
        """The `client` decodes no answers; `close` closes it. Every key starts with `prefix`."""
        self._redis = client
        self._prefix = prefix
        self._lease_ms = int(1000 * lease_s)
        self._retention_ms = int(1000 * retention_s)
        self._kept_ms = int(1000 * (retention_s + _ABSENCE_KEEP_S))
        self._clock = (f"{prefix}attended", f"{prefix}expiring")
        self._renewed = f"{prefix}renewed"
        self._scripts = {name: client.register_script(text) for name, text in _SCRIPTS.items()}

    async def write(self, owner: Owner, appends: Sequence[Append]) -> list[AppendOutcome]:
        keys = [key for append in appends for key in self._keys(append.generation_id)]
        args: list[Any] = [self._lease_ms, self._retention_ms, self._kept_ms, owner.owner_id, owner.address]
        for append in appends:
            args += (append.epoch, append.batch, append.request or b"", append.generation_id)
        return [_OUTCOMES[number] for number in await self._run("write", (*self._clock, *keys), args)]

    async def remove(self, generations: Sequence[tuple[str, int]]) -> None:
        keys = [key for generation_id, _ in generations for key in self._keys(generation_id)]
        args = [value for generation_id, epoch in generations for value in (epoch, generation_id)]
        await self._run("remove", (self._clock[1], *keys), args)

    async def head(self, generation_id: str) -> Head | None:
        found = await self._run("head", (*self._clock, self._keys(generation_id)[0]), (self._lease_ms,))
        if found is None:
            return None
        owner_id, address, epoch = found
        return Head(Owner(owner_id.decode(), address.decode()), int(epoch))

    async def take(self, generation_id: str, epoch: int, owner: Owner) -> JournalRecord | None:
        times = (self._lease_ms, self._retention_ms, self._kept_ms)
        args = (*times, epoch, owner.owner_id, owner.address, generation_id)
        taken = await self._run("take", (*self._clock, *self._keys(generation_id)), args)
        return None if taken is None else JournalRecord(epoch + 1, taken[0], tuple(taken[1]), taken[2] / 1000)

    async def claim_key(self, key: str, claim: KeyClaim, keep_s: float) -> KeyClaim | None:
        times = (int(1000 * KEY_HOLD_S), int(1000 * (max(keep_s, KEY_HOLD_S) + _ABSENCE_KEEP_S)))
        args = (self._lease_ms, claim.generation_id, claim.body, *times, f"{self._prefix}generation:")
        held = await self._run("claim_key", (*self._clock, self._key(key)), args)
        return None if held is None else KeyClaim(held[0].decode(), held[1], bool(held[2]))

    async def free_key(self, key: str, generation_id: str) -> None:
        await self._run("free_key", [self._key(key)], [generation_id])

    async def renew(self, owner: Owner) -> None:
        known_ms = self._lease_ms + int(1000 * LAST_KNOWN_KEEP_S)
        heads, lists = f"{self._prefix}generation:", f"{self._prefix}batches:"
        args = (self._lease_ms, owner.address, known_ms, _MOST_SWEPT, heads, lists, owner.public, owner.owner_id)
        name = owner.owner_id
        keys = (*self._clock, self._lease(name), self._address(name), self._public(name), self._renewed)
        await self._run("renew", keys, args)

    async def owners(self) -> list[Owner]:
        renewed: Any = await _asked(self._redis.zrevrange(self._renewed, 0, -1))
        names = [name.decode() for name in renewed]
        if not names:
            return []
        keys = [key(name) for name in names for key in (self._lease, self._public)]
        found: Any = await _asked(self._redis.mget(keys))
        rows = zip(names, found[::2], found[1::2], strict=True)
        return [Owner(name, lease.decode(), (public or b"").decode()) for name, lease, public in rows if lease is not None]

    async def find(self, owner_id: str) -> Owner | None:
        return await self._owner(owner_id, self._lease(owner_id))

    async def last_known(self, owner_id: str) -> Owner | None:
        return await self._owner(owner_id, self._address(owner_id))

    async def _owner(self, owner_id: str, key: str) -> Owner | None:
        address: Any = await _asked(self._redis.get(key))
        return None if address is None else Owner(owner_id, address.decode())

    async def resign(self, owner: Owner) -> None:
        name = owner.owner_id
        await _asked(self._redis.delete(self._lease(name), self._address(name), self._public(name)))
        await _asked(self._redis.zrem(self._renewed, name))

    async def close(self) -> None:
        await self._redis.aclose()

    async def _run(self, script: str, keys: Sequence[str], args: Sequence[Any]) -> Any:
        return await _asked(self._scripts[script](keys, args))

    def _keys(self, generation_id: str) -> list[str]:
        """Returns the keys of its hash, its list and its epoch."""
        return [f"{self._prefix}{kind}:{generation_id}" for kind in ("generation", "batches", "epoch")]

    def _key(self, key: str) -> str:
        return f"{self._prefix}key:{key}"

    def _lease(self, owner_id: str) -> str:
        return f"{self._prefix}lease:{owner_id}"

    def _public(self, owner_id: str) -> str:
        return f"{self._prefix}public:{owner_id}"

    def _address(self, owner_id: str) -> str:
        return f"{self._prefix}address:{owner_id}"


async def _asked(answer: Awaitable[_Result]) -> _Result:
    try:
        with redis_failures():
            return await answer
    except ConnectionError as error:
        raise JournalUnavailableError(str(error)) from error
