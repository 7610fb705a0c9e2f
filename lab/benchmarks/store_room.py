"""Measures what kept responses take on disk, and how the file shrinks when they are evicted.

    .venv/bin/python lab/benchmarks/store_room.py [--responses 10000] [--json]

A chain of 12 turns: the messages that are stored. Responses of 2 kB: the size of sessions.db when all are kept, and when the
store was opened again with a bound of 16 MiB. Long chains: how long it takes to read the conversation for the next turn.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import sqlite3
import tempfile
import time
from contextlib import closing
from pathlib import Path

from ryzanstein.generation.prompts import Message, Role
from ryzanstein.router.config import RouterSettings
from ryzanstein.router.faces.http.responses.kept import KeptResponses
from ryzanstein.router.opening import open_sessions
from ryzanstein.router.telemetry import RouterTelemetry

TURNS = 12
LONG_CHAINS = (12, 100, 1000)
SMALL_BYTES = 16 * 2**20


def settings(folder: Path, max_bytes: int | None = None) -> RouterSettings:
    return RouterSettings(session_store="sqlite", state_dir=folder, max_store_bytes=max_bytes)


async def keep_chain(kept: KeptResponses, name: str, length: int) -> None:
    previous: str | None = None
    for number in range(length):
        response = {"id": f"resp_{name}{number}", "model": "m", "previous_response_id": previous}
        await kept.keep("", response, (Message(Role.USER, "u" * 200), Message(Role.ASSISTANT, "a" * 200)))
        previous = response["id"]


async def chains(folder: Path) -> dict[str, float]:
    found: dict[str, float] = {}
    telemetry = RouterTelemetry()
    async with open_sessions(settings(folder), telemetry) as store:
        kept = KeptResponses(store, telemetry)
        await keep_chain(kept, "first", TURNS)
        with closing(sqlite3.connect(folder / "sessions.db")) as db:
            (found["messages"],) = db.execute("SELECT count(*) FROM messages WHERE role != 'continues'").fetchone()
        for length in LONG_CHAINS:
            await keep_chain(kept, f"{length}-", length)
            began = time.perf_counter()
            await kept.conversation("", f"resp_{length}-{length - 1}", "previous_response_id")
            found[f"read_{length}_ms"] = 1000 * (time.perf_counter() - began)
    return found


async def eviction(folder: Path, num_responses: int) -> dict[str, float]:
    telemetry, path = RouterTelemetry(), folder / "sessions.db"
    message = (Message(Role.USER, "u" * 1000), Message(Role.ASSISTANT, "a" * 1000))
    async with open_sessions(settings(folder), telemetry) as store:
        kept = KeptResponses(store, telemetry)
        for number in range(num_responses):
            response = {"id": f"resp_{number}", "model": "m", "output": [{"text": "a" * 1000}]}
            await kept.keep("", response, message)
    before, began = path.stat().st_size, time.perf_counter()
    async with open_sessions(settings(folder, SMALL_BYTES), telemetry) as store:
        slowest = 0.0
        await store.create("one more", "m")
        while path.stat().st_size > SMALL_BYTES:
            asked = time.perf_counter()
            await store.get("one more")
            slowest = max(slowest, time.perf_counter() - asked)
            await asyncio.sleep(0.001)
        took = time.perf_counter() - began
    return {"all_bytes": before, "bounded_bytes": path.stat().st_size, "shrunk_s": took, "slowest_read_ms": 1000 * slowest}


async def measured(num_responses: int) -> dict[str, float]:
    with tempfile.TemporaryDirectory() as one, tempfile.TemporaryDirectory() as other:
        return await chains(Path(one)) | await eviction(Path(other), num_responses)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--responses", type=int, default=10_000)
    parser.add_argument("--json", action="store_true", help="print one JSON object instead of lines")
    options = parser.parse_args()
    found = asyncio.run(measured(options.responses))
    if options.json:
        print(json.dumps(found))
        return
    for name, value in found.items():
        print(f"{name:20} {value:,.1f}")


if __name__ == "__main__":
    main()
