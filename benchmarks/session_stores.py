"""What a turn costs each session store: claim, read, append; and how many turns a second one router can store.

    .venv/bin/python benchmarks/session_stores.py [--turns 2000] [--json]

The stores as the router opens them. Sessions have ten messages of 400 characters. SQLite lies in a temporary folder; Redis is
started for the measurement, once without and once with a write to the disk for every change (`appendfsync always`).
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

from ryzanstein.generation import Message, Role
from ryzanstein.router.config import RouterSettings
from ryzanstein.router.sessions.opened import open_sessions
from ryzanstein.router.sessions.store import SessionStore
from ryzanstein.router.telemetry import Telemetry

TURN = (Message(Role.USER, "u" * 400), Message(Role.ASSISTANT, "a" * 400))
AT_ONCE = 32


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


async def turn(store: SessionStore, number: int, took: dict[str, list[float]]) -> None:
    session_id, generation_id = f"s{number % AT_ONCE}", f"g{number}"
    await timed(took["claim"], store.claim(session_id, generation_id, "router", 6.0))
    await timed(took["get"], store.get(session_id))
    append = store.append(session_id, TURN, model="m", node_id="a", generation_id=generation_id)
    await timed(took["append"], append)


async def measure(settings: RouterSettings, turns: int) -> dict[str, float]:
    alone: dict[str, list[float]] = {"claim": [], "get": [], "append": []}
    async with open_sessions(settings, Telemetry()) as store:
        for round_ in range(turns // 10 // AT_ONCE + 1):
            for number in range(AT_ONCE):
                with contextlib.suppress(Exception):
                    await store.delete(f"s{number}")
                await store.create(f"s{number}", "m", TURN * 5)
            for number in range(AT_ONCE * 10):
                await turn(store, round_ * AT_ONCE * 10 + number, alone)
        together: dict[str, list[float]] = {"claim": [], "get": [], "append": []}
        began = time.perf_counter()
        for first in range(0, turns, AT_ONCE):
            await asyncio.gather(*(turn(store, turns + 10_000 + first + i, together) for i in range(AT_ONCE)))
        elapsed_s = time.perf_counter() - began
    figures = {f"{name}_p50_s": statistics.median(took) for name, took in alone.items()}
    worst = {f"{name}_p99_s": statistics.quantiles(took, n=100)[98] for name, took in alone.items()}
    return figures | worst | {"turns_per_s": turns / elapsed_s}


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
