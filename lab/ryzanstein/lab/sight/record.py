"""`python -P -m ryzanstein.lab.sight.record FAULT...`: makes faults on a real cluster, and records what the rules see of them.

Two nodes of two ranks, a router with a database, three clients. A fault strikes after a while of calm and lasts to the end,
but for what the cluster mends itself. The recordings are tests/monitoring/recorded/FAULT.yaml.
"""

from __future__ import annotations

import os
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
from ryzanstein.lab.sight.__main__ import FOLDER
from ryzanstein.lab.sight.recording import STEP_S, Recording, UsedSeries
from ryzanstein.rpc.client import open_blocking_channel
from ryzanstein.v1 import inference_pb2, inference_pb2_grpc, worker_pb2, worker_pb2_grpc

RECORDED = Path(__file__).resolve().parents[4] / "tests" / "monitoring" / "recorded"
_CLIENTS = 3
_CALM_STEPS, _STEPS = 6, 18
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
    jobs = {"router-0": "router", "node-0": "worker", "node-1": "worker", ORCHESTRATOR: ORCHESTRATOR}
    with LocalCluster(ClusterSpec(MODEL_DIR)) as cluster:
        targets = {name: (job, cluster.services[name].metrics_url) for name, job in jobs.items()}
        recording = Recording(targets, UsedSeries(sorted((FOLDER / "rules").glob("*.yaml"))))
        with load(cluster.router_address):
            _scrape(recording, _CALM_STEPS)
            with FAULTS[fault](cluster):
                _scrape(recording, _STEPS)
    path = folder / f"{fault}.yaml"
    struck_s = _CALM_STEPS * STEP_S
    recording.write(path, f"Recorded: `python -P -m ryzanstein.lab.sight.record {fault}`. Struck after {struck_s:g} s.")
    return path


def _scrape(recording: Recording, steps: int) -> None:
    began = time.monotonic()
    for step in range(steps):
        time.sleep(max(0.0, began + step * STEP_S - time.monotonic()))
        recording.scrape()
    time.sleep(max(0.0, began + steps * STEP_S - time.monotonic()))


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
    """Records the named faults, or all."""
    for fault in sys.argv[1:] or FAULTS:
        print(record(fault), flush=True)


if __name__ == "__main__":
    main()
