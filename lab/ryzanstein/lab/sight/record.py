"""`python -P -m ryzanstein.lab.sight.record FAULT...|calm_hour`: what the rules see of a real cluster.

Two nodes of two ranks, a router with a database, three clients. A fault strikes after a while of calm and lasts to the end,
but for what the cluster mends itself. `calm_hour` is an hour without a fault, at 70 % of the load that the cluster can
serve. The recordings are tests/monitoring/recorded/FAULT.yaml.
"""

from __future__ import annotations

import asyncio
import os
import random
import signal
import sqlite3
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, closing, contextmanager, nullcontext
from pathlib import Path
from types import MappingProxyType

import grpc

from ryzanstein.cli.processes.cluster import ORCHESTRATOR, ClusterSpec, LocalCluster
from ryzanstein.demo import MODEL_DIR
from ryzanstein.lab.load.arrivals import poisson
from ryzanstein.lab.load.capacity import NUM_PROMPTS, capacity, routers_of
from ryzanstein.lab.load.run import LoadBounds, LoadRun
from ryzanstein.lab.load.workload import Shape, conversations
from ryzanstein.lab.sight.__main__ import FOLDER
from ryzanstein.lab.sight.recording import Recording, UsedSeries
from ryzanstein.rpc.client import open_blocking_channel
from ryzanstein.v1 import inference_pb2, inference_pb2_grpc, worker_pb2, worker_pb2_grpc

RECORDED = Path(__file__).resolve().parents[4] / "tests" / "monitoring" / "recorded"
_CLIENTS = 3
_STEP_S, _CALM_STEPS, _STEPS = 5.0, 6, 18
CALM_HOUR = "calm_hour"
_ONLY_NAMES = "gen-ai"
"""Rules that give series a second name: no alert needs them."""
_HOUR_S, _HOUR_STEP_S, _HOUR_SHARE = 3600.0, 30.0, 0.7
_HOUR_SHAPE = Shape(num_input=64, num_output=96)
_RETRY_S = 0.1
Fault = Callable[[LocalCluster], AbstractContextManager[None]]


def _calm(cluster: LocalCluster) -> AbstractContextManager[None]:
    return nullcontext()


@contextmanager
def _node_killed(cluster: LocalCluster) -> Iterator[None]:
    cluster.kill("node-1")
    yield


@contextmanager
def _rank_stalled(cluster: LocalCluster) -> Iterator[None]:
    with open_blocking_channel(cluster.services["node-1"].grpc_address) as channel:
        status = worker_pb2_grpc.WorkerServiceStub(channel).GetStatus(worker_pb2.GetStatusRequest(), timeout=10)
    os.kill(status.ranks[1].pid, signal.SIGSTOP)
    yield


@contextmanager
def _store_outage(cluster: LocalCluster) -> Iterator[None]:
    path = cluster.state_dir / "sessions.db"
    with closing(sqlite3.connect(path, timeout=20, isolation_level=None)) as connection:
        connection.execute("BEGIN EXCLUSIVE")
        yield


@contextmanager
def _router_killed(cluster: LocalCluster) -> Iterator[None]:
    cluster.kill("router-0")
    yield


@contextmanager
def _all_nodes_killed(cluster: LocalCluster) -> Iterator[None]:
    for node_id in cluster.node_ids:
        cluster.kill(node_id)
    yield


FAULTS: Mapping[str, Fault] = MappingProxyType(
    {
        "calm": _calm,
        "node_killed": _node_killed,
        "rank_stalled": _rank_stalled,
        "store_outage": _store_outage,
        "router_killed": _router_killed,
        "all_nodes_killed": _all_nodes_killed,
    }
)


def record(fault: str, folder: Path = RECORDED) -> Path:
    """Records one fault on a cluster of its own, and returns the file."""
    with LocalCluster(ClusterSpec(MODEL_DIR)) as cluster:
        recording = _recording(cluster, _STEP_S)
        with load(cluster.router_address):
            _scrape(recording, _CALM_STEPS)
            with FAULTS[fault](cluster):
                _scrape(recording, _STEPS)
    path = folder / f"{fault}.yaml"
    struck_s = _CALM_STEPS * _STEP_S
    recording.write(path, f"Recorded: `python -P -m ryzanstein.lab.sight.record {fault}`. Struck after {struck_s:g} s.")
    return path


def record_calm_hour(folder: Path = RECORDED) -> Path:
    """Records an hour without a fault, at a share of what the cluster can serve. A wrong answer is an AssertionError."""
    with LocalCluster(ClusterSpec(MODEL_DIR)) as cluster:
        routers, recording = routers_of(cluster), _recording(cluster, _HOUR_STEP_S)

        async def serve() -> LoadRun:
            shape = await LoadRun(routers, LoadBounds()).measure(_HOUR_SHAPE)
            rate = _HOUR_SHARE * await capacity(routers, shape, seed=0)
            run = LoadRun(routers, LoadBounds(_HOUR_S))
            scraping = asyncio.ensure_future(asyncio.to_thread(_scrape, recording, round(_HOUR_S / _HOUR_STEP_S), _HOUR_STEP_S))
            await run.open(conversations(shape, NUM_PROMPTS, 0), poisson(rate, random.Random(0)))
            await scraping
            return run

        run = asyncio.run(serve())
    assert not run.num_wrong, f"{run.num_wrong} of {len(run.outcomes)} answers are wrong"
    path = folder / f"{CALM_HOUR}.yaml"
    about = f"{len(run.outcomes)} answers, at {_HOUR_SHARE:.0%} of what the cluster can serve."
    recording.write(path, f"Recorded: `python -P -m ryzanstein.lab.sight.record {CALM_HOUR}`. {about}")
    return path


def _recording(cluster: LocalCluster, step_s: float) -> Recording:
    jobs = {"router-0": "router", "node-0": "worker", "node-1": "worker", ORCHESTRATOR: ORCHESTRATOR}
    targets = {name: (job, cluster.services[name].metrics_url) for name, job in jobs.items()}
    rules = [path for path in sorted((FOLDER / "rules").glob("*.yaml")) if path.stem != _ONLY_NAMES]
    return Recording(targets, UsedSeries(rules), step_s)


def _scrape(recording: Recording, steps: int, step_s: float = _STEP_S) -> None:
    began = time.monotonic()
    for step in range(steps):
        time.sleep(max(0.0, began + step * step_s - time.monotonic()))
        recording.scrape()
    time.sleep(max(0.0, began + steps * step_s - time.monotonic()))


@contextmanager
def load(address: str) -> Iterator[None]:
    """Clients that stream one answer after another, each of a session."""
    stopped = threading.Event()
    clients = [threading.Thread(target=_ask, args=(address, f"client-{number}", stopped)) for number in range(_CLIENTS)]
    for client in clients:
        client.start()
    try:
        yield
    finally:
        stopped.set()
        for client in clients:
            client.join()


def _ask(address: str, session_id: str, stopped: threading.Event) -> None:
    message = inference_pb2.Message(role=inference_pb2.ROLE_USER, content="Count from 1 to 60.")
    sampling = inference_pb2.SamplingParams(temperature=0.0, max_tokens=120)
    with open_blocking_channel(address) as channel:
        stub = inference_pb2_grpc.InferenceServiceStub(channel)
        turn = 0
        while not stopped.is_set():
            turn += 1
            chat = inference_pb2.ChatRequest(messages=[message], session_id=f"{session_id}-{turn}", sampling=sampling)
            try:
                for _ in stub.StreamChat(inference_pb2.StreamChatRequest(chat=chat), timeout=10):
                    pass
            except grpc.RpcError:
                stopped.wait(_RETRY_S)


def main() -> None:
    """Records the named faults, or all; the calm hour only if it is named."""
    for fault in sys.argv[1:] or FAULTS:
        print(record_calm_hour() if fault == CALM_HOUR else record(fault), flush=True)


if __name__ == "__main__":
    main()
