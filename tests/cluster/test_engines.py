"""Nodes beside llama.cpp servers, and one in reserve with ranks of its own: servers die and hang in the middle of answers."""

from __future__ import annotations

import contextlib
import itertools
import json
import signal
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import grpc
import pytest
from tests.worker.engines.llama_server import llama_process

from ryzanstein.cli.processes.cluster import OWN_RANKS, ClusterSpec
from ryzanstein.demo import MODEL_DIR
from ryzanstein.lab.chaos.machines.llama.server import llama_file
from ryzanstein.v1 import inference_pb2 as inference

QUESTION = "Count from 1 to 60."
LONG: dict[str, Any] = {"max_tokens": 90, "ignore_eos": False}


class Servers:
    """Servers of one file, which come back on the ports that they had."""

    def __init__(self, file: Path, folder: Path, count: int) -> None:
        self._file, self._folder = file, folder
        self._processes: dict[int, subprocess.Popen[bytes]] = {}
        self._killed: set[int] = set()
        self._open: list[contextlib.ExitStack] = [contextlib.ExitStack() for _ in range(count)]
        self.urls = [self._start(number, 0) for number in range(count)]

    def _start(self, number: int, port: int) -> str:
        started = llama_process(self._file, self._folder / f"server-{number}.log", context=1024, slots=4, port=port)
        url, process = self._open[number].enter_context(started)
        self._processes[number] = process
        return url

    def signal(self, number: int, what: signal.Signals) -> None:
        self._processes[number].send_signal(what)
        if what == signal.SIGKILL:
            self._killed.add(number)

    def heal(self) -> None:
        """Lets servers go on that were stopped, and starts those again that were killed."""
        for number, process in self._processes.items():
            process.send_signal(signal.SIGCONT)
            if number in self._killed:
                process.wait(10)  # a signal takes a moment
                self._killed.remove(number)
                self._open[number].close()
                assert self._start(number, int(self.urls[number].rpartition(":")[2])) == self.urls[number]

    def close(self) -> None:
        for each in self._open:
            each.close()


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return llama_file(tmp_path_factory.mktemp("gguf"))


@pytest.fixture(scope="module")
def servers(file: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Servers]:
    servers = Servers(file, tmp_path_factory.mktemp("servers"), 2)
    yield servers
    servers.close()


@pytest.fixture(scope="module")
def mixed(servers: Servers, new_harness: Callable[..., Any]) -> Iterator[Any]:
    """node-0 and node-1 beside servers, node-2 in reserve."""
    yield from new_harness(ClusterSpec(MODEL_DIR, num_nodes=3, tp=1, engines=(*servers.urls, OWN_RANKS)))


@pytest.fixture(scope="module")
def alone(file: Path, new_harness: Callable[..., Any], tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    """One node, beside a server."""
    servers = Servers(file, tmp_path_factory.mktemp("server"), 1)
    yield from new_harness(ClusterSpec(MODEL_DIR, num_nodes=1, engines=tuple(servers.urls)))
    servers.close()


@pytest.fixture
def healed(mixed: Any, servers: Servers) -> Callable[[], None]:
    """Returns when all nodes are ready, and the router sends requests to those beside servers again; also before the test."""

    def heal() -> None:
        servers.heal()
        mixed.cluster.wait_nodes(3)
        deadline, seen = time.monotonic() + 60, set()
        for number in itertools.count():
            assert time.monotonic() < deadline, f"only {seen} answer"
            seen |= set(mixed.client.chat("Hello", user=f"heal {number}", max_tokens=2).nodes)
            if {"node-0", "node-1"} <= seen:
                return

    heal()
    return heal


def strike(servers: Servers, index: int, what: signal.Signals) -> tuple[Callable[[Any], None], list[str]]:
    """Sends a signal to the server that answers, when a token of this index arrives."""
    struck: list[str] = []

    def on_delta(delta: Any) -> None:
        if not struck and delta.first_index + len(delta.token_ids) > index:
            struck.append(delta.node_id)
            servers.signal(int(delta.node_id.rpartition("-")[2]), what)

    return on_delta, struck


def unlike_failovers(harness: Any) -> float:
    url = harness.cluster.services["router-0"].metrics_url
    with urllib.request.urlopen(url, timeout=5) as page:
        lines = page.read().decode().splitlines()
    return sum(float(line.rpartition(" ")[2]) for line in lines if line.startswith("ryzanstein_router_unlike_failovers_total"))


@pytest.mark.timeout(240)
def test_servers_answer_like_ranks_and_the_reserve_has_nothing_to_do(mixed: Any, calm: Any) -> None:
    questions = [f"Count from {n} to {n + 9}." for n in range(1, 13)]
    with ThreadPoolExecutor(12) as pool:
        answers = list(pool.map(lambda each: mixed.client.chat(each, max_tokens=40, user=each), questions))
        expected = list(pool.map(lambda each: calm.client.chat(each, max_tokens=40), questions))
    assert [answer.token_ids for answer in answers] == [answer.token_ids for answer in expected]
    assert [answer.choices[0].reason for answer in answers] == [answer.choices[0].reason for answer in expected]
    assert {node for answer in answers for node in answer.nodes} == {"node-0", "node-1"}
    assert [answer.usage.completion_tokens for answer in answers] == [len(answer.token_ids) for answer in expected]


@pytest.mark.timeout(240)
@pytest.mark.parametrize("index", [5, *(pytest.param(index, marks=pytest.mark.long) for index in (0, 20))])
def test_a_killed_server_costs_no_token(mixed: Any, servers: Servers, healed: Callable[[], None], index: int) -> None:
    undisturbed = mixed.client.chat(QUESTION, **LONG)
    for number in range(30):  # an answer may be complete before the server is dead
        healed()
        before = unlike_failovers(mixed)
        on_delta, _ = strike(servers, index, signal.SIGKILL)
        answer = mixed.client.chat(QUESTION, user=f"user {index} {number}", on_delta=on_delta, **LONG)
        assert answer.token_ids == undisturbed.token_ids
        if len(answer.nodes) == 2:
            break
    assert answer.nodes[1] != "node-2", "another server can"
    assert unlike_failovers(mixed) > before, "a server that continues inexactly is counted"


@pytest.mark.timeout(240)
def test_when_all_servers_are_gone_the_reserve_goes_on_and_the_next_turn_returns(
    mixed: Any, servers: Servers, healed: Callable[[], None]
) -> None:
    undisturbed = mixed.client.chat(QUESTION, **LONG)
    killed: list[str] = []

    def on_delta(delta: Any) -> None:
        if not killed and delta.first_index > 9:
            killed.append(delta.node_id)
            for number in range(2):
                servers.signal(number, signal.SIGKILL)

    for number in range(10):  # an answer may be complete before both servers are dead
        session_id = f"reserve {number}"
        killed.clear()
        healed()
        answer = mixed.client.chat(QUESTION, session_id=session_id, on_delta=on_delta, **LONG)
        assert answer.token_ids == undisturbed.token_ids
        if answer.nodes[-1] == "node-2":
            break
    assert answer.nodes[-1] == "node-2"
    servers.heal()
    mixed.cluster.wait_nodes(3)
    following = mixed.client.chat("Count from 1 to 9.", session_id=session_id, max_tokens=20)
    assert following.nodes == [killed[0]]


@pytest.mark.long
@pytest.mark.timeout(240)
def test_a_hung_server_is_found_in_seconds_and_taken_back(mixed: Any, servers: Servers, healed: Callable[[], None]) -> None:
    undisturbed = mixed.client.chat(QUESTION, **LONG)
    for number in range(30):  # an answer may be complete before the server stands
        healed()
        on_delta, struck = strike(servers, 12, signal.SIGSTOP)
        began = time.monotonic()
        answer = mixed.client.chat(QUESTION, user=f"hung {number}", on_delta=on_delta, **LONG)
        took = time.monotonic() - began
        assert answer.token_ids == undisturbed.token_ids
        assert took < 20
        if len(answer.nodes) == 2:
            break
    losses = [line for line in mixed.log_of(struck[0]) if line["event"] == "ranks lost"]
    assert losses[-1]["cause"] == "RANK_STALLED"
    assert "has sent nothing for" in losses[-1]["reason"]
    servers.heal()
    mixed.cluster.wait_nodes(3)


@pytest.mark.timeout(120)
def test_what_a_server_lacks_goes_to_a_node_that_can(mixed: Any, healed: Callable[[], None]) -> None:
    answer = mixed.client.chat("Count from 1 to 9.", max_tokens=12, presence_penalty=0.5)
    assert answer.nodes == ["node-2"]


@pytest.mark.timeout(120)
def test_what_no_node_can_is_refused_by_name(alone: Any) -> None:
    with pytest.raises(grpc.RpcError) as refused:
        alone.client.chat("Hello", frequency_penalty=0.5)
    assert refused.value.code() == grpc.StatusCode.FAILED_PRECONDITION
    assert "frequency_penalty" in refused.value.details()
    body = {"model": "demo", "messages": [{"role": "user", "content": "Hello"}], "frequency_penalty": 0.5}
    request = urllib.request.Request(
        f"{alone.cluster.http_url}/v1/chat/completions", json.dumps(body).encode(), {"content-type": "application/json"}
    )
    with pytest.raises(urllib.error.HTTPError) as error:
        urllib.request.urlopen(request, timeout=20)
    assert error.value.code == 400
    assert json.loads(error.value.read())["error"]["code"] == "engine_lacks"


@pytest.mark.timeout(120)
def test_status_shows_the_engine_and_what_it_lacks(alone: Any) -> None:
    command = [
        str(Path(sys.executable).with_name("ryzanstein")),
        "status",
        "--orchestrator",
        alone.cluster.orchestrator_address,
    ]
    done = subprocess.run(
        [*command, "--router", alone.cluster.router_address], capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode == 0, done.stderr
    assert "llama.cpp" in done.stdout
    assert "frequency_penalty" in done.stdout


@pytest.mark.timeout(120)
def test_choices_and_streams_end_by_themselves_at_a_server(alone: Any) -> None:
    answer = alone.client.chat("Hello!", max_tokens=60, n=3, temperature=0.8, seed=4)
    assert sorted(answer.choices) == [0, 1, 2]
    assert all(seen.reason for seen in answer.choices.values())
    stopped = alone.client.chat(QUESTION, max_tokens=90, stop=["12"])
    assert stopped.text.rstrip().endswith("11,") or "12" not in stopped.text
    assert stopped.choices[0].reason == inference.FINISH_REASON_STOP


def test_a_server_is_listed_as_the_rank_that_it_is(alone: Any) -> None:
    """Its process is not ours, so there is no process id. Its phase and its steps are those of any rank."""
    seen: list[tuple[int, int, str]] = []

    def on_delta(delta: Any) -> None:
        if not seen and delta.first_index >= 5:
            seen.extend((rank.rank, rank.pid, rank.phase) for rank in alone.status("node-0").ranks)

    (before,) = alone.status("node-0").ranks
    assert (before.rank, before.pid, before.phase) == (0, 0, "idle")
    answer = alone.client.chat(QUESTION, on_delta=on_delta, **LONG)
    assert len(answer.token_ids) > 5
    ((rank, pid, phase),) = seen
    assert (rank, pid) == (0, 0)
    assert phase != "idle"
    (after,) = alone.status("node-0").ranks
    assert after.step > before.step, "parts of answers that came from it"
    assert after.phase == "idle"
