"""Measures how much a second model on a node costs the first one: decode rate and first token.

    .venv/bin/python lab/benchmarks/models_on_a_node.py [--rounds 9] [--tokens 600] [--json]

Four cases, interleaved: a node with model A alone; a node with A and B, B idle; the same node with one answer of B running
all the time; and A alone while B answers on another node, which is bound to the second core. Every rank is pinned to a core of
its own, one thread each, so that B's share is the second core. The agent, the router's place (this program) and B's rank share
that second core: what B costs A includes what its tokens cost the agent.

In the last case the two models share nothing but the machine: its memory, its caches and the second core. So `apart` over
`alone` is what the machine and its kernel cost, and `busy` over `apart` is what sharing a node costs.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any

from ryzanstein.rpc.client import open_channel
from ryzanstein.v1 import worker_pb2 as pb
from ryzanstein.v1.worker_pb2_grpc import WorkerServiceStub

START_S = 90


@asynccontextmanager
async def node(folder: Path, name: str, *models: Path, core: int | None = None) -> AsyncIterator[str]:
    """A node's address, when all its models are ready. All of it is bound to `core`, if one is given."""
    first, *others = models
    flags = ["--node-id", name, "--grpc-port", "0", "--metrics-port", "0", "--host", "127.0.0.1", "--pin"]
    flags += ["--threads-per-rank", "1", "--model", str(first), "--more-models", ",".join(map(str, others))]
    log = folder / f"{name}.log"
    with log.open("wb") as out:
        bound = [] if core is None else [shutil.which("taskset") or "/usr/bin/taskset", "--cpu-list", str(core)]
        process = subprocess.Popen(  # noqa: ASYNC220 - returns at once
            [*bound, sys.executable, "-P", "-m", "ryzanstein.worker", *flags], stdout=out, stderr=out
        )
    try:
        deadline = time.monotonic() + START_S
        while log.read_text().count('"event":"ranks ready"') + log.read_text().count('"event": "ranks ready"') < len(models):
            if process.poll() is not None or time.monotonic() > deadline:
                raise RuntimeError(log.read_text()[-2000:])
            await asyncio.sleep(0.1)
        lines = [json.loads(line) for line in log.read_text().splitlines() if line.startswith("{")]
        yield f"127.0.0.1:{next(line['grpc_port'] for line in lines if line['event'] == 'serving')}"
    finally:
        process.send_signal(signal.SIGTERM)
        process.wait()


class Stream:
    """A router's stream for one model of a node."""

    def __init__(self, call: Any) -> None:
        self._call = call
        self._handle = 0

    @classmethod
    @asynccontextmanager
    async def open(cls, address: str, model: str) -> AsyncIterator[Stream]:
        async with open_channel(address, retries=False) as channel:
            call = WorkerServiceStub(channel).Connect()
            await call.write(pb.ConnectRequest(hello=pb.RouterHello(router_id="bench", model=model)))
            await call.read()
            yield cls(call)
            call.cancel()

    async def answer(self, model: str, tokens: int) -> tuple[float, float]:
        """Seconds to the first token, and tokens per second after it."""
        self._handle += 1
        submit = pb.Submit(handle=self._handle, generation_id="g", attempt=1, model=model, text="Count from 1 to 200.")
        submit.sampling.max_tokens, submit.sampling.ignore_eos, submit.sampling.seed = tokens, True, 1
        submit.generated.add()
        began, first, seen = time.perf_counter(), 0.0, 0
        await self._call.write(pb.ConnectRequest(submit=submit))
        while True:
            frame = await self._call.read()
            seen += len(frame.output.handle)
            if frame.output.failed:
                raise RuntimeError(frame.output.failed[0].message)
            if seen and not first:
                first = time.perf_counter()
            if frame.output.finished:
                return first - began, (tokens - 1) / (time.perf_counter() - first)


async def busy(stream: Stream, model: str) -> None:
    while True:
        await stream.answer(model, 1500)


async def beside(noisy: Stream, measured: Stream, tokens: int) -> tuple[float, float]:
    """Measures an answer of A while B answers. The stream of B is of no use afterwards."""
    noise = asyncio.create_task(busy(noisy, "b"))
    await asyncio.sleep(0.3)
    try:
        return await measured.answer("a", tokens)
    finally:
        noise.cancel()
        await asyncio.gather(noise, return_exceptions=True)


async def measured(rounds: int, tokens: int, folder: Path, models: dict[str, Path]) -> dict[str, dict[str, float]]:
    seen: dict[str, list[tuple[float, float]]] = {"alone": [], "idle": [], "busy": [], "apart": []}
    async with AsyncExitStack() as stack:
        alone_at = await stack.enter_async_context(node(folder, "alone", models["a"]))
        both_at = await stack.enter_async_context(node(folder, "both", models["a"], models["b"]))
        second_core = sorted(os.sched_getaffinity(0))[1]
        other_at = await stack.enter_async_context(node(folder, "other", models["b"], core=second_core))
        other = await stack.enter_async_context(Stream.open(other_at, ""))
        alone = await stack.enter_async_context(Stream.open(alone_at, ""))
        first = await stack.enter_async_context(Stream.open(both_at, ""))
        second = await stack.enter_async_context(Stream.open(both_at, "b"))
        for _ in range(rounds):
            seen["alone"].append(await alone.answer("a", tokens))
            seen["idle"].append(await first.answer("a", tokens))
            seen["busy"].append(await beside(second, first, tokens))
            second = await stack.enter_async_context(Stream.open(both_at, "b"))
            seen["apart"].append(await beside(other, alone, tokens))
            other = await stack.enter_async_context(Stream.open(other_at, ""))
    return {
        case: {
            "first_token_s": statistics.median(first for first, _ in values),
            "tokens_per_s": statistics.median(rate for _, rate in values),
        }
        for case, values in seen.items()
    }


def synthesized(folder: Path) -> dict[str, Path]:
    """Two models of one shape and different weights, by name."""
    models = {name: folder / name for name in ("a", "b")}
    for seed, path in enumerate(models.values()):
        program = [sys.executable, "-P", "-m", "ryzanstein.tools.synthesize.command"]
        command = [*program, str(path), "--preset", "S", "--seed", str(seed)]
        subprocess.run(command, check=True, capture_output=True)
    return models


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--tokens", type=int, default=600)
    parser.add_argument("--json", action="store_true")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        result = asyncio.run(measured(arguments.rounds, arguments.tokens, Path(folder), synthesized(Path(folder))))
    if arguments.json:
        print(json.dumps({"cores": os.cpu_count(), "results": result}))
        return
    base = result["alone"]
    for case, values in result.items():
        ratios = {name: value / base[name] for name, value in values.items()}
        print(f"{case:6} " + "   ".join(f"{name} {value:.4g} ({ratios[name]:.2f})" for name, value in values.items()))


if __name__ == "__main__":
    main()
