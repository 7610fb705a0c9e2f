"""The lease in Redis: one hash, replaced by a script that compares its version.

It does not expire: a standby measures for how long it did not change. A failover of Redis may lose the
last writes. The holder then finds another record than it wrote, and leads no more.
"""

from __future__ import annotations

import uuid
from typing import Any

from redis.asyncio import Redis

from ryzanstein.orchestrator.leading.lease import LeaseRecord, LeaseUnavailableError
from ryzanstein.storage.redis_client import redis_failures

_FIELDS = ("version", "holder", "address", "epoch")
# ARGV: version that was seen, then the new version, holder, address, epoch. It is sent again when its answer was lost.
_REPLACE = """
local version = redis.call('HGET', KEYS[1], 'version') or ''
if version ~= ARGV[2] then
    if version ~= ARGV[1] then return 0 end
    redis.call('HSET', KEYS[1], 'version', ARGV[2], 'holder', ARGV[3], 'address', ARGV[4], 'epoch', ARGV[5])
end
return 1
"""


class RedisLease:
    """A `LeaseProvider`. The client decodes answers; `close` closes it."""

    def __init__(self, client: Redis, prefix: str) -> None:
        self._redis = client
        self._key = f"{prefix}orchestrator:lease"
        self._replace = client.register_script(_REPLACE)

    async def read(self) -> LeaseRecord:
        try:
            with redis_failures():
                found: Any = await self._redis.hmget(self._key, _FIELDS)
            version, holder, address, epoch = (each or "" for each in found)
            return LeaseRecord(version, holder, address, int(epoch or 0))
        except (ConnectionError, ValueError) as error:
            raise LeaseUnavailableError(str(error)) from error

    async def replace(self, seen: LeaseRecord, wanted: LeaseRecord) -> LeaseRecord | None:
        version = uuid.uuid4().hex
        args = (seen.version, version, wanted.holder, wanted.address, wanted.epoch)
        try:
            with redis_failures():
                done = await self._replace([self._key], args)
        except ConnectionError as error:
            raise LeaseUnavailableError(str(error)) from error
        return LeaseRecord(version, wanted.holder, wanted.address, wanted.epoch) if done else None

    async def close(self) -> None:
        await self._redis.aclose()
