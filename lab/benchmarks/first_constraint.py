"""What the first constraint of a node costs: itself, and the streams that run meanwhile.

A cluster with one node of one rank. Streams without a constraint run; then the first constrained
request comes, and a second one like it. Prints the longest silence of a stream in each phase.

    .venv/bin/python lab/benchmarks/first_constraint.py --model gemma.gguf
"""

from __future__ import annotations

import argparse
import threading
import time
from itertools import pairwise
from pathlib import Path

import psutil

from ryzanstein.cli.processes.cluster import ClusterSpec, LocalCluster
from ryzanstein.rpc.client import open_blocking_channel
from ryzanstein.v1 import inference_pb2 as inference
from ryzanstein.v1 import inference_pb2_grpc as rpc

_PHASE_S = 5.0


class Streams:
    """Streams that run until `stop`, and when each of their tokens came."""

    def __init__(self, address: str, count: int) -> None:
        self._stop = threading.Event()
        self.seen: list[list[float]] = [[] for _ in range(count)]
        self._threads = [threading.Thread(target=self._run, args=(address, seen)) for seen in self.seen]
        for thread in self._threads:
            thread.start()

    def _run(self, address: str, seen: list[float]) -> None:
        sampling = inference.SamplingParams(max_tokens=2000, ignore_eos=True, temperature=0)
        with open_blocking_channel(address) as channel:
            stub = rpc.InferenceServiceStub(channel)
            while not self._stop.is_set():
                request = inference.StreamCompleteRequest(complete=inference.CompleteRequest(text="One", sampling=sampling))
                call = stub.StreamComplete(request, timeout=120)
                for response in call:
                    if response.event.WhichOneof("kind") == "delta":
                        seen.append(time.monotonic())
                    if self._stop.is_set():
                        call.cancel()
                        break

    def longest_silence_s(self, since: float, until: float) -> float:
        """Returns the longest time without a token of a stream, of those that a phase overlaps."""
        pairs = [pair for seen in self.seen for pair in pairwise(seen)]
        return max((b - a for a, b in pairs if b > since and a < until), default=0.0)

    def stop(self) -> None:
        self._stop.set()
        for thread in self._threads:
            thread.join()


def constrained(address: str) -> float:
    """Returns how long a short constrained answer takes, in seconds."""
    began = time.monotonic()
    sampling = inference.SamplingParams(max_tokens=8, constraint=inference.Constraint(regex="[0-9]{1,3}"))
    with open_blocking_channel(address) as channel:
        request = inference.CompleteRequest(text="One", sampling=sampling)
        rpc.InferenceServiceStub(channel).Complete(request, timeout=300)
    return time.monotonic() - began


def judge_bytes(cluster: LocalCluster) -> int:
    """Returns the resident memory of the node's process that judges constraints."""
    children = psutil.Process(cluster.services["node-0"].pid).children(recursive=True)
    return sum(int(child.memory_info().rss) for child in children if child.name() == "grammars")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", type=Path, required=True)
    parser.add_argument("--streams", type=int, default=2)
    parser.add_argument("--settle-s", type=float, default=20.0, help="time between the start and the first stream")
    given = parser.parse_args()
    spec = ClusterSpec(given.model.resolve(), num_nodes=1, tp=1)
    with LocalCluster(spec) as cluster:
        time.sleep(given.settle_s)
        streams = Streams(cluster.router_address, given.streams)
        try:
            time.sleep(_PHASE_S)
            marks = [time.monotonic()]
            for name in ("first", "second"):
                took_s = constrained(cluster.router_address)
                marks.append(time.monotonic())
                silence_s = streams.longest_silence_s(*marks[-2:])
                print(f"{name} constraint: {took_s:.2f} s; longest silence of a stream meanwhile: {silence_s:.3f} s")
            usual_s = streams.longest_silence_s(marks[0] - _PHASE_S + 1, marks[0])
            print(f"longest silence without constraints: {usual_s:.3f} s")
            print(f"resident memory of the process that judges constraints: {judge_bytes(cluster) / 2**20:.0f} MiB")
        finally:
            streams.stop()


if __name__ == "__main__":
    main()
