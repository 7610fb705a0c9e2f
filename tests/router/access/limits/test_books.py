"""The counts of months: exact whatever is reported twice, and by however many processes, and bounded."""

from __future__ import annotations

import asyncio
import sqlite3
import sys
import uuid
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
from prometheus_client import CollectorRegistry

from ryzanstein.auth.tenants import TenantLimits
from ryzanstein.process.background import Background
from ryzanstein.router.access.limits import backlog
from ryzanstein.router.access.limits.books import memory, sqlite
from ryzanstein.router.access.limits.books import redis as redis_book
from ryzanstein.router.access.limits.books.memory import MemoryUsage
from ryzanstein.router.access.limits.books.redis import RedisLimits
from ryzanstein.router.access.limits.books.sqlite import SqliteUsage
from ryzanstein.router.access.limits.usage import OTHER_TENANTS, UsageBook, UsageCount, UsageReport, this_month
from ryzanstein.storage.redis_client import redis_client


@pytest.fixture(params=["memory", "sqlite", "redis"])
async def book(request: pytest.FixtureRequest, start_redis: Any, tmp_path: Path) -> AsyncIterator[UsageBook]:
    made: UsageBook
    if request.param == "memory":
        made = MemoryUsage()
    elif request.param == "sqlite":
        made = SqliteUsage(tmp_path / "usage.db", "r", 300)
    else:
        made = RedisLimits(redis_client((await start_redis()).url), "test:", "r", Background("router", CollectorRegistry()))
    yield made
    await made.close()


def report(tenant: str, generation_id: str, *count: int, **more: Any) -> UsageReport:
    return UsageReport(tenant, generation_id, UsageCount(*count), **more)


async def counts(book: UsageBook, tenant: str | None = None) -> dict[str, UsageCount]:
    return {row.tenant: row.count for row in await book.rows(this_month(), tenant)}


async def test_only_what_is_new_in_a_report_counts(book: UsageBook) -> None:
    assert await book.write([report("a", "g", 1, 10, 0, live=True)]) == {"a": (this_month(), 10)}
    await book.write([report("a", "g", 1, 10, 256, live=True), report("b", "h", 1, 1, 1)])
    await book.write([report("a", "g", 1, 10, 300)])
    await book.write([report("a", "g", 1, 10, 280)])  # an earlier owner of the generation, late
    assert await book.write([report("a", "g", 1, 10, 300)]) == {"a": (this_month(), 310)}
    assert await counts(book) == {"a": UsageCount(1, 10, 300), "b": UsageCount(1, 1, 1)}
    assert await counts(book, "b") == {"b": UsageCount(1, 1, 1)}
    assert await book.total("a") == (this_month(), 310)
    assert await book.total("nobody") == (this_month(), 0)


async def test_what_the_store_has_forgotten_counts_from_what_its_reporter_knows(book: UsageBook) -> None:
    await book.write([report("a", "new", 1, 10, 300, known=UsageCount(1, 10, 256))])
    assert await counts(book) == {"a": UsageCount(0, 0, 44)}


async def test_nothing_is_counted_of_what_did_nothing(book: UsageBook) -> None:
    await book.write([report("a", "g", 0, 0, 0)])
    assert await counts(book) == {}


async def test_tenants_beyond_the_bound_are_counted_together(book: UsageBook, monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (memory, sqlite, redis_book):
        monkeypatch.setattr(module, "MAX_TENANTS", 3)
    for number in range(6):
        await book.write([report(f"t{number}", f"g{number}", 1, 1, 0)])
    await book.write([report("t0", "h", 1, 1, 0), report("t5", "i", 1, 1, 0)])
    found = await counts(book)
    assert found == {
        **{f"t{i}": UsageCount(1 + (i == 0), 1 + (i == 0), 0) for i in range(3)},
        OTHER_TENANTS: UsageCount(4, 4, 0),
    }


PROGRAM = """
import asyncio, sys
from pathlib import Path
from ryzanstein.router.access.limits.books.sqlite import SqliteUsage
from ryzanstein.router.access.limits.usage import UsageCount, UsageReport

async def main(path, name):
    book = SqliteUsage(Path(path), name, 300)
    print("routers", await book.attend())
    for number in range(100):
        own = UsageReport("acme", f"{name}-{number}", UsageCount(1, 3, number))
        both = UsageReport("acme", f"both-{number}", UsageCount(1, 5, 7))
        await book.write([own, both])
    await book.close()

asyncio.run(main(*sys.argv[1:]))
"""


async def test_processes_that_share_a_file_count_exactly(tmp_path: Path) -> None:
    path = tmp_path / "usage.db"

    async def run(name: str) -> int | None:
        process = await asyncio.create_subprocess_exec(sys.executable, "-P", "-c", PROGRAM, str(path), name)
        return await process.wait()

    assert await asyncio.gather(*map(run, ("one", "two", "three"))) == [0, 0, 0]
    book = SqliteUsage(path, "r", 300)
    own = 3 * sum(range(100))
    assert await counts(book) == {"acme": UsageCount(3 * 100 + 100, 3 * 100 * 3 + 100 * 5, own + 100 * 7)}
    assert await book.attend() == 4
    assert path.stat().st_mode & 0o077 == 0
    await book.close()


async def test_a_file_that_another_process_holds_is_an_outage_and_loses_nothing(tmp_path: Path, start_limited: Any) -> None:
    path = tmp_path / "usage.db"
    router = await start_limited(book=SqliteUsage(path, "r", 300), limits=TenantLimits(requests_per_second=1e6))
    await router.used()
    with sqlite3.connect(path, isolation_level=None) as other:
        other.execute("BEGIN IMMEDIATE")
        hold = await router.allowance.admit("acme", "g", 1)
        hold.accepted(2)
        hold.settle(3)
        async with asyncio.timeout(5):
            while not router.value("limits_degraded"):  # noqa: ASYNC110 - the metric tells nobody
                await asyncio.sleep(0.01)
        other.execute("ROLLBACK")
    async with asyncio.timeout(5):
        while await router.used() != UsageCount(1, 2, 3):  # noqa: ASYNC110 - it tells nobody when it is back
            await asyncio.sleep(0.05)
    assert router.value("limits_degraded") == 0


async def test_a_store_that_is_away_for_long_costs_bounded_memory_and_no_count(
    start_redis: Any, start_limited: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(backlog, "MOST_WAITING", 50)
    redis = await start_redis()
    router = await start_limited(redis, limits=TenantLimits(tokens_per_minute=10**9, concurrent=1000))
    await redis.kill()
    total = UsageCount()
    for number in range(700):
        hold = await router.allowance.admit("acme", uuid.uuid4().hex, 1)
        hold.accepted(number)
        hold.settle(2)
        total = total.plus(UsageCount(1, number, 2))
        assert len(router.allowance._backlog) <= 50 + backlog._MOST_AT_ONCE
        if number % 100 == 0:
            await asyncio.sleep(0.02)
    assert len(router.allowance._freeing.get("acme", {})) <= 50 + backlog._MOST_AT_ONCE
    await redis.start()
    async with asyncio.timeout(10):
        while await router.used() != total:  # noqa: ASYNC110 - it tells nobody when it is back
            await asyncio.sleep(0.05)
    assert router.value("limits_degraded") == 0
    assert len(router.allowance._backlog) == 0
    # What was admitted meanwhile, from this router's share, is not charged to the minute that begins now.
    hold = await router.allowance.admit("acme", "after", 1)
    hold.settle(0)
    assert int(router.allowance.shown("acme")["x-ratelimit-remaining-tokens"]) >= 10**9 - 1
