"""A start is given up when nothing moves, however long it takes; and at once when it cannot succeed."""

from __future__ import annotations

import re
import signal
import time
from collections.abc import Callable, Iterator
from concurrent import futures
from contextlib import contextmanager
from pathlib import Path

import grpc
import pytest
from grpc_health.v1 import health, health_pb2_grpc

from ryzanstein.cli.processes.ports import free_ports
from ryzanstein.cli.processes.service_process import ServiceFailedError, ServiceProcess
from ryzanstein.cli.processes.start_watch import LoadingPace, StartWatch
from ryzanstein.v1 import worker_pb2 as pb
from ryzanstein.v1 import worker_pb2_grpc

Answer = Callable[[pb.GetStatusRequest], pb.GetStatusResponse]


class Node(worker_pb2_grpc.WorkerServiceServicer):
    """A node that says what the test wants."""

    def __init__(self, answer: Answer) -> None:
        self._answer = answer

    def GetStatus(self, request: pb.GetStatusRequest, context: object) -> pb.GetStatusResponse:
        return self._answer(request)


class Running(ServiceProcess):
    """A service that runs elsewhere."""

    running = True
    pid = 0

    def check_running(self) -> None:
        pass


@contextmanager
def served(tmp_path: Path, answer: Answer) -> Iterator[ServiceProcess]:
    server = grpc.server(futures.ThreadPoolExecutor(2))
    worker_pb2_grpc.add_WorkerServiceServicer_to_server(Node(answer), server)
    health_pb2_grpc.add_HealthServicer_to_server(health.HealthServicer(), server)
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    try:
        yield Running("node-0", "worker", {"grpc_port": port, "metrics_port": 1}, (), tmp_path / "node-0.log")
    finally:
        server.stop(None)


def status(phase: str = "load", still_s: float = 100.0, state: pb.NodeState = pb.NODE_STATE_STARTING) -> pb.GetStatusResponse:
    rank = pb.RankStatus(rank=1, pid=7, phase=phase)
    rank.since_progress.FromNanoseconds(int(still_s * 1e9))
    return pb.GetStatusResponse(beat=pb.Beat(model="m", state=state, reason="loading m"), ranks=[rank])


def test_a_rank_that_moves_keeps_the_start_alive(tmp_path: Path) -> None:
    with served(tmp_path, lambda _: status(still_s=0.1)) as node:
        watch = StartWatch([node], still_s=1.0)
        until = time.monotonic() + 2.5
        watch.wait(lambda: ["node-0"] if time.monotonic() < until else [])


def test_ranks_that_stand_still_are_named_with_what_they_do(tmp_path: Path) -> None:
    (tmp_path / "node-0.log").write_text("last words\n")
    with served(tmp_path, lambda _: status()) as node, pytest.raises(ServiceFailedError) as caught:
        StartWatch([node], still_s=1.0).wait(lambda: ["node-0"])
    assert "node-0 did not become ready: nothing has moved for 1 s (loading m, rank 1 in load)" in str(caught.value)
    assert str(tmp_path / "node-0.log") in str(caught.value)
    assert "last words" in str(caught.value)


def test_another_phase_is_movement(tmp_path: Path) -> None:
    phases = iter(range(10_000))
    with served(tmp_path, lambda _: status(phase=str(next(phases)))) as node:
        watch = StartWatch([node], still_s=1.0)
        until = time.monotonic() + 2.5
        watch.wait(lambda: ["node-0"] if time.monotonic() < until else [])


def test_a_model_that_is_refused_ends_the_start_at_once(tmp_path: Path) -> None:
    refused = pytest.raises(ServiceFailedError, match="node-0 cannot serve: m: loading m")
    with served(tmp_path, lambda _: status(state=pb.NODE_STATE_FAILED)) as node, refused:
        StartWatch([node], still_s=60.0).wait(lambda: ["node-0"])


def test_what_ranks_do_is_told(tmp_path: Path) -> None:
    given: list[str] = []
    with served(tmp_path, lambda _: status(still_s=0.0)) as node:
        StartWatch([node]).wait(lambda: ["node-0"] if not given else [], given.append)
    assert given == ["node-0: loading m, rank 1 in load"]


def test_how_much_of_the_weights_is_read_is_told_and_is_movement(tmp_path: Path) -> None:
    given: list[str] = []
    steps = iter(range(1, 10_000))

    def reading(_: pb.GetStatusRequest) -> pb.GetStatusResponse:
        told = status()
        told.ranks[0].loaded_bytes, told.ranks[0].load_bytes = 2**20 * min(next(steps), 64), 128 * 2**20
        return told

    with served(tmp_path, reading) as node:
        watch = StartWatch([node], still_s=1.0)
        until = time.monotonic() + 4.0
        watch.wait(lambda: ["node-0"] if time.monotonic() < until else [], given.append)
    assert given[0] == "node-0: loading m, 1% of 128 MiB read"
    assert re.fullmatch(r"node-0: loading m, \d+% of 128 MiB read, about \d+ s left", given[-1])


def test_what_each_model_does_is_told_and_packing_after_reading(tmp_path: Path) -> None:
    given: list[str] = []

    def packing(request: pb.GetStatusRequest) -> pb.GetStatusResponse:
        told = status(phase="pack" if request.model == "" else "load")
        rank = told.ranks[0]
        if request.model == "":
            told.beat.other_models.append("n")
            rank.loaded_bytes = rank.load_bytes = rank.pack_bytes = 128 * 2**20
            rank.packed_bytes = 32 * 2**20
        else:
            told.beat.model, told.beat.reason = "n", "loading n"
            rank.loaded_bytes, rank.load_bytes, rank.pack_bytes = 2**20, 4 * 2**20, 2**20
        return told

    with served(tmp_path, packing) as node:
        StartWatch([node]).wait(lambda: ["node-0"] if not given else [], given.append)
    assert given == ["node-0: loading m, 25% of 128 MiB packed, loading n, 25% of 4 MiB read"]


def test_the_pace_begins_again_with_another_model() -> None:
    pace = LoadingPace()
    assert pace.left_s(0, 100, 0.0) is None
    assert pace.left_s(25, 100, 5.0) == 15.0
    assert pace.left_s(5, 50, 6.0) is None
    assert pace.left_s(10, 50, 9.0) == 24.0


def test_a_service_that_is_stopped_while_it_imports_is_given_up(tmp_path: Path) -> None:
    grpc_port, metrics_port = free_ports(2)
    flags = {"grpc_port": grpc_port, "metrics_port": metrics_port, "database": str(tmp_path / "o.sqlite")}
    service = ServiceProcess("orchestrator", "orchestrator", flags, (), tmp_path / "o.log")
    service.start()
    try:
        service.signal(signal.SIGSTOP)
        with pytest.raises(ServiceFailedError, match=r"did not become ready: nothing has moved for 1 s \(starts\)"):
            StartWatch([service], still_s=1.0).wait(lambda: ["orchestrator"])
    finally:
        service.kill()
