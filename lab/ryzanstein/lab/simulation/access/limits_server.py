"""The server of the limits that simulated routers share, as Redis is: with a latency, and sometimes away.

What it does with a request or a report is what the scripts in Redis do; a test compares those with the
same ledger.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Sequence

from ryzanstein.lab.simulation.machine import clock
from ryzanstein.router.access.limits.allowance import LimitsOf, TenantAllowance
from ryzanstein.router.access.limits.bounds import LimitAnswer, LimitBounds
from ryzanstein.router.access.limits.ledger import LocalLedger
from ryzanstein.router.access.limits.metrics import LimitMetrics
from ryzanstein.router.access.limits.usage import NOTHING, UsageCount, UsageReport, UsageRow
from ryzanstein.router.telemetry import RouterTelemetry

_LATENCY_S = 0.0005
_HANGS_S = 2.0
_HOLD_S = 60.0
_ATTENDED_S = 30.0


class LimitsServer:
    """The state of the limits, which no fault of a router touches."""

    def __init__(self) -> None:
        self.is_away = self.hangs = False
        self.counted: dict[str, UsageCount] = {}
        """What was charged, by generation."""
        self._ledger = LocalLedger()
        self._running: dict[str, tuple[str, LimitBounds, float]] = {}
        self._settled: set[str] = set()
        self._routers: dict[str, float] = {}

    async def reach(self) -> None:
        """Returns when the server is reached. Raises ConnectionError while it is away."""
        await asyncio.sleep(_LATENCY_S)
        if self.is_away:
            if self.hangs:
                await asyncio.sleep(_HANGS_S)
            raise ConnectionError("the server of the limits is away")

    def num_running(self, tenant: str | None = None) -> int:
        """Returns how many generations hold a part of the limits of a tenant, or of any."""
        now = clock.CLOCK.now
        for generation_id, (owner, bounds, until) in list(self._running.items()):
            if until <= now:
                tokens = self.counted.get(generation_id, NOTHING).tokens
                self._ledger.charge(owner, bounds, generation_id, tokens, now * 1e6, confirmed=True, ends=True)
                del self._running[generation_id]
        return sum(tenant in (None, owner) for owner, _, _ in self._running.values())

    def admit(self, tenant: str, bounds: LimitBounds, generation_id: str, estimate: int) -> LimitAnswer:
        now = clock.CLOCK.now
        running = self.num_running(tenant)
        answer = self._ledger.admit(tenant, bounds, generation_id, estimate, running=running, now=now * 1e6)
        if not answer.refused:
            self._running[generation_id] = tenant, bounds, now + _HOLD_S
        return answer

    def report(self, report: UsageReport) -> None:
        now, generation_id = clock.CLOCK.now, report.generation_id
        before = self.counted.get(generation_id, NOTHING)
        more = report.count.beyond(before)
        self.counted[generation_id] = before.plus(more)
        self._ledger.count(report.tenant, more.tokens, now * 1e6)
        self._ledger.charge(
            report.tenant,
            report.bounds,
            generation_id,
            self.counted[generation_id].tokens,
            now * 1e6,
            confirmed=report.confirmed,
            ends=not report.live,
        )
        if report.refund:
            self._ledger.refund_request(report.tenant, report.bounds, now * 1e6)
        if not report.live:
            self._settled.add(generation_id)
            self._running.pop(generation_id, None)
        elif generation_id not in self._settled:
            self._running[generation_id] = report.tenant, report.bounds, now + _HOLD_S

    def used(self, tenant: str) -> tuple[str, int]:
        return "2026-11", self._ledger.used(tenant)

    def attended(self, router_id: str) -> int:
        now = clock.CLOCK.now
        self._routers[router_id] = now
        return sum(now < at + _ATTENDED_S for at in self._routers.values())


class SimulatedLimits:
    """The `SharedLimits` of one router."""

    def __init__(self, server: LimitsServer, router_id: str) -> None:
        self._server, self._router_id = server, router_id

    async def admit(
        self, tenant: str, bounds: LimitBounds, generation_id: str, estimate: int, before: Sequence[UsageReport]
    ) -> LimitAnswer:
        await self.write(before)
        return self._server.admit(tenant, bounds, generation_id, estimate)

    async def write(self, reports: Sequence[UsageReport]) -> dict[str, tuple[str, int]]:
        await self._server.reach()
        for report in reports:
            self._server.report(report)
        return {report.tenant: self._server.used(report.tenant) for report in reports}

    async def total(self, tenant: str) -> tuple[str, int]:
        await self._server.reach()
        return self._server.used(tenant)

    async def rows(self, month: str, tenant: str | None) -> list[UsageRow]:
        await self._server.reach()
        return []

    async def attend(self) -> int:
        await self._server.reach()
        return self._server.attended(self._router_id)

    async def close(self) -> None: ...


@contextlib.asynccontextmanager
async def open_simulated(
    server: LimitsServer, router_id: str, telemetry: RouterTelemetry, limits_of: LimitsOf
) -> AsyncIterator[TenantAllowance]:
    """Yields what tenants may use, checked at the server, as `open_allowance` does with Redis."""
    limits, metrics = SimulatedLimits(server, router_id), LimitMetrics(telemetry.registry)
    allowance = TenantAllowance(limits, metrics, limits_of, shared=limits, linger_s=0.002)
    async with allowance.running(telemetry.background):
        yield allowance
