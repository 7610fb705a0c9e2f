"""Measures a node under overload, for docs/concepts/overload-and-fairness.md.

    .venv/bin/python lab/benchmarks/overload.py [--json FILE] [--seconds 15]

A real cluster (router, orchestrator, one node). First its peak: a closed loop that keeps every place busy. Then open loops:
Poisson arrivals at 0.5, 1, 2 and 3 times the peak's requests, with a latency objective, and 3 times without one.
Goodput counts tokens of requests whose first token came within the objective.
"""

from __future__ import annotations

import argparse
import asyncio
import json
from collections import Counter
from pathlib import Path
from typing import Any

from traffic import Client, Sent, closed_loop, open_loop, quantile

from ryzanstein.cli.processes.cluster import ClusterSpec, LocalCluster
from ryzanstein.demo import MODEL_DIR
from ryzanstein.rpc.client import open_channel

PLACES = 8
OBJECTIVE_S = 0.5
LOADS = (0.5, 1.0, 2.0, 3.0)
SETTLE_S = 3.0


def cluster(objective_s: float) -> LocalCluster:
    flags = ("--max-sequences", str(PLACES), "--ttft-objective-s", str(objective_s), "--log-level", "warning")
    return LocalCluster(ClusterSpec(MODEL_DIR, num_nodes=1, tp=1, worker_flags=flags, router_flags=("--log-level", "warning")))


async def peak(address: str, seconds: float) -> dict[str, float]:
    """Requests and tokens a second with every place taken all the time and a little line."""
    async with open_channel(address) as channel:
        client = Client(channel, seed=1)
        await closed_loop(client.send, 2 * PLACES, seconds)
    began = client.sent[0].came + SETTLE_S
    ended = client.sent[0].came + seconds
    tokens = sum(began <= at < ended for sent in client.sent for at in sent.tokens)
    requests = sum(began <= sent.ended < ended for sent in client.sent if not sent.refused)
    return {"requests_per_s": requests / (ended - began), "tokens_per_s": tokens / (ended - began)}


async def offered(address: str, load: float, top: dict[str, float], seconds: float) -> dict[str, Any]:
    """One load; what came in the first seconds fills the node and is not counted."""
    async with open_channel(address) as channel:
        client = Client(channel, seed=int(10 * load))
        await open_loop(client.send, load * top["requests_per_s"], SETTLE_S + seconds, seed=int(10 * load))
    return {"load": load, **summary(client.sent, seconds, top)}


def summary(sent: list[Sent], seconds: float, top: dict[str, float]) -> dict[str, Any]:
    began = sent[0].came + SETTLE_S

    def tokens_of(some: list[Sent]) -> int:
        return sum(began <= at < began + seconds for one in some for at in one.tokens)

    counted = [one for one in sent if one.came >= began]
    served = [one for one in counted if not one.refused]
    refused = [one for one in counted if one.refused]
    tokens, good = tokens_of(sent), tokens_of([one for one in sent if one.tokens and one.ttft_s <= OBJECTIVE_S])
    return {
        "offered_per_s": len(counted) / seconds,
        "served_per_s": len(served) / seconds,
        "tokens_per_s": tokens / seconds,
        "throughput_of_peak": tokens / seconds / top["tokens_per_s"],
        "goodput_of_peak": good / seconds / top["tokens_per_s"],
        "ttft_p50_s": quantile([sent.ttft_s for sent in served], 0.5),
        "ttft_p99_s": quantile([sent.ttft_s for sent in served], 0.99),
        "in_objective": sum(sent.ttft_s <= OBJECTIVE_S for sent in served) / max(1, len(served)),
        "refused": dict(Counter(sent.refused for sent in refused)),
        "refused_in_p50_s": quantile([sent.ended - sent.came for sent in refused], 0.5),
        "cut_off": sum(bool(sent.tokens) for sent in refused),
    }


def measure(seconds: float) -> dict[str, Any]:
    with cluster(0.0) as it:
        top = asyncio.run(peak(it.router_address, SETTLE_S + seconds))
        without = asyncio.run(offered(it.router_address, LOADS[-1], top, seconds))
    with cluster(OBJECTIVE_S) as it:
        asyncio.run(peak(it.router_address, 2 * SETTLE_S))
        rows = [asyncio.run(offered(it.router_address, load, top, seconds)) for load in LOADS]
    return {"places": PLACES, "objective_s": OBJECTIVE_S, "peak": top, "loads": rows, "without_objective": without}


def visible(row: dict[str, Any], name: str) -> str:
    refused = ", ".join(f"{reason} {num}" for reason, num in row["refused"].items()) or "none"
    return (
        f"{name}: offered {row['offered_per_s']:.1f}/s, throughput {row['throughput_of_peak']:.0%}, "
        f"goodput {row['goodput_of_peak']:.0%} of the peak; first token p50 {row['ttft_p50_s'] * 1e3:.0f} ms, "
        f"p99 {row['ttft_p99_s'] * 1e3:.0f} ms, {row['in_objective']:.1%} in the objective; refused {refused}, "
        f"after {row['refused_in_p50_s'] * 1e3:.0f} ms (p50), {row['cut_off']} cut off"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--seconds", type=float, default=15.0)
    arguments = parser.parse_args()
    figures = measure(arguments.seconds)
    if arguments.json:
        arguments.json.write_text(json.dumps(figures, indent=1) + "\n")
    top = figures["peak"]
    print(f"peak: {top['requests_per_s']:.1f} requests/s, {top['tokens_per_s']:.0f} tokens/s; objective {OBJECTIVE_S} s")
    for row in figures["loads"]:
        print(visible(row, f"{row['load']:.1f}x"))
    print(visible(figures["without_objective"], "3.0x without an objective"))


if __name__ == "__main__":
    main()
