"""Measures a turn in each session store (claim, read, append), and how many turns per second one router can store.

    .venv/bin/python lab/benchmarks/session_stores.py [--turns 2000] [--json]

Stores are opened as the router opens them. Sessions have 10 to 30 messages of 400 characters; turns/s: 32 sessions at once.
SQLite is in a temporary directory; Redis is started for the measurement, once with an fsync every second and once with an fsync
for every change (`appendfsync everysec`, `always`).
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import shutil
import socket
import statistics
import tempfile
import time
from collections.abc import AsyncIterator, Awaitable
from pathlib import Path

from ryzanstein.generation.prompts import Message, Role
from ryzanstein.router.config import RouterSettings
from ryzanstein.router.opening import open_sessions
from ryzanstein.router.sessions.claims import ClaimRequest
from ryzanstein.router.sessions.store import SessionStore
from ryzanstein.router.telemetry import RouterTelemetry

TURN = (Message(Role.USER, "u" * 400), Message(Role.ASSISTANT, "a" * 400))
AT_ONCE = 32
TURNS_EACH = 10


@contextlib.asynccontextmanager
async def redis_url(folder: Path, fsync: str) -> AsyncIterator[str]:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    program = shutil.which("redis-server") or "/usr/bin/redis-server"
    flags = ("--port", str(port), "--bind", "127.0.0.1", "--dir", str(folder), "--appendonly", "yes", "--appendfsync", fsync)
    process = await asyncio.create_subprocess_exec(program, *flags, stdout=asyncio.subprocess.DEVNULL)
    try:
        await asyncio.sleep(1.0)
        yield f"redis://127.0.0.1:{port}/0"
    finally:
        process.kill()
        await process.wait()


async def timed(took: list[float], work: Awaitable[object]) -> None:
    began = time.perf_counter()
    await work
    took.append(time.perf_counter() - began)


async def turn(store: SessionStore, session_id: str, number: int, took: dict[str, list[float]]) -> None:
    generation_id = f"{session_id}-{number}"
    await timed(took["claim"], store.claim(ClaimRequest(session_id, generation_id, "router", 6.0)))
    await timed(took["get"], store.get(session_id))
    append = store.append(session_id, TURN, model="m", node_id="a", generation_id=generation_id)
    await timed(took["append"], append)


async def prepared(store: SessionStore, name: str) -> list[str]:
    """New sessions, so that none grows beyond thirty messages."""
    session_ids = [f"{name}-{i}" for i in range(AT_ONCE)]
    for session_id in session_ids:
        await store.create(session_id, "m", TURN * 5)
    return session_ids


async def measure(settings: RouterSettings, turns: int) -> dict[str, float]:
    telemetry = RouterTelemetry()
    alone: dict[str, list[float]] = {"claim": [], "get": [], "append": []}
    together: dict[str, list[float]] = {"claim": [], "get": [], "append": []}
    elapsed_s, rounds = 0.0, max(1, turns // (AT_ONCE * TURNS_EACH))
    async with open_sessions(settings, telemetry) as store:
        for round_ in range(rounds):
            for session_id in await prepared(store, f"alone-{round_}"):
                for number in range(TURNS_EACH):
                    await turn(store, session_id, number, alone)
        for round_ in range(rounds):
            session_ids = await prepared(store, f"together-{round_}")
            began = time.perf_counter()
            for number in range(TURNS_EACH):
                await asyncio.gather(*(turn(store, session_id, number, together) for session_id in session_ids))
            elapsed_s += time.perf_counter() - began
    if telemetry.registry.get_sample_value("ryzanstein_router_store_outages_total"):
        raise SystemExit("the store had an outage and sessions were kept in memory: the figures are not valid")
    figures = {f"{name}_p50_s": statistics.median(took) for name, took in alone.items()}
    worst = {f"{name}_p99_s": statistics.quantiles(took, n=100)[98] for name, took in alone.items()}
    return figures | worst | {"turns_per_s": rounds * AT_ONCE * TURNS_EACH / elapsed_s}


async def measure_all(turns: int) -> dict[str, dict[str, float]]:
    rows = {}
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        rows["memory"] = await measure(RouterSettings(session_store="memory"), turns)
        rows["sqlite"] = await measure(RouterSettings(session_store="sqlite", state_dir=folder), turns)
        for fsync in ("everysec", "always"):
            (folder / fsync).mkdir()
            async with redis_url(folder / fsync, fsync) as url:
                settings = RouterSettings(session_store="redis", redis_url=url)
                rows[f"redis, fsync {fsync}"] = await measure(settings, turns)
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--turns", type=int, default=2000)
    parser.add_argument("--json", action="store_true")
    arguments = parser.parse_args()
    rows = asyncio.run(measure_all(arguments.turns))
    if arguments.json:
        print(json.dumps(rows, indent=1))
        return
    print("| store | claim p50, p99 | read p50, p99 | append p50, p99 | turns/s |\n|---|---|---|---|---|")
    for name, row in rows.items():
        cells = (
            f"{row[f'{step}_p50_s'] * 1e3:.2f}, {row[f'{step}_p99_s'] * 1e3:.2f} ms" for step in ("claim", "get", "append")
        )
        print(f"| {name} | {' | '.join(cells)} | {row['turns_per_s']:.0f} |")


if __name__ == "__main__":
    main()
