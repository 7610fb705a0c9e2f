"""What the Python client costs: microseconds per token over a bare stub, import, and memory.

`.venv/bin/python lab/benchmarks/client.py [--rounds 9] [--json FILE]`. A router of the benchmark's own, in another process,
streams tokens as fast as it can; the bare stub and both clients read the same answer in turn. CPU seconds of this process
count, so that the router's speed does not. `--deaths N`: N times each, the router that an answer comes from is
killed or stopped, and how long the answer was silent then is measured; there are three routers.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import signal
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from itertools import pairwise
from pathlib import Path
from typing import Any

import grpc

from ryzanstein.cli.processes.cluster import ClusterSpec, LocalCluster
from ryzanstein.client import AsyncClient, Client
from ryzanstein.client.transport import OPTIONS
from ryzanstein.demo import MODEL_DIR
from ryzanstein.lab.machine import machine
from ryzanstein.v1 import inference_pb2 as pb
from ryzanstein.v1 import inference_pb2_grpc as rpc
from ryzanstein.v1 import router_pb2
from ryzanstein.v1.router_pb2_grpc import RouterServiceStub

TOKENS = 20_000
IMPORT = "import time; began = time.perf_counter(); import ryzanstein.client; print(time.perf_counter() - began)"
GRPC = IMPORT.replace("ryzanstein.client", "grpc, grpc.aio, grpc_status.rpc_status")
MEMORY = """
from ryzanstein.client import Client
client = Client("{address}")
client.chat("x")
with open("/proc/self/statm") as memory:  # what would read it otherwise takes memory itself
    print(int(memory.read().split()[1]) * 4096 / 2**20)
"""


class FastRouter(rpc.InferenceServiceServicer):
    """Streams one token a message, all of them made before."""

    def __init__(self) -> None:
        started = pb.GenerationEvent(started=pb.GenerationStarted(generation_id="g", model="m", node_id="node-0"))
        deltas = [
            pb.GenerationEvent(delta=pb.GenerationDelta(first_index=index, token_ids=[index], text="word ", node_id="node-0"))
            for index in range(TOKENS)
        ]
        finished = pb.GenerationEvent(finished=pb.GenerationFinished(finish_reason=pb.FINISH_REASON_STOP))
        self._responses = [pb.StreamChatResponse(event=event) for event in (started, *deltas, finished)]

    def StreamChat(self, request: Any, context: Any) -> Iterator[pb.StreamChatResponse]:
        yield from self._responses


def serve() -> None:
    """Serves until standard input ends."""
    server = grpc.server(ThreadPoolExecutor(4))
    rpc.add_InferenceServiceServicer_to_server(FastRouter(), server)
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    print(port, flush=True)
    sys.stdin.read()
    server.stop(0).wait()


def bare(address: str) -> None:
    with grpc.insecure_channel(address, options=OPTIONS) as channel:
        text = ""
        for response in rpc.InferenceServiceStub(channel).StreamChat(pb.StreamChatRequest()):
            text += response.event.delta.text


def blocking(address: str) -> None:
    with Client(address) as client:
        client.chat("x")


async def bare_async(address: str) -> None:
    async with grpc.aio.insecure_channel(address, options=OPTIONS) as channel:
        text, call = "", rpc.InferenceServiceStub(channel).StreamChat(pb.StreamChatRequest())
        while (response := await call.read()) is not grpc.aio.EOF:
            text += response.event.delta.text


async def awaited(address: str) -> None:
    async with AsyncClient(address) as client:
        await client.chat("x")


KINDS = {
    "bare": bare,
    "sync": blocking,
    "bare_async": lambda address: asyncio.run(bare_async(address)),
    "async": lambda address: asyncio.run(awaited(address)),
}


def cpu_us(kind: str, address: str) -> float:
    """Returns CPU microseconds per token."""
    began = time.process_time()
    KINDS[kind](address)
    return (time.process_time() - began) / TOKENS * 1e6


def printed(program: str) -> float:
    done = subprocess.run([sys.executable, "-P", "-c", program], capture_output=True, text=True, check=True, timeout=60)
    return float(done.stdout)


def silences(rounds: int, number: signal.Signals) -> list[float]:
    """Returns for each router that got a signal the longest silence in the answer that came from it, in seconds. Raises
    AssertionError where the answer is not the undisturbed one."""
    expected, found = " ".join(map(str, range(1, 151))), []
    with LocalCluster(ClusterSpec(MODEL_DIR, num_nodes=2, num_routers=3, tp=1)) as cluster:
        for _ in range(rounds):
            text, times, killed = "", [], ""
            with Client(cluster.router_addresses) as client, client.stream("Count from 1 to 150.", temperature=0) as stream:
                for piece in stream.text():
                    text += piece
                    times.append(time.monotonic())
                    if not killed and len(times) == 30:
                        killed = next(name for name in cluster.router_names if _running(cluster.services[name].grpc_address))
                        times[-1] = time.monotonic()
                        os.kill(cluster.services[killed].pid, number)
            assert text == expected, text
            found.append(max(after - before for before, after in pairwise(times[29:])))
            cluster.kill(killed)
            cluster.restart(killed)
    return found


def _running(address: str) -> bool:
    with grpc.insecure_channel(address, options=OPTIONS) as channel:
        answer = RouterServiceStub(channel).GetRouterStatus(router_pb2.GetRouterStatusRequest(), timeout=5)
    return answer.figures.running > 0


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--json", type=Path, default=None)
    parser.add_argument("--serve", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--deaths", type=int, default=0)
    options = parser.parse_args()
    if options.deaths:
        for number, happens in ((signal.SIGKILL, "is killed"), (signal.SIGSTOP, "freezes")):
            found_s = silences(options.deaths, number)
            print(f"silence when the router {happens}: {', '.join(f'{each * 1e3:.0f}' for each in found_s)} ms")
        return
    if options.serve:
        serve()
        return
    with subprocess.Popen(
        [sys.executable, "-P", __file__, "--serve"], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as router:
        assert router.stdin is not None
        assert router.stdout is not None
        with closing(router.stdin):
            address = f"127.0.0.1:{router.stdout.readline().strip()}"
            samples: dict[str, list[float]] = {kind: [] for kind in KINDS}
            for _ in range(options.rounds):
                for kind in KINDS:
                    samples[kind].append(cpu_us(kind, address))
            memory = printed(MEMORY.format(address=address))
    found = {
        "machine": machine(),
        "us_per_token": {kind: round(statistics.median(values), 2) for kind, values in samples.items()},
        "sync_over_bare_us": round(statistics.median(a - b for a, b in zip(samples["sync"], samples["bare"], strict=True)), 2),
        "async_over_bare_us": round(
            statistics.median(a - b for a, b in zip(samples["async"], samples["bare_async"], strict=True)), 2
        ),
        "import_s": round(statistics.median(printed(IMPORT) for _ in range(options.rounds)), 3),
        "import_of_grpc_s": round(statistics.median(printed(GRPC) for _ in range(options.rounds)), 3),
        "resident_mib": round(memory, 1),
    }
    text = json.dumps(found, indent=1)
    print(text)
    if options.json is not None:
        options.json.write_text(text + "\n")


if __name__ == "__main__":
    main()
