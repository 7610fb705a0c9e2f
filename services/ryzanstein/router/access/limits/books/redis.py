"""The limits of tenants in one Redis server, which all routers check, and the counts of months there.

A request costs one round trip. Every operation may be repeated: a generation is charged once under its id.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import islice

from redis.asyncio import Redis

from ryzanstein.auth.caller import tenant_digest
from ryzanstein.process.background import Background
from ryzanstein.router.access.limits.books.redis_pipeline import ScriptCall, ScriptPipeline
from ryzanstein.router.access.limits.books.redis_scripts import ADMIT, ATTEND, REPORT, USAGE_KEEP_MS
from ryzanstein.router.access.limits.bounds import UNBOUNDED, LimitAnswer, LimitBounds, LimitKind, TenantLevel
from ryzanstein.router.access.limits.gcra import Rate
from ryzanstein.router.access.limits.usage import (
    MAX_TENANTS,
    MIN_KEEP_S,
    OTHER_TENANTS,
    UsageCount,
    UsageReport,
    UsageRow,
    this_month,
)
from ryzanstein.storage.redis_client import redis_failures

HOLD_S = 60.0
"""How long a generation counts as running without being renewed, for example after its router died."""
_ATTENDED_S = 30.0
_MOST_PER_SCRIPT = 100


class RedisLimits:
    """The `SharedLimits` of routers that share a Redis server.

    A generation is known for `keep_s` after its last report. Keys begin with `prefix`.
    """

    def __init__(
        self,
        client: Redis,
        prefix: str,
        router_id: str,
        background: Background,
        *,
        keep_s: float = MIN_KEEP_S,
        hold_s: float = HOLD_S,
    ) -> None:
        self._client, self._prefix, self._router_id = client, prefix, router_id
        self._times = (round(hold_s * 1000), round(keep_s * 1000))
        self._pipeline = ScriptPipeline(client, (ADMIT, REPORT, ATTEND), background)
        self._named: tuple[str, set[str]] = "", set()
        """A month, and the tenants that are in its list."""
        self._is_full = False
        """No more tenants are counted by name, and all of them are known."""

    async def admit(
        self, tenant: str, bounds: LimitBounds, generation_id: str, estimate: int, before: Sequence[UsageReport]
    ) -> LimitAnswer:
        month = -1 if bounds.month is None else bounds.month
        concurrent = -1 if bounds.concurrent is None else bounds.concurrent
        given = (generation_id, estimate, *self._times, *_rates(bounds), concurrent, month)
        calls = [*self._reporting(tenant, bounds, before), (ADMIT, self._keys(tenant), (_words(given),))]
        refused, wait_us, requests, tokens, running, used = (await self._pipeline.run(calls))[-1].split()
        level = TenantLevel(float(requests), float(tokens), int(running), int(used))
        return LimitAnswer(LimitKind(int(refused)), float(wait_us), level)

    async def write(self, reports: Sequence[UsageReport]) -> dict[str, tuple[str, int]]:
        grouped: dict[tuple[str, LimitBounds], list[UsageReport]] = {}
        for report in reports:
            grouped.setdefault((report.tenant, report.bounds), []).append(report)
        names = await self._names([tenant for tenant, bounds in grouped if bounds is UNBOUNDED])
        calls: list[ScriptCall] = []
        tenants: list[str] = []
        for (tenant, bounds), own in grouped.items():
            calls += self._reporting(names.get(tenant, tenant), bounds, own)
            tenants += [tenant] * (len(calls) - len(tenants))
        await self._name({tenant for tenant, bounds in grouped if bounds is not UNBOUNDED})
        answers = await self._pipeline.run(calls)
        return {tenant: (str(month), int(used)) for tenant, (month, used) in zip(tenants, answers, strict=True)}

    async def total(self, tenant: str) -> tuple[str, int]:
        month = this_month()
        rows = await self.rows(month, tenant)
        return month, sum(row.count.tokens for row in rows)

    async def rows(self, month: str, tenant: str | None) -> list[UsageRow]:
        with redis_failures():
            names = [tenant] if tenant is not None else sorted(map(str, await self._client.smembers(self._index(month))))
            pipeline = self._client.pipeline(transaction=False)
            for name in names:
                pipeline.hmget(self._usage(name) + month, "requests", "prompt", "generated", "tenant")
            found = await pipeline.execute() if names else []
        pairs = zip(names, found, strict=True)
        return [UsageRow(name, month, _count(counts)) for name, counts in pairs if counts[3] is not None]

    async def attend(self) -> int:
        call = (ATTEND, (f"{self._prefix}limits:routers",), (self._router_id, round(_ATTENDED_S * 1000)))
        return int((await self._pipeline.run([call]))[0])

    async def close(self) -> None:
        await self._client.aclose()

    def _reporting(self, tenant: str, bounds: LimitBounds, reports: Sequence[UsageReport]) -> Iterator[ScriptCall]:
        waiting = iter(reports)
        while some := list(islice(waiting, _MOST_PER_SCRIPT)):
            values = [*self._times, *_rates(bounds), USAGE_KEEP_MS]
            for report in some:
                flags = (report.live, report.confirmed, report.refund, report.spent)
                values += [report.generation_id, *map(int, flags), *report.count, *report.known]
            yield REPORT, self._keys(tenant), (_words(values), tenant)

    async def _names(self, tenants: Sequence[str]) -> dict[str, str]:
        """Returns the names that tenants without limits are counted under, where these are others."""
        month, known = self._of_this_month()
        new = [tenant for tenant in tenants if tenant not in known]
        room = 0 if self._is_full or not new else MAX_TENANTS - await self._num_named(month)
        if new and room < len(new) and not self._is_full:
            with redis_failures():
                known |= set(map(str, await self._client.smembers(self._index(month))))
            self._is_full = room <= 0
            new = [tenant for tenant in new if tenant not in known]
        names = dict.fromkeys(new[max(0, room) :], OTHER_TENANTS)
        await self._name({names.get(tenant, tenant) for tenant in new})
        return names

    async def _num_named(self, month: str) -> int:
        with redis_failures():
            return int(await self._client.scard(self._index(month)))

    async def _name(self, tenants: set[str]) -> None:
        """Names tenants in the list of the month."""
        month, known = self._of_this_month()
        if new := tenants - known:
            with redis_failures():
                await self._client.sadd(self._index(month), *new)
                await self._client.pexpire(self._index(month), USAGE_KEEP_MS)
            known |= new

    def _of_this_month(self) -> tuple[str, set[str]]:
        month = this_month()
        if self._named[0] != month:
            self._named, self._is_full = (month, set()), False
        return self._named

    def _keys(self, tenant: str) -> Sequence[str]:
        return f"{self._prefix}limits:{{{tenant_digest(tenant)}}}:", self._usage(tenant)

    def _usage(self, tenant: str) -> str:
        return f"{self._prefix}usage:{{{tenant_digest(tenant)}}}:"

    def _index(self, month: str) -> str:
        return f"{self._prefix}usage:tenants:{month}"


def _words(values: Sequence[str | int]) -> str:
    return " ".join(map(str, values))


def _rates(bounds: LimitBounds) -> Sequence[str | int]:
    return (*_rate(bounds.requests), *_rate(bounds.tokens))


def _rate(rate: Rate | None) -> Sequence[str | int]:
    return (-1, -1) if rate is None else (repr(rate.interval_us), rate.burst)


def _count(counts: Sequence[str | None]) -> UsageCount:
    return UsageCount(*(int(each or 0) for each in counts[:3]))
