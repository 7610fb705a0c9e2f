"""Several routers on one Redis server: together they keep a tenant's limits, also while one dies or the server is away."""

from __future__ import annotations

import asyncio
import signal
import time
import uuid
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import pytest

from ryzanstein.auth.tenants import TenantLimits
from ryzanstein.errors import RyzansteinError
from ryzanstein.router.access.limits.usage import UsageCount
from ryzanstein.storage.redis_client import redis_client


async def request(router: Any, prompt: int, generated: int, estimate: int | None = None, hold_s: float = 0.0) -> int:
    """Admits a request and runs it. Returns the tokens that it used."""
    hold = await router.allowance.admit("acme", uuid.uuid4().hex, prompt if estimate is None else estimate)
    hold.accepted(prompt)
    await asyncio.sleep(hold_s)
    hold.settle(generated)
    return prompt + generated


async def refusal(call: Any) -> RyzansteinError:
    with pytest.raises(RyzansteinError) as refused:
        await call
    return refused.value


async def test_many_clients_at_three_routers_get_the_limit_and_no_more(start_redis: Any, start_limited: Any) -> None:
    redis = await start_redis()
    limits = TenantLimits(requests_per_second=40, burst=10, tokens_per_minute=6_000_000)
    routers = [await start_limited(redis, limits=limits) for _ in range(3)]
    used, admitted, refused = 0, 0, 0
    began = time.monotonic()
    until = began + 4

    async def client(router: Any, number: int) -> None:
        nonlocal used, admitted, refused
        while time.monotonic() < until:
            try:
                tokens = await request(router, 10 + number, number % 7)
                used, admitted = used + tokens, admitted + 1
            except RyzansteinError as error:
                refused += 1
                await asyncio.sleep(min(0.05, error.retry_after_s or 0))

    await asyncio.gather(*(client(routers[i % 3], i) for i in range(30)))
    took_s = time.monotonic() - began
    allowed = 10 + 40 * took_s
    assert 0.95 * allowed <= admitted <= allowed + 1
    assert refused > 100
    for router in routers:
        await router.used()  # what it has to report is reported then
    count = await routers[0].used()
    assert (count.requests, count.tokens) == (admitted, used)
    assert sum(router.value("limited_total", limit="requests_per_second") for router in routers) == refused


async def test_tokens_of_a_minute_are_shared(start_redis: Any, start_limited: Any) -> None:
    redis = await start_redis()
    limits = TenantLimits(tokens_per_minute=6000)
    routers = [await start_limited(redis, limits=limits) for _ in range(3)]
    used, began = 0, time.monotonic()
    while time.monotonic() < began + 2:
        for router in routers:
            with suppress(RyzansteinError):
                used += await request(router, 25, 25, estimate=30)
        await asyncio.sleep(0.01)
    allowed = 6000 + 100 * (time.monotonic() - began)
    assert 0.95 * allowed <= used <= allowed + 3 * 50  # answers that had begun


async def test_a_refused_request_changes_nothing(start_redis: Any, start_limited: Any) -> None:
    redis = await start_redis()
    router = await start_limited(redis, limits=TenantLimits(requests_per_second=0.01, burst=2, tokens_per_minute=100))
    await request(router, 5, 5)
    await request(router, 5, 5)
    await router.used()
    client = redis_client(redis.url)
    names = sorted(name for name in await client.keys("test:*") if "routers" not in name)
    before = [await client.dump(name) for name in names]
    ends = [await client.pttl(name) for name in names]
    refusals = [await refusal(router.allowance.admit("acme", f"g{i}", 1)) for i in range(500)]
    assert {error.metadata["quota"] for error in refusals} == {"requests_per_second"}
    assert sorted(name for name in await client.keys("test:*") if "routers" not in name) == names
    assert [await client.dump(name) for name in names] == before
    assert [name for name, end in zip(names, ends, strict=True) if await client.pttl(name) > end] == []
    assert 190_000 < await client.pttl(next(name for name in names if name.endswith("}:requests"))) <= 200_000
    await client.aclose()


async def test_the_holds_of_a_router_that_died_are_free_after_their_time(start_redis: Any, start_limited: Any) -> None:
    redis = await start_redis()
    limits = TenantLimits(concurrent=5, tokens_per_month=1000)
    dead = await start_limited(redis, limits=limits, hold_s=0.5)
    for i in range(5):
        await dead.allowance.admit("acme", f"g{i}", 100)  # it dies with them
    alive = await start_limited(redis, limits=limits, hold_s=0.5)
    assert (await refusal(alive.allowance.admit("acme", "x", 1))).metadata["quota"] == "concurrent"
    await asyncio.sleep(0.6)
    hold = await alive.allowance.admit("acme", "y", 900)  # nor is anything reserved of the month
    hold.settle(0)


async def test_a_generation_that_another_router_takes_over_is_charged_once(start_redis: Any, start_limited: Any) -> None:
    redis = await start_redis()
    limits = TenantLimits(tokens_per_minute=1000, concurrent=1)
    first, second = [await start_limited(redis, limits=limits) for _ in range(2)]
    hold = await first.allowance.admit("acme", "g", 50)
    hold.accepted(40)
    hold.grown(256)
    await first.used()
    other = second.allowance.adopt("acme", "g", 40, 250)
    assert (await refusal(second.allowance.admit("acme", "h", 1))).metadata["quota"] == "concurrent"
    other.grown(506)
    other.settle(600)
    other.settle(600)
    await second.used()
    hold.settle(256)  # the first one wakes up and learns nothing of it
    assert await first.used() == await second.used() == UsageCount(1, 40, 600)
    await request(second, 1, 0)
    shown = second.allowance.shown("acme")
    assert 355 <= int(shown["x-ratelimit-remaining-tokens"]) <= 400
    assert second.value("tenant_tokens_total", tenant="acme", kind="generated") == 350


async def test_a_tenant_without_limits_waits_for_nothing(start_redis: Any, start_limited: Any) -> None:
    redis = await start_redis()
    router = await start_limited(redis)
    await redis.kill()
    for _ in range(100):
        began = time.monotonic()
        await request(router, 1, 1)
        assert time.monotonic() - began < 0.05
    await redis.start()
    async with asyncio.timeout(10):
        while await router.used() != UsageCount(100, 100, 100):  # noqa: ASYNC110 - it tells nobody when it is back
            await asyncio.sleep(0.05)


async def test_a_server_that_is_away_adds_no_wait_and_loses_no_count(
    start_redis: Any, start_limited: Any, until: Callable[..., Any]
) -> None:
    redis = await start_redis()
    limits = TenantLimits(requests_per_second=60, burst=6, concurrent=300, tokens_per_month=10**9)
    routers = [await start_limited(redis, limits=limits) for _ in range(2)]
    used, admitted, waits = 0, 0, []
    reasons: set[str] = set()
    stop = asyncio.Event()

    async def client(router: Any, number: int) -> None:
        nonlocal used, admitted
        while not stop.is_set():
            began = time.monotonic()
            try:
                tokens = await request(router, number, 3)
                used, admitted = used + tokens, admitted + 1
            except RyzansteinError as error:
                reasons.add(error.reason)
            waits.append((began, time.monotonic() - began))
            await asyncio.sleep(0.02)

    began = time.monotonic()
    clients = [asyncio.ensure_future(client(routers[i % 2], i)) for i in range(20)]
    await asyncio.sleep(0.5)
    for router in routers:  # the first one has not looked since the second one came
        router.allowance._routers = await router.allowance._book.attend()
    await redis.kill()
    await until(lambda: all(router.value("limits_degraded") == 1 for router in routers))
    opened = time.monotonic()
    await asyncio.sleep(1.5)
    closing = time.monotonic()
    await redis.start()
    await until(lambda: all(router.value("limits_degraded") == 0 for router in routers))
    await asyncio.sleep(0.5)
    stop.set()
    await asyncio.gather(*clients)
    took_s = time.monotonic() - began
    assert reasons == {"RATE_LIMITED"}
    while_away = sorted(wait for at, wait in waits if opened <= at <= closing)
    assert len(while_away) > 500
    assert while_away[int(0.9 * len(while_away))] < 0.005
    assert while_away[-1] < 0.2  # nobody waited for the server
    assert admitted <= 1.2 * (6 + 60 * took_s) + 6
    assert admitted >= 0.8 * 60 * took_s
    for router in routers:
        await router.used()
    count = await routers[0].used()
    assert (count.requests, count.tokens) == (admitted, used)


async def test_a_server_that_hangs_holds_requests_up_once(
    start_redis: Any, start_limited: Any, until: Callable[..., Any]
) -> None:
    redis = await start_redis()
    router = await start_limited(redis, limits=TenantLimits(requests_per_second=1e6, burst=1000))
    used = await request(router, 1, 1)
    redis.process.send_signal(signal.SIGSTOP)
    try:
        began = time.monotonic()
        used += sum(await asyncio.gather(*(request(router, 1, 1) for _ in range(20))))
        assert 0.45 < time.monotonic() - began < 1.5
        assert router.value("limits_degraded") == 1
        began = time.monotonic()
        for _ in range(100):
            used += 2
            await request(router, 1, 1)
        assert time.monotonic() - began < 0.2
    finally:
        redis.process.send_signal(signal.SIGCONT)
    await until(lambda: router.value("limits_degraded") == 0)
    await router.used()
    assert (await router.used()).tokens == used
