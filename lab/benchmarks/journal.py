"""Measures the overhead of the journal on the token path: memory, SQLite and Redis in turn, over a scripted node.

    .venv/bin/python lab/benchmarks/journal.py [--json]

64 streams of 256 tokens each; the node offers more tokens than any router can take, so the router is the bottleneck. Reports
for each store, as medians over interleaved rounds: tokens per second, the router's CPU time per token (valid on a machine with
other load, too), and the duration of a journal write.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import shutil
import socket
import sys
import tempfile
import time
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path
from statistics import median

import psutil
from prometheus_client.parser import text_string_to_metric_families

from ryzanstein.cli.processes.ports import free_ports
from ryzanstein.cli.status import scrape
from ryzanstein.lab.bench.router.load.connections import StreamLoad, connections, connections_for, ready
from ryzanstein.lab.bench.router.scripted.script import Script
from ryzanstein.lab.bench.router.systems import running_node

STORES = ("memory", "sqlite", "redis")
STREAMS = 64
TOKENS = 256
OFFERED_TOKENS_PER_S = 64_000
WARM_UP_S = 0.5


@dataclass(frozen=True)
class Router:
    """A router in front of the node, with one of the stores."""

    store: str
    port: int
    metrics_port: int
    process: psutil.Process

    def cpu_s(self) -> float:
        times = self.process.cpu_times()
        return float(times.user + times.system)

    def flushes(self) -> tuple[float, float]:
        """How many writes of the journal so far, and their seconds."""
        families = text_string_to_metric_families(scrape.page(f"http://127.0.0.1:{self.metrics_port}/metrics"))
        values = {sample.name: sample.value for family in families for sample in family.samples}
        name = "ryzanstein_router_journal_flush_seconds"
        return values.get(f"{name}_count", 0.0), values.get(f"{name}_sum", 0.0)


@contextlib.asynccontextmanager
async def running(*command: str) -> AsyncIterator[psutil.Process]:
    process = await asyncio.create_subprocess_exec(*command, stdout=asyncio.subprocess.DEVNULL)
    try:
        yield psutil.Process(process.pid)
    finally:
        with contextlib.suppress(ProcessLookupError):
            process.terminate()
        await process.wait()


@contextlib.asynccontextmanager
async def running_router(store: str, node_port: int, redis_url: str, folder: Path) -> AsyncIterator[Router]:
    port, metrics_port = free_ports(2)
    flags = {
        "grpc-port": port,
        "metrics-port": metrics_port,
        "nodes": f"127.0.0.1:{node_port}",
        "state-dir": folder / store,
        "session-store": store,
        "log-level": "warning",
        "drain-grace-s": 1,
    } | ({"redis-url": redis_url} if store == "redis" else {})
    words = [word for name, value in flags.items() for word in (f"--{name}", str(value))]
    async with running(sys.executable, "-P", "-m", "ryzanstein.router", "--no-http", *words) as process:
        await listening(port)
        await ready(port)
        yield Router(store, port, metrics_port, process)


@contextlib.asynccontextmanager
async def running_redis(folder: Path) -> AsyncIterator[str]:
    program = shutil.which("redis-server")
    if program is None:
        raise SystemExit("redis-server is not installed: make parts")
    (port,) = free_ports(1)
    async with running(program, "--port", str(port), "--bind", "127.0.0.1", "--save", "", "--dir", str(folder)):
        await listening(port)
        yield f"redis://127.0.0.1:{port}/0"


async def listening(port: int, timeout_s: float = 20.0) -> None:
    deadline = time.monotonic() + timeout_s
    while time.monotonic() < deadline:
        with contextlib.suppress(OSError):
            socket.create_connection(("127.0.0.1", port), timeout=1).close()
            return
        await asyncio.sleep(0.05)
    raise SystemExit(f"nothing listens on port {port}")


async def measured(router: Router, seconds: float) -> dict[str, float]:
    """One window."""
    script = Script(TOKENS, STREAMS / OFFERED_TOKENS_PER_S)
    async with connections(router.port, connections_for(STREAMS)) as opened:
        load = StreamLoad(opened, script)
        load.start(STREAMS)
        await asyncio.sleep(WARM_UP_S)
        tokens, cpu_s, begun = load.so_far().tokens, router.cpu_s(), time.monotonic()
        count, sum_s = router.flushes()
        await asyncio.sleep(seconds)
        tokens, cpu_s, took_s = load.so_far().tokens - tokens, router.cpu_s() - cpu_s, time.monotonic() - begun
        flushes, flush_s = (after - before for after, before in zip(router.flushes(), (count, sum_s), strict=True))
        tally = await load.stop(60.0)
    if tally.problems:
        raise SystemExit(f"{router.store}: {tally.problems[0]}")
    return {
        "tokens_per_s": tokens / took_s,
        "router_cpu_us_per_token": 1e6 * cpu_s / tokens,
        "flush_ms": 1e3 * flush_s / flushes if flushes else 0.0,
    }


async def measure(rounds: int, seconds: float) -> list[dict[str, float | str]]:
    figures: dict[str, list[dict[str, float]]] = {store: [] for store in STORES}
    with tempfile.TemporaryDirectory(prefix="journal-") as made:
        folder = Path(made)
        async with running_node() as node, running_redis(folder) as redis_url, contextlib.AsyncExitStack() as stack:
            start = [running_router(store, node.port, redis_url, folder) for store in STORES]
            routers = [await stack.enter_async_context(router) for router in start]
            for _ in range(rounds):
                for router in routers:
                    figures[router.store].append(await measured(router, seconds))
    medians = {store: {name: median(one[name] for one in some) for name in some[0]} for store, some in figures.items()}
    return [{"store": store, **figures} for store, figures in medians.items()]


def main() -> None:
    options = argparse.ArgumentParser(description="Measure the overhead of the journal of generations.")
    options.add_argument("--json", action="store_true", help="print one JSON document")
    options.add_argument("--rounds", type=int, default=9)
    options.add_argument("--seconds", type=float, default=3.0)
    given = options.parse_args()
    results = asyncio.run(measure(given.rounds, given.seconds))
    if given.json:
        print(json.dumps({"streams": STREAMS, "tokens": TOKENS, "results": results}))
        return
    base = results[0]
    print(f"{'store':8} {'tokens/s':>10} {'':>8} {'router us/token':>16} {'':>8} {'write ms':>9}")
    for one in results:
        changes = [100 * (float(one[name]) / float(base[name]) - 1) for name in ("tokens_per_s", "router_cpu_us_per_token")]
        print(
            f"{one['store']:8} {one['tokens_per_s']:10.0f} {changes[0]:+7.1f}% "
            f"{one['router_cpu_us_per_token']:16.1f} {changes[1]:+7.1f}% {one['flush_ms']:9.2f}"
        )


if __name__ == "__main__":
    main()
