"""Measures how much more two nodes generate than one: throughput of a cluster, with the time that everything else takes.

    .venv/bin/python lab/benchmarks/two_nodes.py [--pairs 5] [--params 100M] [--quantization none] [--json]

Case A is a cluster of one node, case B one of two. Each node has one rank of one thread, on a core of its own: the first node's
processes are bound to the first core, the second node's to the second. Both clusters have the same model and settings, and both
get the same number of clients per node, so that batches are of the same size. They run at the same time but are loaded in turn:
A, B, B, A, A, B and so on, so that a slow minute of the machine strikes both.

The rest of a cluster (agents, router, orchestrator) and the client need processor time, too. On a machine of two cores they
take it from the ranks: in A the second core is free for them, in B it is not. So the benchmark reports two ratios of B to A:

- raw: tokens per second, as a client sees them;
- left: tokens per second that the ranks had a core, times the number of ranks. Only the time is taken out in which a rank was
  ready to run and another process had its core (Linux counts it, as the run queue's delay in /proc/PID/task/TID/schedstat). A
  rank that waits for the router or for requests has its core, and counts. This is the ratio with enough cores for the rest.

The processor time of each kind of process (rank, agent, router, orchestrator, client) is printed as cores used, with the cores
that the ranks were kept out of. The target of the second ratio, and with more than four cores of the first, is 1.8.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path

import psutil

from ryzanstein.cli.processes.cluster import ORCHESTRATOR, ClusterSpec, LocalCluster
from ryzanstein.cli.processes.host import Host
from ryzanstein.rpc.client import open_channel
from ryzanstein.v1 import inference_pb2 as pb
from ryzanstein.v1.inference_pb2_grpc import InferenceServiceStub

TARGET = 1.8
WARM_UP_TOKENS = 8
KINDS = ("rank", "agent", "router", "orchestrator", "client")


@dataclass(frozen=True)
class Load:
    """What clients ask: each has one answer running at a time, of `tokens` tokens, for `seconds`."""

    clients_per_node: int
    tokens: int
    seconds: float


@dataclass(frozen=True)
class Sample:
    """One case, once. `cores` is the processor time of each kind of process, per second.

    `kept_out` is how many cores the ranks were ready to use and did not get.
    """

    nodes: int
    tokens_per_s: float
    cores: dict[str, float]
    kept_out: float

    @property
    def left_tokens_per_s(self) -> float:
        """The tokens, as if no other process had ever had a rank's core."""
        return self.tokens_per_s * self.nodes / (self.nodes - self.kept_out)


class Meter:
    """The processes of a cluster, and the processor time that each kind has used."""

    def __init__(self, cluster: LocalCluster) -> None:
        self._processes: dict[str, list[psutil.Process]] = {kind: [] for kind in KINDS}
        self._processes["client"].append(psutil.Process())
        self._processes["router"].append(psutil.Process(cluster.services[cluster.router_names[0]].pid))
        self._processes["orchestrator"].append(psutil.Process(cluster.services[ORCHESTRATOR].pid))
        for node_id in cluster.node_ids:
            agent = psutil.Process(cluster.services[node_id].pid)
            children = agent.children(recursive=True)
            self._processes["agent"].append(agent)
            # The ranks are the grandchildren: they are forked by a server. All others belong to the agent.
            ranks = [child for child in children if child.ppid() != agent.pid]
            self._processes["rank"] += ranks
            self._processes["agent"] += [child for child in children if child not in ranks]
        if len(self._processes["rank"]) != len(cluster.node_ids):
            raise RuntimeError(f"{len(self._processes['rank'])} ranks found instead of {len(cluster.node_ids)}")

    def used_s(self) -> dict[str, float]:
        return {kind: sum(map(_used_s, processes)) for kind, processes in self._processes.items()}

    def kept_out_s(self) -> float:
        """Returns how long the ranks could have run but had no core."""
        return sum(_waited_s(rank.pid) for rank in self._processes["rank"])


def _used_s(process: psutil.Process) -> float:
    times = process.cpu_times()
    return float(times.user + times.system)


def _waited_s(pid: int) -> float:
    """Returns the time of a rank's threads on run queues: the second number of schedstat, in nanoseconds."""
    return sum(int((task / "schedstat").read_text().split()[1]) for task in Path(f"/proc/{pid}/task").iterdir()) / 1e9


@contextmanager
def started(model: Path, num_nodes: int, flags: tuple[str, ...]) -> Iterator[LocalCluster]:
    """A cluster whose nodes have one core each."""
    cores = sorted(os.sched_getaffinity(0))
    taskset = shutil.which("taskset") or "/usr/bin/taskset"
    hosts = {f"node-{i}": Host("127.0.0.1", (taskset, "--cpu-list", str(cores[i]))) for i in range(num_nodes)}
    spec = ClusterSpec(
        model,
        num_nodes=num_nodes,
        tp=1,
        worker_flags=("--pin", *flags),
        router_flags=("--policy", "least_loaded"),
        hosts=hosts,
    )
    with LocalCluster(spec) as cluster:
        yield cluster


async def sampled(cluster: LocalCluster, meter: Meter, load: Load) -> Sample:
    """Loads a cluster and counts the tokens that arrive between the first and the last moment of the measured time."""
    num_nodes = len(cluster.node_ids)
    seen = 0
    async with open_channel(cluster.router_address) as channel:
        stub = InferenceServiceStub(channel)

        async def client(number: int) -> None:
            nonlocal seen
            request = pb.StreamCompleteRequest(complete=_asked(number, load.tokens))
            while True:
                async for response in stub.StreamComplete(request, metadata=(("x-cancel-on-disconnect", "true"),)):
                    seen += len(response.event.delta.token_ids)

        tasks = [asyncio.create_task(client(number)) for number in range(load.clients_per_node * num_nodes)]
        try:
            async with asyncio.timeout(120):
                while seen < WARM_UP_TOKENS * len(tasks):
                    _raise_failure(tasks)
                    await asyncio.sleep(0.05)
            first, used, waited, began = seen, meter.used_s(), meter.kept_out_s(), time.perf_counter()
            await asyncio.sleep(load.seconds)
            _raise_failure(tasks)
            took = time.perf_counter() - began
            cores = {kind: (now - used[kind]) / took for kind, now in meter.used_s().items()}
            return Sample(num_nodes, (seen - first) / took, cores, (meter.kept_out_s() - waited) / took)
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)


def _raise_failure(tasks: list[asyncio.Task[None]]) -> None:
    for task in tasks:
        if task.done():
            task.result()


def _asked(number: int, tokens: int) -> pb.CompleteRequest:
    sampling = pb.SamplingParams(temperature=0, max_tokens=tokens, ignore_eos=True)
    prompt = pb.TokenIds(ids=[100 + number, *range(200, 215)])
    return pb.CompleteRequest(token_ids=prompt, sampling=sampling)


async def measured(model: Path, load: Load, pairs: int, flags: tuple[str, ...]) -> dict[int, list[Sample]]:
    """Samples of both cases, by the number of nodes."""
    samples: dict[int, list[Sample]] = {1: [], 2: []}
    with started(model, 1, flags) as one, started(model, 2, flags) as two:
        meters = {1: (one, Meter(one)), 2: (two, Meter(two))}
        for pair in range(pairs):
            for num_nodes in (1, 2) if pair % 2 == 0 else (2, 1):
                samples[num_nodes].append(await sampled(*meters[num_nodes], load))
                await _until_idle(meters[num_nodes][1])
    return samples


async def _until_idle(meter: Meter) -> None:
    """Returns when the ranks no longer compute."""
    used = meter.used_s()["rank"]
    while True:
        await asyncio.sleep(0.3)
        if (now := meter.used_s()["rank"]) - used < 0.02:
            return
        used = now


def ratios(samples: dict[int, list[Sample]]) -> dict[str, float]:
    """Medians of the pairs' own ratios."""
    both = list(zip(samples[1], samples[2], strict=True))
    return {
        "raw": statistics.median(two.tokens_per_s / one.tokens_per_s for one, two in both),
        "left": statistics.median(two.left_tokens_per_s / one.left_tokens_per_s for one, two in both),
    }


def table(samples: dict[int, list[Sample]]) -> Iterator[str]:
    yield "nodes  tokens/s      left  " + "  ".join(f"{kind:>12}" for kind in (*KINDS, "kept out"))
    for num_nodes, of_case in samples.items():
        rate = statistics.median(sample.tokens_per_s for sample in of_case)
        left = statistics.median(sample.left_tokens_per_s for sample in of_case)
        cores = [statistics.median(sample.cores[kind] for sample in of_case) for kind in KINDS]
        cores.append(statistics.median(sample.kept_out for sample in of_case))
        yield f"{num_nodes:5}  {rate:8.1f}  {left:8.1f}  " + "  ".join(f"{value:12.3f}" for value in cores)
    of_pairs = ratios(samples)
    yield f"two over one: raw {of_pairs['raw']:.2f}, left {of_pairs['left']:.2f} (target {TARGET})"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--pairs", type=int, default=5)
    parser.add_argument("--seconds", type=float, default=10.0, help="of each measurement")
    parser.add_argument("--clients", type=int, default=4, help="per node")
    parser.add_argument("--tokens", type=int, default=128, help="of each answer")
    parser.add_argument("--params", default="100M", help="size of the model")
    parser.add_argument("--quantization", default="none", help="none or int8")
    parser.add_argument("--json", action="store_true")
    arguments = parser.parse_args()
    if len(os.sched_getaffinity(0)) < 2:
        parser.error("two cores are needed")
    load = Load(arguments.clients, arguments.tokens, arguments.seconds)
    with tempfile.TemporaryDirectory() as folder:
        model = Path(folder) / "model"
        written = ["--params", arguments.params, "--dtype", "float32"]
        command = [sys.executable, "-P", "-m", "ryzanstein.tools.synthesize.command", str(model), *written]
        subprocess.run(command, check=True, capture_output=True)
        flags = ("--quantization", arguments.quantization)
        samples = asyncio.run(measured(model, load, arguments.pairs, flags))
    if arguments.json:
        of_cases = {num_nodes: [asdict(sample) for sample in of_case] for num_nodes, of_case in samples.items()}
        print(json.dumps({"cores": os.cpu_count(), "load": asdict(load), "samples": of_cases, "ratios": ratios(samples)}))
    else:
        print(*table(samples), sep="\n")


if __name__ == "__main__":
    main()
