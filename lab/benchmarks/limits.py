"""What limits cost a request: in memory, and in a Redis server on this machine.

`.venv/bin/python lab/benchmarks/limits.py` admits requests, counts their prompts and settles them, and prints p50 and p99 of
one. `none`: a tenant without limits. `memory`: all limits, in the router's memory. `redis`: the wait of a request for the
server, one at a time and 32 at once, with `--redis redis://127.0.0.1:6379/0`, of which it writes keys that begin with `bench:`.
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import time
import uuid
from collections.abc import Sequence

from prometheus_client import CollectorRegistry

from ryzanstein.auth.tenants import TenantLimits
from ryzanstein.process.background import Background
from ryzanstein.router.access.limits.allowance import TenantAllowance
from ryzanstein.router.access.limits.books.memory import MemoryUsage
from ryzanstein.router.access.limits.metrics import LimitMetrics

ALL = TenantLimits(1e6, 10**6, 10**9, 10**6, 10**12)


async def one(allowance: TenantAllowance) -> float:
    """Returns how long the limits took of a request, without its generation."""
    generation_id = uuid.uuid4().hex
    began = time.perf_counter()
    hold = await allowance.admit("tenant", generation_id, 10)
    hold.accepted(12)
    hold.settle(20)
    return time.perf_counter() - began


def show(name: str, times: Sequence[float]) -> None:
    """Prints a row."""
    ordered = sorted(times)
    p50, p99 = (1e6 * ordered[int(share * len(ordered))] for share in (0.5, 0.99))
    print(f"{name:<20} p50 {p50:8.1f} us   p99 {p99:8.1f} us   of {len(ordered)}")


async def in_memory(name: str, limits: TenantLimits) -> None:
    """Measures the limits of a router alone."""
    registry = CollectorRegistry()
    allowance = TenantAllowance(MemoryUsage(), LimitMetrics(registry), lambda _: limits)
    async with allowance.running(Background("router", registry)):
        times = []
        for _ in range(40):
            gc.collect()
            times += [await one(allowance) for _ in range(500)]
            await allowance._backlog.flushed(1)
    show(name, times)


async def in_redis(url: str) -> None:
    """Measures the limits of routers that share a server."""
    from ryzanstein.router.access.limits.books.redis import RedisLimits
    from ryzanstein.storage.redis_client import redis_client

    registry = CollectorRegistry()
    background = Background("router", registry)
    shared = RedisLimits(redis_client(url), "bench:", "bench", background)
    allowance = TenantAllowance(shared, LimitMetrics(registry), lambda _: ALL, shared=shared, linger_s=0.002, wait_s=5)
    async with allowance.running(background):
        await one(allowance)
        show("redis, one", [await one(allowance) for _ in range(3000)])

        async def client() -> list[float]:
            return [await one(allowance) for _ in range(100)]

        began = time.perf_counter()
        times = [each for some in await asyncio.gather(*(client() for _ in range(32))) for each in some]
        took_s = time.perf_counter() - began
        show("redis, 32 at once", times)
        print(f"{len(times) / took_s:.0f} requests/s")


async def main(url: str) -> None:
    """Measures what the arguments say."""
    await in_memory("none", TenantLimits())
    await in_memory("memory", ALL)
    if url:
        await in_redis(url)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--redis", default="")
    asyncio.run(main(parser.parse_args().redis))
