"""The buckets in memory and those in Redis answer alike; both keep their rates, take refunds, and bound debts."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable
from dataclasses import replace
from datetime import UTC, datetime
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from prometheus_client import CollectorRegistry

from ryzanstein.auth.tenants import TenantLimits
from ryzanstein.process.background import Background
from ryzanstein.router.access.limits.books import redis as redis_book
from ryzanstein.router.access.limits.books import redis_scripts as scripts
from ryzanstein.router.access.limits.books.redis import RedisLimits
from ryzanstein.router.access.limits.bounds import LimitAnswer, LimitBounds, bounds_of
from ryzanstein.router.access.limits.gcra import EPOCH_S, MAX_DEBT_US, Rate
from ryzanstein.router.access.limits.ledger import LocalLedger
from ryzanstein.router.access.limits.usage import NOTHING, UsageCount, UsageReport
from ryzanstein.storage.redis_client import redis_client

BEGAN_US = 50_000_000_000_000
"""August 2026."""


def test_so_many_come_at_once_and_then_one_by_one() -> None:
    rate, full_at, now, admitted = Rate(100.0, 3), 0.0, 1000.0, []
    for step in range(10):
        if rate.wait_us(full_at, now, 1) <= 0:
            full_at = rate.charged(full_at, now, 1)
            admitted.append(step)
        now += 50
    assert admitted == [0, 1, 2, 3, 4, 6, 8]


def test_a_cost_above_the_bucket_waits_for_a_full_one_and_is_a_debt_then() -> None:
    rate = Rate(10.0, 100)
    assert rate.wait_us(0.0, 0.0, 1000) == 0
    full_at = rate.charged(0.0, 0.0, 1000)
    assert rate.wait_us(full_at, 0.0, 1) == 1000 * 10 - 99 * 10
    assert rate.remaining(full_at) == 0


def test_a_refund_never_overfills_and_a_debt_is_bounded() -> None:
    rate = Rate(10.0, 5)
    assert rate.wait_us(rate.charged(100.0, 100.0, -50), 100.0, 5) <= 0
    assert rate.wait_us(rate.charged(rate.charged(100.0, 100.0, -50), 100.0, 5), 100.0, 1) == 10
    assert rate.charged(0.0, 0.0, 10**12) == 5 * 10 + MAX_DEBT_US


@given(st.lists(st.tuples(st.integers(0, 400_000), st.integers(1, 50)), max_size=200), st.integers(1, 20), st.integers(1, 1000))
def test_what_is_admitted_never_exceeds_rate_and_burst(steps: list[tuple[int, int]], burst: int, per_second: int) -> None:
    rate, full_at, now, admitted = Rate(1e6 / per_second, burst), 0.0, float(BEGAN_US), 0
    for after, tries in steps:
        now += after
        for _ in range(tries):
            if rate.wait_us(full_at, now, 1) <= 0:
                full_at, admitted = rate.charged(full_at, now, 1), admitted + 1
    assert admitted <= burst + (now - BEGAN_US) / 1e6 * per_second + 1e-3


class StillLimits(RedisLimits):
    """The scripts of Redis with a clock of the test's, and without times of expiry, which would follow the server's."""

    def __init__(self, client: Any, monkeypatch: pytest.MonkeyPatch) -> None:
        clock = "local time = redis.call('HMGET', 'clock', 's', 'us')"
        for name in ("ADMIT", "REPORT"):
            script = getattr(scripts, name)
            assert scripts.CLOCK in script
            assert scripts.KEEP in script
            still = script.replace(scripts.CLOCK, clock).replace(scripts.KEEP, "")
            monkeypatch.setattr(redis_book, name, still)
        super().__init__(client, "test:", "r", Background("router", CollectorRegistry()), keep_s=1e6, hold_s=1e6)

    async def set(self, now: float) -> None:
        seconds, micros = divmod(int(now), 1_000_000)
        await self._client.hset("clock", mapping={"s": seconds + EPOCH_S, "us": micros})


class Side:
    """The ledger in memory, driven as the allowance does it."""

    def __init__(self, bounds: LimitBounds) -> None:
        self.ledger, self.bounds = LocalLedger(), bounds
        self.counted: dict[str, UsageCount] = {}

    def admit(self, generation_id: str, estimate: int, running: int, now: float) -> LimitAnswer:
        return self.ledger.admit("t", self.bounds, generation_id, estimate, running=running, now=now)

    def report(self, report: UsageReport, now: float) -> None:
        more = report.count.beyond(self.counted.get(report.generation_id, NOTHING))
        self.counted[report.generation_id] = self.counted.get(report.generation_id, NOTHING).plus(more)
        self.ledger.count("t", more.tokens, now)
        self.ledger.charge(
            "t",
            self.bounds,
            report.generation_id,
            self.counted[report.generation_id].tokens,
            now,
            confirmed=report.confirmed,
            ends=not report.live,
        )
        if report.refund:
            self.ledger.refund_request("t", self.bounds, now)


STEPS = st.lists(
    st.one_of(
        st.tuples(st.just("wait"), st.integers(0, 3_000_000), st.just(0)),
        st.tuples(st.just("admit"), st.integers(0, 60), st.just(0)),
        st.tuples(st.just("accept"), st.integers(0, 5), st.integers(0, 60)),
        st.tuples(st.just("grow"), st.integers(0, 5), st.integers(1, 100)),
        st.tuples(st.just("settle"), st.integers(0, 5), st.integers(0, 20)),
        st.tuples(st.just("join"), st.integers(0, 5), st.just(0)),
    ),
    max_size=30,
)
LIMITS = st.builds(
    TenantLimits,
    requests_per_second=st.none() | st.sampled_from([0.3, 1.0, 3.0, 700.0]),
    burst=st.none() | st.integers(1, 4),
    tokens_per_minute=st.none() | st.sampled_from([7, 60, 1000, 99_999]),
    concurrent=st.none() | st.integers(1, 3),
    tokens_per_month=st.none() | st.integers(50, 500),
)


@contextlib.asynccontextmanager
async def in_redis(url: str, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[StillLimits]:
    limits = StillLimits(redis_client(url), monkeypatch)
    yield limits
    await limits.close()


def after(report: UsageReport, kind: str, amount: int) -> UsageReport:
    """The next report of a generation, after something happened to it."""
    count = report.count
    grown = UsageCount(1, count.prompt, count.generated + amount)
    match kind:
        case "accept" if not report.confirmed:
            return replace(report, count=UsageCount(1, amount, count.generated), confirmed=True)
        case "grow" if report.confirmed:
            return replace(report, count=grown)
        case "settle":
            return replace(report, count=grown, live=False)
        case "join" if count == NOTHING:
            return replace(report, live=False, refund=True)
    return report


async def same_answers(shared: StillLimits, limits: TenantLimits, steps: list[tuple[str, int, int]]) -> None:
    await shared._client.flushdb()
    side, now = Side(bounds_of(limits)), float(BEGAN_US)
    live: dict[str, UsageReport] = {}
    for number, (kind, which, amount) in enumerate(steps):
        if kind == "wait":
            now += which
            continue
        await shared.set(now)
        if kind == "admit":
            here = side.admit(f"g{number}", which, len(live), now)
            there = await shared.admit("t", side.bounds, f"g{number}", which, ())
            assert (here.refused, here.level) == (there.refused, there.level)
            assert round(here.wait_us) == there.wait_us
            if not here.refused:
                live[f"g{number}"] = UsageReport("t", f"g{number}", NOTHING, live=True, confirmed=False, bounds=side.bounds)
            continue
        if not live:
            continue
        generation_id = list(live)[which % len(live)]
        report = live[generation_id]
        report = live[generation_id] = after(report, kind, amount)
        if not report.live:
            del live[generation_id]
        side.report(report, now)
        months = await shared.write([report])
        assert months["t"][1] == side.ledger.used("t")
        if not report.live:
            assert await shared.write([replace(report, refund=False)]) == months  # settled twice


async def test_memory_and_redis_give_the_same_answers(start_redis: Callable[..., Any], monkeypatch: pytest.MonkeyPatch) -> None:
    redis = await start_redis()
    loop = asyncio.get_running_loop()
    async with in_redis(redis.url, monkeypatch) as shared:

        @settings(max_examples=120, suppress_health_check=list(HealthCheck))
        @given(LIMITS, STEPS)
        def check(limits: TenantLimits, steps: list[tuple[str, int, int]]) -> None:
            asyncio.run_coroutine_threadsafe(same_answers(shared, limits, steps), loop).result(30)

        await asyncio.to_thread(check)


async def test_the_scripts_know_the_calendar(start_redis: Callable[..., Any], monkeypatch: pytest.MonkeyPatch) -> None:
    redis = await start_redis()
    async with in_redis(redis.url, monkeypatch) as shared:
        for text in (
            "2026-11-30 23:59:59",
            "2026-12-01 00:00:00",
            "2028-02-29 12:00:00",
            "2028-03-01 00:00:00",
            "2100-02-28 23:59:59",
        ):
            at = datetime.fromisoformat(text).replace(tzinfo=UTC)
            await shared.set((at.timestamp() - EPOCH_S) * 1e6)
            assert (await shared.write([UsageReport("t", text.replace(" ", "T"), UsageCount(1, 1, 1))]))["t"][0] == text[:7]
