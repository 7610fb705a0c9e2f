"""Measures what TLS for clients costs a router whose gRPC server is the builtin one.

    .venv/bin/python lab/benchmarks/tls.py [--streams 64] [--seconds 1.5] [--rounds 5]

Two routers in front of one scripted node, one with a certificate (P-256). Connections are opened before a window begins. Both
routers take turns within each round, each first in turn. Figures are medians of the rounds: the router's processor time for a
request of four tokens, and for a token of long answers. The ratio is the median of those within each round.
"""

from __future__ import annotations

import argparse
import contextlib
import ssl
import subprocess
import tempfile
from dataclasses import replace
from pathlib import Path
from statistics import median

import uvloop
from rich.console import Console
from rich.table import Table

from ryzanstein.lab.bench.router.load.connections import ready
from ryzanstein.lab.bench.router.load.throughput import SHORT_ANSWER, long_answers, short_answers
from ryzanstein.lab.bench.router.systems import BenchNode, System, running_node, running_router

FIGURES = ("us a request", "us a token")


def certificate(folder: Path) -> tuple[Path, Path]:
    """Returns the files of a new certificate and its key."""
    chain, key = folder / "tls.crt", folder / "tls.key"
    command = ("openssl", "req", "-x509", "-nodes", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-days", "1")
    command += ("-subj", "/CN=localhost", "-addext", "subjectAltName=DNS:localhost", "-keyout", str(key), "-out", str(chain))
    subprocess.run(command, check=True, capture_output=True)
    key.chmod(0o600)
    return chain, key


async def figures(system: System, node: BenchNode, streams: int, seconds: float) -> dict[str, float]:
    short = await short_answers(system, node, streams, seconds)
    long = await long_answers(system, node, streams, seconds)
    problems = [*short.problems, *long.problems]
    assert not problems, problems[0]
    return {"us a request": 1e6 * SHORT_ANSWER * short.system_cpu_s_per_token, "us a token": 1e6 * long.system_cpu_s_per_token}


async def measured(streams: int, seconds: float, rounds: int) -> list[tuple[dict[str, float], dict[str, float]]]:
    """Returns the figures without and with TLS of each round."""
    found = []
    async with contextlib.AsyncExitStack() as stack:
        chain, key = certificate(Path(stack.enter_context(tempfile.TemporaryDirectory())))
        trust = ssl.create_default_context(cafile=str(chain))
        trust.set_alpn_protocols(["h2"])
        node = await stack.enter_async_context(running_node())
        plain = await stack.enter_async_context(running_router(node.port))
        secure = await stack.enter_async_context(running_router(node.port, ("--tls-cert", str(chain), "--tls-key", str(key))))
        systems = plain, replace(secure, tls=trust)
        for each in systems:
            await ready(each.port, tls=each.tls)
        for number in range(rounds):
            row: dict[int, dict[str, float]] = {}
            for which in ((0, 1), (1, 0))[number % 2]:
                row[which] = await figures(systems[which], node, streams, seconds)
            found.append((row[0], row[1]))
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--streams", type=int, default=64)
    parser.add_argument("--seconds", type=float, default=1.5)
    parser.add_argument("--rounds", type=int, default=5)
    options = parser.parse_args()
    found = uvloop.run(measured(options.streams, options.seconds, options.rounds))
    shown = Table("", "without TLS", "with TLS", "ratio")
    for name in FIGURES:
        plain, secure = (median(each[which][name] for each in found) for which in (0, 1))
        shown.add_row(name, f"{plain:,.1f}", f"{secure:,.1f}", f"{median(tls[name] / bare[name] for bare, tls in found):.2f}")
    Console(width=80).print(shown)


if __name__ == "__main__":
    main()
