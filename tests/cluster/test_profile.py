"""Profiles of nodes that serve: nobody takes a profiler for a stall, and no answer changes."""

from __future__ import annotations

import json
import subprocess
import sys
import threading
import urllib.request
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import grpc
import pytest
from prometheus_client.parser import text_string_to_metric_families

from ryzanstein.cli.processes.cluster import ClusterSpec, LocalCluster
from ryzanstein.demo import MODEL_DIR
from ryzanstein.v1 import worker_pb2 as worker
from ryzanstein.v1 import worker_pb2_grpc as worker_grpc

pytestmark = pytest.mark.long

PROMPT = "Count from 1 to 40."
ASKED = {"ignore_eos": True, "max_tokens": 200}
# A device's profiler takes seconds to begin. This machine has no such device: the ranks' profiler sleeps.
SLOW_PROFILER = """
import sys
if "ryzanstein.worker.ranks.rank" in sys.orig_argv:
    import time
    from torch.autograd.profiler import profile

    begin = profile.__enter__
    profile.__enter__ = lambda self: (time.sleep(4), begin(self))[1]
"""


@pytest.fixture
def fresh(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[LocalCluster]:
    """Two nodes of two ranks which have never been profiled."""
    (tmp_path / "sitecustomize.py").write_text(SLOW_PROFILER)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    with LocalCluster(ClusterSpec(MODEL_DIR, num_nodes=2, tp=2)) as cluster:
        yield cluster


@pytest.fixture
def cluster() -> Iterator[LocalCluster]:
    with LocalCluster(ClusterSpec(MODEL_DIR, num_nodes=2, tp=2)) as cluster:
        yield cluster


def alarms(cluster: LocalCluster) -> dict[str, float]:
    """What was counted by anybody, where a rank or a node was blamed or replaced."""
    blamed = ("suspicions", "hedges", "failovers", "link_losses", "rank_losses")
    found = {}
    for name, service in cluster.services.items():
        with urllib.request.urlopen(service.metrics_url, timeout=5) as reply:
            families = list(text_string_to_metric_families(reply.read().decode()))
        samples = [sample for family in families for sample in family.samples]
        counted = {s.name: s.value for s in samples if any(f"_{word}_total" in s.name for word in blamed) and s.value}
        found |= {f"{name} {what}": value for what, value in counted.items()}
    return found


def profile(address: str, timeout_s: float = 60.0, **asked: int) -> bytes:
    with grpc.insecure_channel(address, options=(("grpc.max_receive_message_length", -1),)) as channel:
        stub = worker_grpc.WorkerServiceStub(channel)
        return bytes(stub.Profile(worker.ProfileRequest(**asked), timeout=timeout_s).chrome_trace)


def users_of(client: Any) -> dict[str, str]:
    """A user whose requests each node answers. Key: the node."""
    return {client.chat("Hello.", user=f"user-{i}", max_tokens=1).node_id: f"user-{i}" for i in range(20)}


@contextmanager
def load(client: Any, users: list[str], expected: list[int]) -> Iterator[None]:
    """Each user asks again and again until it ends; each answer must be the expected one."""
    done = threading.Event()

    def ask(user: str) -> int:
        num = 0
        while not done.is_set():
            num += 1
            assert client.chat(PROMPT, user=user, **ASKED).token_ids == expected
        return num

    with ThreadPoolExecutor(len(users)) as pool:
        asking = [pool.submit(ask, user) for user in users]
        try:
            yield
        finally:
            done.set()
        assert all(answers.result() for answers in asking)


@pytest.mark.timeout(300)
@pytest.mark.lab
def test_first_profiles_under_load_are_no_stall(fresh: LocalCluster, client_of: Callable[[str], Any]) -> None:
    client = client_of(fresh.router_address)
    expected = client.chat(PROMPT, **ASKED).token_ids
    users = users_of(client)
    assert len(users) == 2
    with load(client, list(users.values()), expected):
        for node_id in users:
            for rank in (0, 1):
                trace = json.loads(profile(fresh.services[node_id].grpc_address, rank=rank, steps=3))
                assert any(event.get("name", "").startswith("aten::") for event in trace["traceEvents"])
    client.close()
    assert alarms(fresh) == {}
    for service in fresh.services.values():  # the profiler has lines of its own
        assert all(isinstance(json.loads(line), dict) for line in service.log_path.read_text().splitlines())


@pytest.mark.timeout(300)
def test_all_ranks_of_a_node_are_in_one_file(cluster: LocalCluster, client_of: Callable[[str], Any], tmp_path: Path) -> None:
    """Under load, by the command: no alarm, and no answer changes."""
    client = client_of(cluster.router_address)
    expected = client.chat(PROMPT, **ASKED).token_ids
    users = users_of(client)
    output, each = tmp_path / "profile.json", tmp_path / "ranks"
    command = [
        sys.executable,
        "-P",
        "-m",
        "ryzanstein.cli",
        "profile",
        "node-0",
        "--orchestrator",
        cluster.orchestrator_address,
    ]
    command += ["--output", str(output), "--per-rank", str(each)]
    with load(client, list(users.values()), expected):
        said = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert said.returncode == 0, said.stderr
    assert "20 steps of 2 ranks" in said.stderr
    client.close()
    assert alarms(cluster) == {}
    events = json.loads(output.read_text())["traceEvents"]
    stays: dict[int, list[tuple[float, float]]] = {}
    for event in events:
        if event.get("cat") == "collective" and event["ph"] == "X":
            stays.setdefault(event["args"]["number"], []).append((event["ts"], event["ts"] + event["dur"]))
    assert len(stays) >= 20
    assert all(len(both) == 2 for both in stays.values())
    assert all(max(arrived for arrived, _ in both) <= min(left for _, left in both) for both in stays.values())
    assert sum(event["ph"] == "s" for event in events) == sum(event["ph"] == "f" for event in events) == len(stays)
    assert {event["pid"] for event in events if event.get("name", "").startswith("aten::")} == {0, 1000}
    assert sorted(path.name for path in each.iterdir()) == ["rank-0.json", "rank-1.json"]
    again = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert again.returncode == 1
    assert "is there already" in again.stderr
