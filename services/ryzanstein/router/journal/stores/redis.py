"""A journal in Redis, for routers on several hosts.

A generation is a hash (owner, epoch, request, time of the last append), a list of batches, and a key
with its epoch that outlives them. A lease is a key; its owner's address is another one that
outlives it. Redis expires them. Everything that compares an epoch is a script, so it is atomic. A
call that exceeds its timeout counts as an outage instead of being waited for. Every call is safe to
repeat.
"""

from __future__ import annotations

from collections.abc import Awaitable, Sequence
from typing import Any, TypeVar

from redis.asyncio import Redis

from ryzanstein.router.journal.journal import (
    EXPIRED_KEEP_S,
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
from ryzanstein.router.storage.redis_client import redis_failures

_OUTCOMES = (AppendOutcome.WRITTEN, AppendOutcome.FENCED, AppendOutcome.MISSING, AppendOutcome.EXPIRED)

# ARGV: retention in ms, how long the epoch is kept in ms, owner id, address, then epoch, batch and
# request of each generation
# KEYS: its hash, its list and its epoch
_WRITE = """
local outcomes, time = {}, redis.call('TIME')
local now = string.format('%.0f', time[1] * 1000 + time[2] / 1000)
for i = 1, #KEYS / 3 do
    local head, rows, last = KEYS[3 * i - 2], KEYS[3 * i - 1], KEYS[3 * i]
    local epoch, batch, request = ARGV[3 * i + 2], ARGV[3 * i + 3], ARGV[3 * i + 4]
    local known = redis.call('HGET', head, 'epoch')
    if known and known ~= epoch then
        outcomes[i] = 1
    elseif not known and request == '' then
        outcomes[i] = redis.call('GET', last) == epoch and 3 or 2
    else
        if not known then
            redis.call('DEL', rows)
            redis.call('HSET', head, 'epoch', epoch, 'owner_id', ARGV[3], 'address', ARGV[4], 'request', request)
        end
        redis.call('HSET', head, 'written_ms', now)
        if batch ~= '' then redis.call('RPUSH', rows, batch) end
        redis.call('PEXPIRE', head, ARGV[1])
        redis.call('PEXPIRE', rows, ARGV[1])
        redis.call('SET', last, epoch, 'PX', ARGV[2])
        outcomes[i] = 0
    end
end
return outcomes
"""
_REMOVE = """
for i = 1, #KEYS / 3 do
    if redis.call('HGET', KEYS[3 * i - 2], 'epoch') == ARGV[i] then
        redis.call('DEL', KEYS[3 * i - 2], KEYS[3 * i - 1], KEYS[3 * i])
    end
end
"""
_TAKE = """
if redis.call('HGET', KEYS[1], 'epoch') ~= ARGV[2] then return false end
redis.call('HSET', KEYS[1], 'epoch', ARGV[2] + 1, 'owner_id', ARGV[3], 'address', ARGV[4])
redis.call('PEXPIRE', KEYS[1], ARGV[1])
redis.call('PEXPIRE', KEYS[2], ARGV[1])
redis.call('SET', KEYS[3], ARGV[2] + 1, 'PX', ARGV[5])
local time, written = redis.call('TIME'), redis.call('HGET', KEYS[1], 'written_ms')
local age_ms = written and math.max(0, time[1] * 1000 + time[2] / 1000 - written) or 0
return {redis.call('HGET', KEYS[1], 'request'), redis.call('LRANGE', KEYS[2], 0, -1), age_ms}
"""
# ARGV: generation, body, how long a claim holds before its generation is opened, how long it is
# kept, prefix of the heads. It is not known in advance which head is read, so it cannot be in KEYS,
# as a Redis cluster would require.
_CLAIM_KEY = """
local held = redis.call('HMGET', KEYS[1], 'generation_id', 'body', 'kept_ms')
if held[1] and held[1] ~= ARGV[1] then
    local begun = redis.call('EXISTS', ARGV[5] .. held[1])
    if begun == 1 or tonumber(held[3]) - redis.call('PTTL', KEYS[1]) < tonumber(ARGV[3]) then
        return {held[1], held[2], begun}
    end
end
redis.call('DEL', KEYS[1])
redis.call('HSET', KEYS[1], 'generation_id', ARGV[1], 'body', ARGV[2], 'kept_ms', ARGV[4])
redis.call('PEXPIRE', KEYS[1], ARGV[4])
return false
"""
_FREE_KEY = """
if redis.call('HGET', KEYS[1], 'generation_id') == ARGV[1] then redis.call('DEL', KEYS[1]) end
"""
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
        self._epoch_ms = int(1000 * (retention_s + EXPIRED_KEEP_S))
        self._write_script = self._redis.register_script(_WRITE)
        self._remove_script = self._redis.register_script(_REMOVE)
        self._take_script = self._redis.register_script(_TAKE)
        self._claim_key_script = self._redis.register_script(_CLAIM_KEY)
        self._free_key_script = self._redis.register_script(_FREE_KEY)

    async def write(self, owner: Owner, appends: Sequence[Append]) -> list[AppendOutcome]:
        keys = [key for append in appends for key in self._keys(append.generation_id)]
        args: list[Any] = [self._retention_ms, self._epoch_ms, owner.owner_id, owner.address]
        for append in appends:
            args += (append.epoch, append.batch, append.request or b"")
        return [_OUTCOMES[number] for number in await _asked(self._write_script(keys, args))]

    async def remove(self, generations: Sequence[tuple[str, int]]) -> None:
        keys = [key for generation_id, _ in generations for key in self._keys(generation_id)]
        await _asked(self._remove_script(keys, [epoch for _, epoch in generations]))

    async def head(self, generation_id: str) -> Head | None:
        fields = self._redis.hmget(self._keys(generation_id)[0], ["owner_id", "address", "epoch"])
        values: list[Any] = await _asked(fields)
        owner_id, address, epoch = values
        return None if epoch is None else Head(Owner(owner_id.decode(), address.decode()), int(epoch))

    async def take(self, generation_id: str, epoch: int, owner: Owner) -> JournalRecord | None:
        args = (self._retention_ms, epoch, owner.owner_id, owner.address, self._epoch_ms)
        taken = await _asked(self._take_script(self._keys(generation_id), args))
        return None if taken is None else JournalRecord(epoch + 1, taken[0], tuple(taken[1]), taken[2] / 1000)

    async def claim_key(self, key: str, claim: KeyClaim, keep_s: float) -> KeyClaim | None:
        times = (int(1000 * KEY_HOLD_S), int(1000 * max(keep_s, KEY_HOLD_S)))
        args = (claim.generation_id, claim.body, *times, f"{self._prefix}generation:")
        held = await _asked(self._claim_key_script([self._key(key)], args))
        return None if held is None else KeyClaim(held[0].decode(), held[1], bool(held[2]))

    async def free_key(self, key: str, generation_id: str) -> None:
        await _asked(self._free_key_script([self._key(key)], [generation_id]))

    async def renew(self, owner: Owner) -> None:
        both = self._redis.pipeline(transaction=True)
        both.set(self._lease(owner.owner_id), owner.address, px=self._lease_ms)
        both.set(self._address(owner.owner_id), owner.address, px=self._lease_ms + int(1000 * LAST_KNOWN_KEEP_S))
        await _asked(both.execute())

    async def find(self, owner_id: str) -> Owner | None:
        return await self._owner(owner_id, self._lease(owner_id))

    async def last_known(self, owner_id: str) -> Owner | None:
        return await self._owner(owner_id, self._address(owner_id))

    async def _owner(self, owner_id: str, key: str) -> Owner | None:
        address: Any = await _asked(self._redis.get(key))
        return None if address is None else Owner(owner_id, address.decode())

    async def resign(self, owner: Owner) -> None:
        await _asked(self._redis.delete(self._lease(owner.owner_id), self._address(owner.owner_id)))

    async def close(self) -> None:
        await self._redis.aclose()

    def _keys(self, generation_id: str) -> list[str]:
        """Returns the keys of its hash, its list and its epoch."""
        return [f"{self._prefix}{kind}:{generation_id}" for kind in ("generation", "batches", "epoch")]

    def _key(self, key: str) -> str:
        return f"{self._prefix}key:{key}"

    def _lease(self, owner_id: str) -> str:
        return f"{self._prefix}lease:{owner_id}"

    def _address(self, owner_id: str) -> str:
        return f"{self._prefix}address:{owner_id}"


async def _asked(answer: Awaitable[_Result]) -> _Result:
    try:
        with redis_failures():
            return await answer
    except ConnectionError as error:
        raise JournalUnavailableError(str(error)) from error
