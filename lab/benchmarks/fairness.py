"""Measures what tenants of one node get when one of them sends ten times as much, for docs/concepts/overload-and-fairness.md.

    .venv/bin/python lab/benchmarks/fairness.py [--json FILE] [--seconds 20]

A real cluster (router, orchestrator, one node). Tenant "heavy" keeps ten times as many requests open as each of the others;
all of them request more than their share. Reports shares of generated tokens, Jain's index over them, and time to first token,
with token-fair scheduling and without; then with a single tenant, for the overhead of fairness.
"""

from __future__ import annotations

import argparse
import asyncio
import json
from functools import partial
from pathlib import Path
from typing import Any

from traffic import Client, closed_loop, quantile

from ryzanstein.cli.processes.cluster import ClusterSpec, LocalCluster
from ryzanstein.demo import MODEL_DIR
from ryzanstein.rpc.client import open_channel

PLACES = 8
STREAMS = {
    "two tenants": {"heavy": 80, "light": 8},
    "four tenants": {"heavy": 80, "b": 8, "c": 8, "d": 8},
    "one tenant": {"heavy": 80},
}
SETTLE_S = 3.0


def cluster(fair: bool) -> LocalCluster:
    flags = ("--max-sequences", str(PLACES), "--fair" if fair else "--no-fair", "--log-level", "warning")
    return LocalCluster(ClusterSpec(MODEL_DIR, num_nodes=1, tp=1, worker_flags=flags, router_flags=("--log-level", "warning")))


def jain(shares: list[float]) -> float:
    return sum(shares) ** 2 / (len(shares) * sum(share * share for share in shares))


async def shared(address: str, streams: dict[str, int], seconds: float) -> dict[str, Any]:
    async with open_channel(address) as channel:
        client = Client(channel, seed=1)
        loops = [closed_loop(partial(client.send, tenant), num, SETTLE_S + seconds) for tenant, num in streams.items()]
        await asyncio.gather(*loops)
    began = client.sent[0].came + SETTLE_S
    ended = began + seconds
    tenants = {}
    for tenant in streams:
        mine = [sent for sent in client.sent if sent.tenant == tenant]
        first_s = [sent.ttft_s for sent in mine if sent.tokens and began <= sent.first < ended]
        tenants[tenant] = {
            "tokens_per_s": sum(began <= at < ended for sent in mine for at in sent.tokens) / seconds,
            "ttft_p50_s": quantile(first_s, 0.5),
            "ttft_p99_s": quantile(first_s, 0.99),
            "refused": sum(bool(sent.refused) for sent in mine),
        }
    rates = [tenant["tokens_per_s"] for tenant in tenants.values()]
    return {"tenants": tenants, "jain": jain(rates), "tokens_per_s": sum(rates)}


def measure(seconds: float) -> dict[str, Any]:
    figures: dict[str, Any] = {}
    for name, fair in (("fair", True), ("first come, first served", False)):
        with cluster(fair) as it:
            figures[name] = {
                case: asyncio.run(shared(it.router_address, streams, seconds)) for case, streams in STREAMS.items()
            }
    return figures


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--seconds", type=float, default=20.0)
    arguments = parser.parse_args()
    figures = measure(arguments.seconds)
    if arguments.json:
        arguments.json.write_text(json.dumps(figures, indent=1) + "\n")
    for name, cases in figures.items():
        for case, row in cases.items():
            print(f"{name}, {case}: Jain {row['jain']:.3f}, {row['tokens_per_s']:.0f} tokens/s")
            for tenant, its in row["tenants"].items():
                print(
                    f"    {tenant}: {its['tokens_per_s']:.0f} tokens/s, first token p50 {its['ttft_p50_s'] * 1e3:.0f} ms, "
                    f"p99 {its['ttft_p99_s'] * 1e3:.0f} ms, {its['refused']} refused"
                )


if __name__ == "__main__":
    main()
