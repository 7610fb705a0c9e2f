"""The leading orchestrator is killed, or freezes, under load and while a model changes: real processes and a real Redis.

Two orchestrators, two nodes, a router, and clients that stream. What the nodes were told, and when, is in their logs.
"""

from __future__ import annotations

import signal
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from datetime import datetime
from pathlib import Path
from typing import Any

import pytest
from tests.cluster.test_standby import Orchestrators, Reader, until

from ryzanstein.cli.processes.cluster import ClusterSpec
from ryzanstein.cli.processes.host import LOCAL
from ryzanstein.cli.processes.ports import free_ports
from ryzanstein.demo import MODEL_DIR
from ryzanstein.lab.chaos.machines.redis_server import RedisServer
from ryzanstein.v1 import orchestrator_pb2 as pb

WITHIN_S = 10.0
"""From the end of the leader until the next one instructs; 7 to 8 s on a machine that has nothing else to do."""
NODES = ("node-0", "node-1")

pytestmark = [pytest.mark.cluster, pytest.mark.lab, pytest.mark.timeout(600)]


@pytest.fixture
def served(
    new_harness: Callable[[ClusterSpec], Iterator[Any]], tmp_path: Path, part: Callable[[str], str]
) -> Iterator[tuple[Any, Orchestrators]]:
    part("redis-server")
    redis = RedisServer(LOCAL, tmp_path / "redis", free_ports(1)[0])
    redis.start()
    both = Orchestrators(redis.url, free_ports(2), tmp_path)
    follow = {"orchestrator": ",".join(both.addresses)}
    settings = {"orchestrator": both.settings(both.ports[0]), **dict.fromkeys((*NODES, "router-0"), follow)}
    spec = ClusterSpec(MODEL_DIR, num_nodes=2, tp=1, orchestrator_port=both.ports[0], settings=settings)
    try:
        for harness in new_harness(spec):
            both.start(both.ports[1])
            yield harness, both
    finally:
        both.end()
        redis.kill()


def lines(harness: Any, event: str) -> list[tuple[float, str, dict[str, Any]]]:
    """Returns when each node logged this, with the node and the line."""
    found = [
        (datetime.fromisoformat(line["timestamp"]).timestamp(), name, line)
        for name in NODES
        for line in harness.log_of(name)
        if line.get("event") == event
    ]
    return sorted(found, key=lambda each: each[:2])


def change(both: Orchestrators, port: int) -> int:
    """Begins a change of the demo model, and returns its revision."""
    deployment = pb.Deployment(model="demo", path=str(MODEL_DIR))
    answer = both.call(port, "DeployModel", pb.DeployModelRequest(deployment=deployment, reload=True))
    return int(answer.deployment.revision)


def status(both: Orchestrators, port: int) -> Any:
    listed = both.call(port, "ListDeployments", pb.ListDeploymentsRequest()).deployments
    return next(each for each in listed if each.deployment.model == "demo")


def is_done(both: Orchestrators, port: int, revision: int) -> bool:
    found = status(both, port)
    return bool(found.deployment.revision == revision and sorted(found.ready_nodes) == list(NODES) and not found.outdated_nodes)


@pytest.mark.parametrize("end", [pytest.param(signal.SIGKILL, id="kill -9"), pytest.param(signal.SIGSTOP, id="SIGSTOP")])
def test_a_change_of_a_model_goes_on_under_the_next_leader_and_no_answer_notices(
    served: tuple[Any, Orchestrators], end: signal.Signals
) -> None:
    harness, both = served
    first, second = both.ports
    until(lambda: both.leads(first), 20)
    taken_over = change(both, first)  # what the nodes were started with becomes a deployment
    until(lambda: is_done(both, first, taken_over), 90)
    with ExitStack() as reading:
        readers = [reading.enter_context(Reader(harness.client)) for _ in range(2)]
        revision = change(both, first)
        until(lambda: any(line["revision"] == revision for _, _, line in lines(harness, "model replacement started")), 30)
        ended = time.time()
        harness.cluster.kill("orchestrator", end)
        until(lambda: both.leads(second), 20)
        both.deploy(second, "after")
        until(lambda: both.instructed(second, "after"), 20)
        took_s = next(at for at, _, line in lines(harness, "instructed") if "after" in line["deployments"]) - ended
        until(lambda: is_done(both, second, revision), 120)
        if end is signal.SIGSTOP:
            harness.cluster.kill("orchestrator", signal.SIGCONT)
            time.sleep(3)
            assert both.leads(second)
            assert not both.leads(first)
        answered = [len(reader.answers) for reader in readers]
    print(f"instructed again after {took_s:.2f} s, {answered} answers complete, none lost or failed")
    assert took_s < WITHIN_S
    epochs = [line["epoch"] for _, _, line in lines(harness, "instructed")]
    assert epochs == sorted(epochs), "no earlier leader instructed after the later one had"
    assert len(set(epochs)) == 2
    assert one_at_a_time(harness, revision), "both nodes changed at once"


def one_at_a_time(harness: Any, revision: int) -> bool:
    """Whether the second node began to change only when the first one was ready with the revision."""
    began = [(at, name) for at, name, line in lines(harness, "model replacement started") if line["revision"] == revision]
    (_, first), (second_at, _) = began
    ready = [at for at, name, _ in lines(harness, "ranks ready") if name == first and at > began[0][0]]
    return bool(ready) and ready[0] < second_at
