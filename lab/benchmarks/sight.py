"""Measures what it costs to see: the rings of ranks, and traces.

    .venv/bin/python lab/benchmarks/sight.py [--turns 20] [--requests 48] [--tokens 64] [--json FILE]

Three clusters of one node with two ranks run side by side: without traces, with a tenth of them, with all. They get the same
requests in turns, first to last and last to first, so that a slow minute strikes all. Spans are made by router and agent: the
cost is what these two take more of the processor, by pairs of one turn, over the time that all of the cluster takes.

Rings cannot be switched off. Their cost is what a step of these clusters writes, each write timed alone, over the time of a
step. What tracing costs where it is off is its calls for one request, timed alone, over the processor time of a request.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import statistics
import timeit
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import psutil
from prometheus_client.parser import text_string_to_metric_families

from ryzanstein.cli.processes.cluster import ClusterSpec, LocalCluster
from ryzanstein.cli.status.scrape import page
from ryzanstein.demo import MODEL_DIR
from ryzanstein.observe.tracing import Tracing, traceparent
from ryzanstein.rpc.client import open_channel
from ryzanstein.v1 import inference_pb2 as pb
from ryzanstein.v1.inference_pb2_grpc import InferenceServiceStub
from ryzanstein.worker.ranks.health.board import RankBoard, board_bytes

WAYS = {"off": (), "a tenth": ("--trace-ratio", "0.1"), "all": ("--trace-ratio", "1")}
AT_ONCE = 4
TIMED = 20_000


def cluster_of(flags: Sequence[str]) -> ClusterSpec:
    return ClusterSpec(MODEL_DIR, num_nodes=1, tp=2, traces=bool(flags), router_flags=tuple(flags), worker_flags=tuple(flags))


def ran_s(pid: int) -> float:
    """Returns how long the threads of a process have run, in seconds: what /proc/PID/stat has in ticks of 10 ms, exactly."""
    threads = Path(f"/proc/{pid}/task").glob("*/schedstat")
    return sum(int(path.read_text().split()[0]) for path in threads) / 1e9


def cpu_s(cluster: LocalCluster) -> tuple[float, float]:
    """Returns the processor time so far of router and agent, and of these and the ranks, in seconds."""
    own, ranks = 0.0, 0.0
    for name in (*cluster.node_ids, *cluster.router_names):
        pid = cluster.services[name].pid
        own += ran_s(pid)
        ranks += sum(ran_s(each.pid) for each in psutil.Process(pid).children(recursive=True))
    return own, own + ranks


async def ask(cluster: LocalCluster, turn: int, given: argparse.Namespace) -> None:
    limit = asyncio.Semaphore(AT_ONCE)
    async with open_channel(cluster.router_address) as channel:
        stub = InferenceServiceStub(channel)

        async def one(number: int) -> None:
            asked = pb.CompleteRequest(text=f"Count to {number} in turn {turn}.")
            asked.sampling.max_tokens, asked.sampling.ignore_eos = given.tokens, True
            async with limit:
                async for _ in stub.StreamComplete(pb.StreamCompleteRequest(complete=asked)):
                    pass

        await asyncio.gather(*(one(number) for number in range(given.requests)))


def counted(cluster: LocalCluster) -> tuple[float, float, float]:
    """Returns the steps of rank 1 so far, its collectives, and its time in steps in seconds."""
    found = {"steps": 0.0, "collectives": 0.0, "seconds": 0.0}
    for family in text_string_to_metric_families(page(cluster.services["node-0"].metrics_url)):
        what = family.name.removeprefix("ryzanstein_worker_rank_")
        for sample in family.samples:
            if what in found and sample.labels.get("rank") == "1" and sample.labels.get("phase") != "idle":
                found[what] += sample.value
    return found["steps"], found["collectives"], found["seconds"]


def ring_us() -> tuple[float, float]:
    """Returns what the record of a collective costs a rank, and that of a step, in microseconds."""
    fd = os.memfd_create("board")
    os.ftruncate(fd, board_bytes(1))
    board = RankBoard(fd, 1, 0)
    numbers = iter(range(1, 10**9))
    collective = min(timeit.repeat(lambda: board._collectives.write(next(numbers), 1, 2, 3), number=TIMED, repeat=7))
    step = min(timeit.repeat(lambda: board._steps.write(next(numbers), 1, 2, 3, 4, 5, 6, 7), number=TIMED, repeat=7))
    return collective / TIMED * 1e6, step / TIMED * 1e6


def off_us() -> float:
    """Returns what the spans of one request cost router and node that do not trace, in microseconds."""
    tracing = Tracing("router")

    def request() -> None:
        with tracing.span("ryzanstein.v1.InferenceService/Generate") as face:
            whole = tracing.start("generation", traceparent(face), {"gen_ai.request.model": "demo"})
            attempt = tracing.start("attempt", traceparent(whole), {"ryzanstein.node": "node-0"})
            node = tracing.start("node.generation", traceparent(attempt), {"ryzanstein.attempt": 0})
            for phase in ("node.prefill", "node.decode"):
                tracing.start(phase, traceparent(node)).end()
            for span in (node, attempt, whole):
                span.set_attribute("outcome", "stop")
                span.end()

    return min(timeit.repeat(request, number=TIMED // 10, repeat=7)) / (TIMED // 10) * 1e6


def measure(given: argparse.Namespace) -> dict[str, Any]:
    with ExitStack() as running:
        clusters = {way: running.enter_context(LocalCluster(cluster_of(flags))) for way, flags in WAYS.items()}
        for cluster in clusters.values():
            asyncio.run(ask(cluster, 0, given))
        spent: dict[str, list[tuple[float, float]]] = {way: [] for way in WAYS}
        before = counted(clusters["off"])
        for turn in range(1, given.turns + 1):
            for way in sorted(WAYS, key=list(WAYS).index, reverse=bool(turn % 2)):
                own_s, total_s = cpu_s(clusters[way])
                asyncio.run(ask(clusters[way], turn, given))
                own_then_s, total_then_s = cpu_s(clusters[way])
                spent[way].append((own_then_s - own_s, total_then_s - total_s))
        steps, collectives, seconds = (b - a for a, b in zip(before, counted(clusters["off"]), strict=True))
    return report(given, spent, seconds / steps, collectives / steps)


def report(
    given: argparse.Namespace, spent: Mapping[str, Sequence[tuple[float, float]]], step_s: float, collectives_a_step: float
) -> dict[str, Any]:
    collective_us, a_step_us = ring_us()
    all_s = statistics.median(total for _, total in spent["off"])
    request_us = all_s / given.requests * 1e6
    rings = (collectives_a_step * collective_us + a_step_us) / (step_s * 1e6)
    num_tokens = given.requests * given.tokens

    def added(way: str) -> dict[str, float]:
        seconds = sorted(one - off for (one, _), (off, _) in zip(spent[way], spent["off"], strict=True))
        low, middle, high = seconds[len(seconds) // 4], statistics.median(seconds), seconds[-1 - len(seconds) // 4]
        percents = {name: round(100 * each / all_s, 2) for name, each in (("p25", low), ("median", middle), ("p75", high))}
        return {"us_per_token": round(1e6 * middle / num_tokens, 1), **percents}

    return {
        "rings": {
            "percent_of_a_step": round(100 * rings, 3),
            "collective_us": round(collective_us, 3),
            "step_us": round(a_step_us, 3),
            "collectives_a_step": round(collectives_a_step, 1),
            "step_ms": round(1e3 * step_s, 3),
        },
        "tracing_off": {
            "percent_of_a_request": round(100 * off_us() / request_us, 3),
            "request_cpu_ms": round(request_us / 1e3, 2),
        },
        "a_tenth_percent": added("a tenth"),
        "all_percent": added("all"),
        "cpu_us_per_token": {
            way: {
                "router_and_agent": round(1e6 * statistics.median(own for own, _ in each) / num_tokens, 1),
                "all": round(1e6 * statistics.median(total for _, total in each) / num_tokens, 1),
            }
            for way, each in spent.items()
        },
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, number in (("--turns", 20), ("--requests", 48), ("--tokens", 64)):
        parser.add_argument(name, type=int, default=number)
    parser.add_argument("--json", type=Path)
    given = parser.parse_args()
    found = measure(given)
    print(json.dumps(found, indent=2))
    if given.json:
        given.json.write_text(json.dumps(found, indent=2) + "\n")


if __name__ == "__main__":
    main()
