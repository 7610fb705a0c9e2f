"""Measures what keys, limits and TLS between services cost a router, for docs/internals/log/measurements.md.

    .venv/bin/python lab/benchmarks/access.py [--json FILE] [--streams 64] [--seconds 2] [--rounds 9]

One scripted node without TLS and one with it, and a router of each kind in front of its own: open, with keys, with keys and
limits of the tenant in memory, with mutual TLS to its node; then open with sessions and journal in Redis, and the same with
limits there. All processes run from the beginning to the end, and take turns within each round, each first in turn. Ratios to
the open router, of those with Redis to the open one with Redis, are within each round; figures are medians of the rounds. Redis
has to be installed.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import statistics
import tempfile
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import uvloop

from ryzanstein.auth.caller import DEFAULT_SCOPES
from ryzanstein.auth.key_form import ApiKey
from ryzanstein.auth.keys.keys_text import key_text
from ryzanstein.auth.keys.records import KeyRecord
from ryzanstein.auth.peers.authority import Authority
from ryzanstein.auth.peers.peer import DEFAULT_TRUST, Peer, PeerRole
from ryzanstein.cli.processes.host import LOCAL
from ryzanstein.cli.processes.ports import free_ports
from ryzanstein.lab.bench.router.load.connections import ready
from ryzanstein.lab.bench.router.load.first_token import first_tokens_s
from ryzanstein.lab.bench.router.load.throughput import SHORT_ANSWER, long_answers, short_answers
from ryzanstein.lab.bench.router.scripted.script import MODEL
from ryzanstein.lab.bench.router.systems import BenchNode, System, running_node, running_router
from ryzanstein.lab.chaos.machines.redis_server import RedisServer

OPEN, KEYS, LIMITS, TLS = "open", "keys", "keys, limits", "mutual TLS to the node"
OPEN_REDIS, LIMITS_REDIS = "open, Redis", "keys, limits, Redis"
FAR = "[tenant.acme]\nrequests_per_second = 1_000_000\ntokens_per_minute = 1_000_000_000\nconcurrent = 100_000\n"


def keys_file(folder: Path, name: str, key: ApiKey, tenants: str = "") -> str:
    path = folder / name
    path.touch(0o600)
    path.write_text(tenants + key_text(KeyRecord(key.key_id, key.digest(), "acme", DEFAULT_SCOPES)))
    return str(path)


@contextlib.asynccontextmanager
async def running(folder: Path) -> AsyncIterator[dict[str, tuple[System, BenchNode]]]:
    """Runs all routers, and yields each with its node."""
    authority, key = Authority.new(DEFAULT_TRUST), ApiKey.new()
    authority.write(Peer(PeerRole.NODE, MODEL), folder / "node")
    authority.write(Peer(PeerRole.ROUTER, "benchmark"), folder / "router")
    redis = RedisServer(LOCAL, folder / "redis", free_ports(1)[0])
    redis.start()
    limited = ("--keys-file", keys_file(folder, "limited.toml", key, FAR))
    in_redis = ("--session-store", "redis", "--redis-url", redis.url)
    flags: dict[str, tuple[str, ...]] = {
        OPEN: (),
        KEYS: ("--keys-file", keys_file(folder, "keys.toml", key)),
        LIMITS: limited,
        OPEN_REDIS: in_redis,
        LIMITS_REDIS: (*limited, *in_redis),
        TLS: ("--tls", "require", "--tls-dir", str(folder / "router"), "--tls-port", "0"),
    }
    sent = (("authorization", f"Bearer {key.reveal()}"),)
    try:
        async with contextlib.AsyncExitStack() as stack:
            plain = await stack.enter_async_context(running_node())
            secure = await stack.enter_async_context(running_node(folder / "node"))
            systems = {}
            for name, more in flags.items():
                node = secure if name == TLS else plain
                headers = sent if "--keys-file" in more else ()
                system = await stack.enter_async_context(running_router(node.port, more, headers))
                await ready(system.port, headers)
                systems[name] = system, node
            yield systems
    finally:
        redis.kill()


async def measure(rounds: int, streams: int, seconds: float) -> dict[str, list[dict[str, float]]]:
    found: dict[str, list[dict[str, float]]] = {}
    with tempfile.TemporaryDirectory() as folder:
        async with running(Path(folder)) as systems:
            names = list(systems)
            for number in range(rounds):
                for name in names[number % len(names) :] + names[: number % len(names)]:
                    system, node = systems[name]
                    first = await first_tokens_s(system, 100)
                    short = await short_answers(system, node, streams, seconds)
                    long = await long_answers(system, node, streams, seconds)
                    problems = [*short.problems, *long.problems]
                    assert not problems, f"{name}: {problems[0]}"
                    figures = {
                        "first_token_ms": 1e3 * statistics.median(first),
                        "requests_per_s": short.requests_per_s,
                        "router_us_per_request": 1e6 * SHORT_ANSWER * short.system_cpu_s_per_token,
                        "tokens_per_s": long.tokens_per_s,
                        "router_us_per_token": 1e6 * long.system_cpu_s_per_token,
                    }
                    found.setdefault(name, []).append(figures)
    return found


def summed(found: dict[str, list[dict[str, float]]]) -> dict[str, Any]:
    """Returns medians, and the medians of the ratios within each round."""
    rows: dict[str, Any] = {}
    for name, rounds in found.items():
        bases = found[OPEN_REDIS if name == LIMITS_REDIS else OPEN]
        rows[name] = {figure: statistics.median(each[figure] for each in rounds) for figure in rounds[0]}
        for figure in ("requests_per_s", "tokens_per_s"):
            ratios = [each[figure] / base[figure] for each, base in zip(rounds, bases, strict=True)]
            rows[name][f"{figure}_ratio"] = statistics.median(ratios)
        added = [each["first_token_ms"] - base["first_token_ms"] for each, base in zip(rounds, bases, strict=True)]
        rows[name]["added_first_token_ms"] = statistics.median(added)
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--streams", type=int, default=64)
    parser.add_argument("--seconds", type=float, default=2.0)
    parser.add_argument("--rounds", type=int, default=9)
    options = parser.parse_args()
    rows = summed(uvloop.run(measure(options.rounds, options.streams, options.seconds)))
    for name, row in rows.items():
        print(f"{name:26} " + "  ".join(f"{figure} {value:,.3f}" for figure, value in row.items()))
    if options.json is not None:
        options.json.write_text(json.dumps(rows, indent=1) + "\n")


if __name__ == "__main__":
    main()
