"""Measures the gain of session affinity, for docs/internals/decisions.md.

    .venv/bin/python lab/benchmarks/affinity.py [--json]

First by calculation: how evenly rendezvous hashing spreads sessions, and how many move when a node leaves. Then on a real
cluster of four nodes: conversations of ten turns with the same messages, once with a session id and once with a new key for
every turn (as with a load balancer without affinity), interleaved. Reports the share of prompt tokens found in the cache and
the time to first token.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections import Counter

from ryzanstein.cli.processes.cluster import ClusterSpec, LocalCluster
from ryzanstein.demo import MODEL_DIR
from ryzanstein.router.choose import ranked
from ryzanstein.rpc.client import open_blocking_channel
from ryzanstein.v1 import inference_pb2 as inference
from ryzanstein.v1 import inference_pb2_grpc as inference_grpc

TURNS = 10
CONVERSATIONS = 8
FIRST_TURN_COUNTED = 3  # before it there is little to reuse
SAY = "Repeat: " + " ".join(["river", "stone", "moon", "house", "tree", "night"] * 2)


def spread(num_nodes: int, num_sessions: int = 10_000) -> dict[str, float]:
    """Largest excess over the mean, and the share of sessions that move when one node leaves."""
    nodes = [f"node-{i}" for i in range(num_nodes)]
    keys = [f"session:{i}".encode() for i in range(num_sessions)]
    before = [next(iter(ranked(key, nodes))) for key in keys]
    after = [next(iter(ranked(key, nodes[1:]))) for key in keys]
    mean = num_sessions / num_nodes
    return {
        "nodes": num_nodes,
        "largest_excess": max(Counter(before).values()) / mean - 1,
        "moved_when_one_leaves": sum(a != b for a, b in zip(before, after, strict=True)) / num_sessions,
        "lost_node_share": before.count(nodes[0]) / num_sessions,
    }


def converse(stub: inference_grpc.InferenceServiceStub, name: str, sticky: bool) -> list[tuple[float, int, int]]:
    """One conversation; (time to first token in seconds, prompt tokens, cached ones) of each turn.

    The client sends the whole history in both cases, so that the prompts are equal; only the key of the choice differs.
    """
    history, turns = [], []
    for turn in range(TURNS):
        history.append(inference.Message(role=inference.ROLE_USER, content=f"{SAY} {name} {turn}"))
        chat = inference.ChatRequest(
            messages=history,
            user=name if sticky else f"{name}-{turn}",
            sampling=inference.SamplingParams(temperature=0, max_tokens=24),
        )
        began, first, text, usage = time.perf_counter(), 0.0, "", inference.Usage()
        for response in stub.StreamChat(inference.StreamChatRequest(chat=chat), timeout=60):
            kind = response.event.WhichOneof("kind")
            if kind == "delta":
                first = first or time.perf_counter() - began
                text += response.event.delta.text
            elif kind == "finished":
                usage = response.event.finished.usage
        history.append(inference.Message(role=inference.ROLE_ASSISTANT, content=text))
        turns.append((first, usage.prompt_tokens, usage.cached_prompt_tokens))
    return turns[FIRST_TURN_COUNTED:]


def measure() -> dict[str, dict[str, float]]:
    seen: dict[bool, list[tuple[float, int, int]]] = {True: [], False: []}
    spec = ClusterSpec(MODEL_DIR, num_nodes=4, tp=1)
    with LocalCluster(spec) as cluster, open_blocking_channel(cluster.router_address) as channel:
        stub = inference_grpc.InferenceServiceStub(channel)
        for i in range(CONVERSATIONS):
            for sticky in (True, False):
                seen[sticky] += converse(stub, f"talk-{i}-{sticky}", sticky)
    return {
        name: {
            "ttft_p50_s": statistics.median(first for first, _, _ in seen[sticky]),
            "cached_share": sum(cached for _, _, cached in seen[sticky]) / sum(prompt for _, prompt, _ in seen[sticky]),
            "prompt_tokens_mean": statistics.mean(prompt for _, prompt, _ in seen[sticky]),
        }
        for name, sticky in (("affinity", True), ("a new key each turn", False))
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", action="store_true")
    arguments = parser.parse_args()
    spreads, served = [spread(n) for n in (2, 4, 100)], measure()
    if arguments.json:
        print(json.dumps({"spread": spreads, "served": served}, indent=1))
        return
    for row in spreads:
        print(
            f"{row['nodes']:4.0f} nodes: fullest {row['largest_excess']:+.1%} over the mean; one leaves: "
            f"{row['moved_when_one_leaves']:.2%} of sessions move, it held {row['lost_node_share']:.2%}"
        )
    for name, row in served.items():
        cached = f"{row['cached_share']:.0%} of the prompt from the cache"
        print(f"{name}: first token {row['ttft_p50_s'] * 1e3:.1f} ms (p50), {cached}")


if __name__ == "__main__":
    main()
