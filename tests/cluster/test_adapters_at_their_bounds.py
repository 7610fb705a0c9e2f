"""Adapters on one node of two ranks whose memory holds three: replaced and removed in the middle of answers, pinned until
nothing else fits, asked for by hundreds at once, given up by clients, and with files that change."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor, wait
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import grpc
import pytest
from openai import APIStatusError, NotFoundError
from tests.cluster.test_adapters import Adapted, Holds, write_adapter

from ryzanstein.cli.processes.cluster import ClusterSpec
from ryzanstein.demo import MODEL_DIR
from ryzanstein.lab.bench.adapters.node_samples import adapter_figures, held_bytes
from ryzanstein.v1 import adapter_pb2
from ryzanstein.v1 import inference_pb2 as inference
from ryzanstein.v1 import orchestrator_pb2 as pb
from ryzanstein.v1.adapter_pb2_grpc import AdapterServiceStub
from ryzanstein.v1.orchestrator_pb2_grpc import OrchestratorServiceStub

pytestmark = [pytest.mark.lab, pytest.mark.timeout(300)]

EACH = 240_000
"""A little more than an adapter of rank 4 takes."""
BUDGET = 3 * EACH
LONG = 1000


class Bounded(Adapted):
    """The cluster, with one node."""

    @property
    def node(self) -> Any:
        return self.cluster.services["node-0"]

    def figure(self, name: str) -> float:
        return adapter_figures(self.node).get(name, 0.0)

    @contextmanager
    def orchestrator(self) -> Iterator[Any]:
        """The calls of the orchestrator: a command takes longer than an answer."""
        with grpc.insecure_channel(self.cluster.orchestrator_address) as channel:
            yield OrchestratorServiceStub(channel)

    def deploy(self, name: str, path: Path, *, pinned: bool = False) -> None:
        """Registers an adapter; returns when the node has it."""
        adapter = pb.DeployedAdapter(name=name, model="demo", path=str(path), pinned=pinned)
        with self.orchestrator() as orchestrator, grpc.insecure_channel(self.node.grpc_address) as channel:
            revision = orchestrator.DeployAdapter(pb.DeployAdapterRequest(adapter=adapter), timeout=10).adapter.revision
            node, ends = AdapterServiceStub(channel), time.monotonic() + 30
            while (name, revision) not in {
                (each.adapter.adapter.name, each.adapter.revision)
                for each in node.ListAdapters(adapter_pb2.ListAdaptersRequest(), timeout=10).adapters
            }:
                assert time.monotonic() < ends
                time.sleep(0.01)

    def remove(self, name: str) -> None:
        with self.orchestrator() as orchestrator:
            orchestrator.RemoveAdapter(pb.RemoveAdapterRequest(name=name), timeout=10)

    @property
    def num_running(self) -> int:
        return int(self.harness.status("node-0").beat.load.running)

    def stream(self, model: str, tokens: int = LONG, **more: Any) -> Any:
        request = self.harness.client.request("Count from 1 to 9.", max_tokens=tokens, ignore_eos=True, logprobs=1, **more)
        request.model = model
        return self.harness.client.inference.StreamChat(inference.StreamChatRequest(chat=request), timeout=120)

    def read(self, stream: Any, after: int = 0, act: Callable[[], object] = lambda: None) -> Any:
        """Reads an answer; acts once when so many of its tokens have come."""
        acted = threading.Event()

        def on_delta(delta: inference.GenerationDelta) -> None:
            if delta.first_index >= after and not acted.is_set():
                acted.set()
                act()

        return self.harness.client.read(stream, on_delta=on_delta)

    def refusal(self, model: str, **options: Any) -> APIStatusError:
        with pytest.raises(APIStatusError) as refused:
            self.ask(model, **options)
        return refused.value

    def is_unknown(self, model: str) -> bool:
        try:
            self.ask(model, max_tokens=1)
        except NotFoundError:
            return True
        except APIStatusError:
            return False
        return False

    def forget_all(self, holds: Holds) -> None:
        """Removes all adapters. Nothing may be left of them."""
        with self.orchestrator() as orchestrator:
            listed = orchestrator.ListDeployedAdapters(pb.ListDeployedAdaptersRequest(), timeout=10).adapters
        for name in [each.name for each in listed]:
            self.remove(name)
        assert holds(lambda: self.figure("adapters_registered") == 0, 20)
        assert holds(lambda: held_bytes(self.node.pid) == 0, 10), "memory of adapters that are gone"
        assert holds(lambda: self.figure("adapter_bytes") == 0, 10)


@pytest.fixture(scope="module")
def running(new_harness: Callable[[ClusterSpec], Iterator[Any]]) -> Iterator[Bounded]:
    spec = ClusterSpec(MODEL_DIR, num_nodes=1, tp=2, worker_flags=("--adapter-bytes", str(BUDGET)))
    for harness in new_harness(spec):
        yield Bounded(harness)


@pytest.fixture
def bounded(running: Bounded, holds: Holds) -> Iterator[Bounded]:
    base = running.ask("demo")
    yield running
    assert running.ask("demo") == base, "the model alone has changed"
    running.forget_all(holds)


def test_an_answer_goes_on_with_the_content_that_it_began_with(
    bounded: Bounded, answers: Any, tmp_path: Path, holds: Holds
) -> None:
    folder = write_adapter(tmp_path / "a", 2)
    bounded.deploy("a", folder)
    second = bounded.ask("a")
    bounded.deploy("a", write_adapter(folder, 1))
    assert holds(lambda: bounded.ask("a") != second, 10), "routers are told a moment later"
    first, undisturbed = bounded.ask("a"), bounded.read(bounded.stream("a"))
    assert first != second
    meanwhile: list[bool] = []

    def replace() -> None:
        bounded.deploy("a", write_adapter(folder, 2))
        meanwhile.append(holds(lambda: bounded.ask("a") == second, 10))
        meanwhile.append(bounded.num_running > 0)

    answer = bounded.read(bounded.stream("a"), 20, replace)
    answers.assert_equal(answer, undisturbed)
    assert meanwhile == [True, True], "the answer was over before the adapter was replaced"
    assert holds(lambda: bounded.figure("adapters_resident") == 1, 10), "nothing runs with the first content any more"
    assert [bounded.ask("a") for _ in range(5)] == [second] * 5


def test_answers_end_with_an_adapter_that_is_removed_and_their_memory_with_them(
    bounded: Bounded, answers: Any, tmp_path: Path, holds: Holds
) -> None:
    folder = write_adapter(tmp_path / "a", 3)
    bounded.deploy("a", folder)
    undisturbed = bounded.read(bounded.stream("a", 600, n=16, temperature=1.0, seed=7))
    assert len(undisturbed.choices) == 16
    seen: list[bool] = []

    def remove() -> None:
        bounded.remove("a")
        seen.append(holds(lambda: bounded.is_unknown("a"), 10))
        seen.append(bounded.num_running > 0 and held_bytes(bounded.node.pid) > 0)

    answer = bounded.read(bounded.stream("a", 600, n=16, temperature=1.0, seed=7), 10, remove)
    answers.assert_equal(answer, undisturbed)
    assert seen == [True, True]
    assert holds(lambda: held_bytes(bounded.node.pid) == 0, 10)


def test_hundreds_of_first_requests_are_one_load(bounded: Bounded, tmp_path: Path) -> None:
    bounded.deploy("a", write_adapter(tmp_path / "a", 4))
    loads = bounded.figure("adapter_load_seconds_count")
    with ThreadPoolExecutor(200) as pool:
        found = list(pool.map(lambda _: bounded.ask("a", max_tokens=4), range(200)))
    assert len(set(found)) == 1
    assert bounded.figure("adapter_load_seconds_count") == loads + 1


@pytest.mark.parametrize("name", ["", "n" * 4096, "demo", "a\nb", "\x00", "demo\u202eomed"])
def test_a_node_refuses_names_that_are_none(bounded: Bounded, name: str, tmp_path: Path) -> None:
    load = adapter_pb2.LoadAdapterRequest(name=name, path=str(write_adapter(tmp_path / "a", 6)))
    with grpc.insecure_channel(bounded.node.grpc_address) as channel, pytest.raises(grpc.RpcError) as refused:
        AdapterServiceStub(channel).LoadAdapter(load, timeout=30)
    assert refused.value.code() is grpc.StatusCode.INVALID_ARGUMENT
    assert "name" in refused.value.details()


@pytest.mark.parametrize("name", ["../../../etc/passwd", "a/b", "名" * 128, "😀" * 128, "?model=demo&x=#"])
def test_strange_names_are_nothing_but_names(bounded: Bounded, name: str, tmp_path: Path, holds: Holds) -> None:
    bounded.deploy(name, write_adapter(tmp_path / "a", 7))
    assert holds(lambda: not bounded.is_unknown(name), 10)
    assert bounded.ask(name) != bounded.ask("demo")
    bounded.remove(name)
    assert holds(lambda: bounded.is_unknown(name), 10)


def test_a_status_lists_models_and_not_their_adapters(bounded: Bounded, tmp_path: Path, holds: Holds) -> None:
    bounded.deploy("a", write_adapter(tmp_path / "a", 5))
    assert holds(lambda: not bounded.is_unknown("a"), 10)
    orchestrator, router = bounded.cluster.orchestrator_address, bounded.cluster.router_address
    command = (sys.executable, "-P", "-m", "ryzanstein.cli", "status", "--json", "--orchestrator", orchestrator)
    done = subprocess.run((*command, "--router", router), capture_output=True, text=True, timeout=60, check=True)
    assert [each["name"] for each in json.loads(done.stdout)["models"]] == ["demo"]


def test_pins_that_fill_the_memory_refuse_others_and_nothing_else(bounded: Bounded, tmp_path: Path, holds: Holds) -> None:
    for number, name in enumerate("abc"):
        bounded.deploy(name, write_adapter(tmp_path / name, 10 + number), pinned=True)
    bounded.deploy("d", write_adapter(tmp_path / "d", 13))
    assert holds(lambda: bounded.figure("adapters_resident") == 3, 10)
    refused = bounded.refusal("d")
    assert refused.status_code == 429
    assert (refused.body or {}).get("code") == "adapter_no_room"  # type: ignore[attr-defined]
    assert str(BUDGET) in refused.message
    assert len({bounded.ask(name) for name in ("a", "b", "c", "demo")}) == 4
    bounded.command("unpin", "a")
    answer = bounded.ask("d")
    assert answer not in {bounded.ask(name) for name in ("b", "c", "demo")}
    assert bounded.figure("adapter_bytes") <= BUDGET
    assert "adapter_bytes" in bounded.add("large", write_adapter(tmp_path / "large", 14, rank=16), code=1)


def test_clients_that_give_up_leave_no_hold(bounded: Bounded, tmp_path: Path, holds: Holds) -> None:
    names = [f"adapter-{number}" for number in range(8)]
    for number, name in enumerate(names):
        bounded.deploy(name, write_adapter(tmp_path / name, 20 + number))
    alone = {name: bounded.ask(name) for name in names}
    for turn in range(10):
        streams = [bounded.stream(name, 200) for name in names * 4]
        if turn % 2:
            next(streams[turn])
        for stream in streams:
            stream.cancel()
    assert holds(lambda: bounded.num_running == 0, 30)
    assert {name: bounded.ask(name) for name in names} == alone
    assert bounded.figure("adapter_bytes") <= BUDGET
    assert held_bytes(bounded.node.pid) <= BUDGET


def test_a_queue_of_cold_adapters_does_not_keep_the_model_waiting(bounded: Bounded, tmp_path: Path) -> None:
    names = [f"adapter-{number}" for number in range(12)]
    for number, name in enumerate(names):
        bounded.deploy(name, write_adapter(tmp_path / name, 40 + number))
    with ThreadPoolExecutor(60) as pool:
        cold = [pool.submit(lambda name=name: bounded.read(bounded.stream(name, 100)).token_ids) for name in names * 4]
        wait(cold[:1], timeout=60)
        answered = [bounded.ask("demo", max_tokens=4) for _ in range(3)]
        waiting = sum(not each.done() for each in cold)
        found = [each.result(timeout=200) for each in cold]
    assert len(set(answered)) == 1
    assert waiting > len(names), "the model alone was answered last"
    for number in range(len(names)):
        assert len({tuple(tokens) for tokens in found[number :: len(names)]}) == 1
    assert bounded.figure("adapter_bytes") <= BUDGET


def test_files_that_change_under_an_adapter_are_refused_and_said(bounded: Bounded, tmp_path: Path, holds: Holds) -> None:
    for number, name in enumerate("abcd"):
        bounded.deploy(name, write_adapter(tmp_path / name, 60 + number))
    right = bounded.ask("a")
    for name in "bcd":
        bounded.ask(name)
    assert bounded.figure("adapters_resident") == 3
    shutil.rmtree(tmp_path / "a")
    refused = bounded.refusal("a")
    assert refused.status_code in (404, 503)
    assert "files" in bounded.command("list", "--json")
    assert holds(lambda: bounded.is_unknown("a"), 10)
    assert bounded.ask("b") != right
    bounded.deploy("a", write_adapter(tmp_path / "a", 60))
    assert holds(lambda: not bounded.is_unknown("a"), 10)
    assert bounded.ask("a") == right
