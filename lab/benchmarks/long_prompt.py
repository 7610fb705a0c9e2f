"""Measures what a long prompt does to the tokens of others, for docs/concepts/kv-cache.md.

    .venv/bin/python lab/benchmarks/long_prompt.py [--model DIR_OR_GGUF] [--prompt 30000] [--objectives 0.1,0] [--streams 8]
        [--seconds 15] [--threads 2] [--flags "..."] [--json FILE]

A real cluster of one node. Streams decode all the time; after --seconds one prompt of so many tokens arrives. Inter-token
times of the streams, as a client sees them, before it came and while it was computed: median, 99th percentile, greatest. Each
of --objectives is a setting of `tpot_objective_s` (0: none) and a cluster of its own. Without --model it is a random decoder of
four layers with a context of 32,768 tokens.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import shlex
import tempfile
import time
from pathlib import Path
from typing import Any

from traffic import quantile

from ryzanstein.cli.processes.cluster import ClusterSpec, LocalCluster
from ryzanstein.rpc.client import open_channel
from ryzanstein.tools.synthesize.command import Recipe, synthesize
from ryzanstein.tools.synthesize.shapes import PRESETS
from ryzanstein.v1 import inference_pb2 as pb
from ryzanstein.v1.inference_pb2_grpc import InferenceServiceStub

CALL_S = 900.0
SETTLE_S = 3.0
STREAM_PROMPT, STREAM_TOKENS = 32, 1500
TOKEN_IDS = range(300, 4000)  # ordinary ones in all models that were measured

Gap = tuple[float, float]
"""When a token came, and how long after the one before it."""


def request(prompt_ids: list[int], max_tokens: int) -> pb.StreamCompleteRequest:
    sampling = pb.SamplingParams(temperature=0.0, max_tokens=max_tokens, ignore_eos=True, seed=1)
    return pb.StreamCompleteRequest(complete=pb.CompleteRequest(token_ids=pb.TokenIds(ids=prompt_ids), sampling=sampling))


def prompt_of(num_tokens: int, seed: int) -> list[int]:
    return random.Random(seed).choices(TOKEN_IDS, k=num_tokens)


def has_tokens(event: Any) -> bool:
    return event.WhichOneof("kind") == "delta" and len(event.delta.token_ids) > 0


async def arrivals(stub: Any, prompt_ids: list[int], max_tokens: int) -> list[float]:
    """Returns when tokens came."""
    answer = stub.StreamComplete(request(prompt_ids, max_tokens), timeout=CALL_S)
    return [time.monotonic() async for response in answer if has_tokens(response.event)]


class Stream:
    """One answer after another, until it is cancelled; `gaps` are those within an answer."""

    def __init__(self, stub: Any, number: int) -> None:
        self._stub, self._number = stub, number
        self.gaps: list[Gap] = []

    async def run(self) -> None:
        turn = 0
        while True:
            turn += 1
            prompt, last = prompt_of(STREAM_PROMPT, 1000 * self._number + turn), 0.0
            async for response in self._stub.StreamComplete(request(prompt, STREAM_TOKENS), timeout=CALL_S):
                if has_tokens(response.event):
                    now = time.monotonic()
                    if last:
                        self.gaps.append((now, now - last))
                    last = now


def figures(gaps: list[Gap], begin: float, end: float) -> dict[str, float]:
    inside = [gap for came, gap in gaps if begin <= came < end]
    return {
        "tokens": len(inside),
        "p50_ms": 1e3 * quantile(inside, 0.5),
        "p99_ms": 1e3 * quantile(inside, 0.99),
        "max_ms": 1e3 * max(inside, default=0.0),
    }


async def disturbed(address: str, given: argparse.Namespace) -> dict[str, Any]:
    async with open_channel(address) as channel:
        stub = InferenceServiceStub(channel)
        # The node learns what prompts cost, as it does on any node that has served some.
        await arrivals(stub, prompt_of(min(2000, given.prompt), 7), 8)
        streams = [Stream(stub, number) for number in range(given.streams)]
        tasks = [asyncio.ensure_future(stream.run()) for stream in streams]
        await asyncio.sleep(SETTLE_S + given.seconds)
        came = time.monotonic()
        first = (await arrivals(stub, prompt_of(given.prompt, 9), 1))[0]
        for task in tasks:
            task.cancel()
        for ended in await asyncio.gather(*tasks, return_exceptions=True):
            if isinstance(ended, Exception):
                raise ended
    gaps = [gap for stream in streams for gap in stream.gaps]
    return {
        "prompt_tokens": given.prompt,
        "first_token_s": round(first - came, 2),
        "without": figures(gaps, came - given.seconds, came),
        "with": figures(gaps, came, first),
    }


def measure(model: Path, objective_s: float, given: argparse.Namespace) -> dict[str, Any]:
    flags = ("--tpot-objective-s", str(objective_s), "--log-level", "warning", *shlex.split(given.flags))
    spec = ClusterSpec(
        model,
        num_nodes=1,
        tp=1,
        threads_per_rank=given.threads,
        worker_flags=flags,
        router_flags=("--log-level", "warning"),
    )
    with LocalCluster(spec) as running:
        return {"objective_s": objective_s, **asyncio.run(disturbed(running.router_address, given))}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, text in (("--model", ""), ("--objectives", "0.1,0"), ("--flags", "")):
        parser.add_argument(name, default=text)
    for name, number in (("--prompt", 30_000), ("--streams", 8), ("--threads", 2)):
        parser.add_argument(name, type=int, default=number)
    parser.add_argument("--seconds", type=float, default=15.0)
    parser.add_argument("--json", type=Path)
    given = parser.parse_args()
    found = []
    with tempfile.TemporaryDirectory() as folder:
        model = Path(given.model) if given.model else Path(folder) / "model"
        if not given.model:
            synthesize(model, Recipe("llama", PRESETS["context"], "float32", 0, 1))
        for objective_s in map(float, given.objectives.split(",")):
            found.append(measure(model, objective_s, given))
            row = found[-1]
            print(
                f"objective {1e3 * objective_s:.0f} ms: {given.prompt:,} tokens, the first token after {row['first_token_s']} s"
            )
            for when in ("without", "with"):
                print(f"  {when:>7} the prompt: " + ", ".join(f"{name} {value:.1f}" for name, value in row[when].items()))
    if given.json:
        given.json.write_text(json.dumps({"runs": found} | {k: str(v) for k, v in vars(given).items()}, indent=2) + "\n")


if __name__ == "__main__":
    main()
