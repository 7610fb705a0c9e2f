"""Two models on each of two nodes: both are served, and what strikes one leaves the other alone."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import grpc
import pytest

from ryzanstein.cli.processes.cluster import ClusterSpec, LocalCluster
from ryzanstein.demo import MODEL_DIR
from ryzanstein.rpc.status import error_from_rpc
from ryzanstein.survey.look import look
from ryzanstein.survey.reach import KeyedRouter
from ryzanstein.v1 import inference_pb2 as inference
from ryzanstein.v1 import worker_pb2 as worker
from ryzanstein.v1 import worker_pb2_grpc as worker_grpc

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(240), pytest.mark.long]
LONG = 600


@pytest.fixture(scope="module")
def both(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LocalCluster]:
    folder = tmp_path_factory.mktemp("models") / "second"
    command = [sys.executable, "-m", "ryzanstein.tools.synthesize.command", str(folder), "--preset", "S", "--seed", "3"]
    subprocess.run(command, check=True, capture_output=True, timeout=60)
    with LocalCluster(ClusterSpec(MODEL_DIR, num_nodes=2, tp=1, more_models=(folder,))) as cluster:
        yield cluster


@pytest.fixture
def client(both: LocalCluster, client_of: Any) -> Iterator[Any]:
    made = client_of(both.router_address)
    yield made
    made.close()


def asked(client: Any, model: str, max_tokens: int = LONG, **more: Any) -> inference.StreamChatRequest:
    chat = client.request("Count from 1 to 200.", max_tokens=max_tokens, ignore_eos=True, seed=5, **more)
    chat.model = model
    return inference.StreamChatRequest(chat=chat)


def answer(client: Any, model: str, **more: Any) -> Any:
    return client.read(client.inference.StreamChat(asked(client, model, **more), timeout=120))


def rank_pid(cluster: LocalCluster, node_id: str, model: str) -> int:
    with grpc.insecure_channel(cluster.services[node_id].grpc_address) as channel:
        status = worker_grpc.WorkerServiceStub(channel).GetStatus(worker.GetStatusRequest(model=model), timeout=10)
    return int(status.ranks[0].pid)


class Running(threading.Thread):
    """An answer that is being read. `begun` is set after some tokens."""

    def __init__(self, client: Any, model: str) -> None:
        super().__init__(daemon=True)
        self._client, self._model = client, model
        self.begun = threading.Event()
        self.answer: Any = None
        self.error: BaseException | None = None
        self.start()

    def run(self) -> None:
        seen = 0

        def count(delta: inference.GenerationDelta) -> None:
            nonlocal seen
            seen += len(delta.token_ids)
            if seen >= 20:
                self.begun.set()

        stream = self._client.inference.StreamChat(asked(self._client, self._model), timeout=120)
        try:
            self.answer = self._client.read(stream, on_delta=count)
        except BaseException as error:
            self.error = error

    def ended(self) -> Any:
        self.join(120)
        if self.error is not None:
            raise self.error
        return self.answer


def struck(client: Any, strike: Callable[[], object]) -> dict[str, Any]:
    """The answers of both models, during which `strike` was called."""
    running = {model: Running(client, model) for model in ("demo", "second")}
    for each in running.values():
        assert each.begun.wait(60)
    strike()
    return {model: each.ended() for model, each in running.items()}


def test_a_conversation_with_each(both: LocalCluster, client: Any) -> None:
    models = {model.name: model for model in client.inference.ListModels(inference.ListModelsRequest(), timeout=5).models}
    assert {name: model.ready_nodes for name, model in models.items()} == {"demo": 2, "second": 2}
    nodes = {model: answer(client, model, max_tokens=20, session_id=f"s-{model}").nodes for model in models}
    again = {model: answer(client, model, max_tokens=20, session_id=f"s-{model}").nodes for model in models}
    assert nodes == again, "a session stays with its model's ranks"
    assert all(name.endswith("/second") for name in nodes["second"])
    assert answer(client, "second").token_ids == answer(client, "second").token_ids
    with pytest.raises(grpc.RpcError) as unknown:
        answer(client, "third")
    assert error_from_rpc(unknown.value).code.name == "NOT_FOUND"


def test_one_models_crash_moves_only_its_answers(both: LocalCluster, client: Any) -> None:
    whole = {model: answer(client, model) for model in ("demo", "second")}

    def strike() -> None:
        for node_id in both.node_ids:
            os.kill(rank_pid(both, node_id, "second"), signal.SIGKILL)

    answers = struck(client, strike)
    for model, undisturbed in whole.items():
        assert answers[model].token_ids == undisturbed.token_ids
    assert len(answers["demo"].nodes) == 1
    both.wait_nodes(2)


def test_a_node_that_dies_loses_no_token_of_either(both: LocalCluster, client: Any) -> None:
    whole = {model: answer(client, model) for model in ("demo", "second")}
    answers = struck(client, both.services["node-0"].kill)
    for model, undisturbed in whole.items():
        assert answers[model].token_ids == undisturbed.token_ids
    both.restart("node-0")
    both.wait_nodes(2)
    assert answer(client, "second").token_ids == whole["second"].token_ids


async def test_the_status_shows_every_model_of_every_node(both: LocalCluster) -> None:
    status = await look(both.orchestrator_address, KeyedRouter(both.router_address))
    visible = {node.node.node_id: (node.node.model, node.node.state.name, len(node.ranks)) for node in status.nodes}
    assert visible == {
        **{f"node-{number}": ("demo", "READY", 1) for number in range(2)},
        **{f"node-{number}/second": ("second", "READY", 1) for number in range(2)},
    }
    assert {link.node_id for link in status.router.links} == set(visible)


def test_models_of_one_name_are_refused(tmp_path: Path) -> None:
    for name in ("a", "b"):
        (tmp_path / name / "same").mkdir(parents=True)
    flags = [part for name in ("a", "b") for part in ("--model", str(tmp_path / name / "same"))]
    command = [str(Path(sys.executable).with_name("ryzanstein")), "up", *flags]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 2
    assert "two models are named" in done.stderr
