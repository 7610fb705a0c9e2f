"""Clusters of real processes, and a client that checks on every stream what the project promises for every stream."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import grpc
import pytest

from ryzanstein.cli.node_devices import NodeDevices
from ryzanstein.cli.processes.cluster import ClusterSpec, LocalCluster
from ryzanstein.demo import MODEL_DIR
from ryzanstein.v1 import inference_pb2 as inference
from ryzanstein.v1 import inference_pb2_grpc as inference_grpc
from ryzanstein.v1 import worker_pb2 as worker
from ryzanstein.v1 import worker_pb2_grpc as worker_grpc

CALL_S = 60.0


@dataclass
class ChoiceSeen:
    """What a client saw of one choice."""

    token_ids: list[int] = field(default_factory=list)
    text: str = ""
    logprobs: list[float] = field(default_factory=list)
    nodes: list[str] = field(default_factory=list)
    reason: int = 0


@dataclass
class Answer:
    """What a client saw of one generation. `choices` is keyed by the choice."""

    generation_id: str = ""
    node_id: str = ""
    prompt_tokens: int = 0
    choices: dict[int, ChoiceSeen] = field(default_factory=dict)
    usage: inference.Usage = field(default_factory=inference.Usage)

    @property
    def text(self) -> str:
        return self.choices[0].text

    @property
    def token_ids(self) -> list[int]:
        return self.choices[0].token_ids

    @property
    def nodes(self) -> list[str]:
        """Of choice 0, in the order in which they answered, each once."""
        return list(dict.fromkeys(self.choices[0].nodes))


class Client:
    """Speaks gRPC to one router. Asserts exactly-once on each event that it reads."""

    def __init__(self, address: str) -> None:
        self.channel = grpc.insecure_channel(address, options=(("grpc.use_local_subchannel_pool", 1),))
        self.inference = inference_grpc.InferenceServiceStub(self.channel)
        self.sessions = inference_grpc.SessionServiceStub(self.channel)

    def close(self) -> None:
        self.channel.close()

    def chat(
        self,
        *texts: str,
        session_id: str = "",
        user: str = "",
        on_delta: Callable[[inference.GenerationDelta], None] | None = None,
        **sampling: Any,
    ) -> Answer:
        """Asks with alternating user and assistant texts, reads the stream to its end."""
        request = inference.StreamChatRequest(chat=self.request(*texts, session_id=session_id, user=user, **sampling))
        return self.read(self.inference.StreamChat(request, timeout=CALL_S), on_delta=on_delta)

    def request(self, *texts: str, session_id: str = "", user: str = "", **sampling: Any) -> inference.ChatRequest:
        roles = (inference.ROLE_USER, inference.ROLE_ASSISTANT)
        messages = [inference.Message(role=roles[i % 2], content=text) for i, text in enumerate(texts)]
        params = inference.SamplingParams(**{"temperature": 0.0, **sampling})
        return inference.ChatRequest(messages=messages, session_id=session_id, user=user, sampling=params)

    def read(
        self,
        stream: Any,
        answer: Answer | None = None,
        on_delta: Callable[[inference.GenerationDelta], None] | None = None,
    ) -> Answer:
        """Reads a stream to its end, on top of what `answer` has already."""
        answer = Answer() if answer is None else answer
        for response in stream:
            self.take(response.event, answer)
            if on_delta is not None and response.event.WhichOneof("kind") == "delta":
                on_delta(response.event.delta)
        return answer

    @staticmethod
    def take(event: inference.GenerationEvent, answer: Answer) -> None:
        """Adds one event, asserting that indices come once each and in order."""
        kind = event.WhichOneof("kind")
        if kind == "started":
            answer.generation_id, answer.node_id = event.started.generation_id, event.started.node_id
            answer.prompt_tokens = event.started.prompt_tokens
        elif kind == "delta":
            seen = answer.choices.setdefault(event.delta.choice, ChoiceSeen())
            assert event.delta.first_index == len(seen.token_ids), "a token was lost or repeated"
            seen.token_ids += event.delta.token_ids
            seen.text += event.delta.text
            seen.logprobs += [entry.logprob for entry in event.delta.logprobs]
            seen.nodes += [event.delta.node_id] * len(event.delta.token_ids)
        else:
            seen = answer.choices.setdefault(event.finished.choice, ChoiceSeen())
            assert seen.reason == 0, "a choice finished twice"
            seen.reason = event.finished.finish_reason
            answer.usage = event.finished.usage


class Harness:
    """A running cluster with a client for its first router."""

    def __init__(self, cluster: LocalCluster) -> None:
        self.cluster = cluster
        self.client = Client(cluster.router_address)

    def status(self, node_id: str) -> worker.GetStatusResponse:
        """What a node says of itself and its ranks."""
        with grpc.insecure_channel(self.cluster.services[node_id].grpc_address) as channel:
            return worker_grpc.WorkerServiceStub(channel).GetStatus(worker.GetStatusRequest(), timeout=10)

    def log_of(self, name: str) -> list[dict[str, Any]]:
        """A service's log lines."""
        lines = self.cluster.services[name].log_path.read_text().splitlines()
        return [json.loads(line) for line in lines if line.startswith("{")]

    @staticmethod
    def new_answer() -> Answer:
        return Answer()

    def start_again(self, node_id: str) -> None:
        """Starts a killed node and does not wait for it: the others can be killed meanwhile."""
        self.cluster.services[node_id].kill()
        self.cluster.services[node_id].start()

    def wait_at_least(self, count: int) -> None:
        """Returns when the router sees so many ready nodes."""
        deadline = time.monotonic() + 60
        while self.num_ready < count:
            assert time.monotonic() < deadline, f"there are not {count} ready nodes: {self._last_words()}"
            time.sleep(0.05)

    def _last_words(self) -> dict[str, str]:
        """What each node logged last."""
        return {name: self.cluster.services[name].log_path.read_text()[-600:] for name in self.cluster.node_ids}

    @property
    def num_ready(self) -> int:
        """How many nodes the router sees ready."""
        models = self.client.inference.ListModels(inference.ListModelsRequest(), timeout=5).models
        return max((model.ready_nodes for model in models), default=0)

    def new_client(self) -> Client:
        """For when the router was restarted and its channel with it."""
        self.client.close()
        self.client = Client(self.cluster.router_address)
        return self.client


def _placed(spec: ClusterSpec) -> ClusterSpec:
    """The same cluster on one GPU that all nodes share, a rank each, where RYZANSTEIN_TEST_DEVICE is cuda: see `.ci/gpu`."""
    if os.environ.get("RYZANSTEIN_TEST_DEVICE") != "cuda":
        return spec
    devices = NodeDevices("cuda", (("0",),) * spec.num_nodes)
    return replace(spec, tp=1, devices=devices, rank_flags=(*spec.rank_flags, "--dtype", "float32"))


def _harness(spec: ClusterSpec) -> Iterator[Harness]:
    with LocalCluster(_placed(spec)) as cluster:
        harness = Harness(cluster)
        yield harness
        harness.client.close()


@pytest.fixture(scope="session")
def new_harness() -> Callable[[ClusterSpec], Iterator[Harness]]:
    """Runs a cluster that a test describes."""
    return _harness


@pytest.fixture(scope="session")
def calm() -> Iterator[Harness]:
    """Two nodes of two ranks each, which no test disturbs."""
    yield from _harness(ClusterSpec(MODEL_DIR, num_nodes=2, tp=2))


@pytest.fixture(scope="module")
def stormy() -> Iterator[Harness]:
    """Three nodes of one rank each, for tests that kill nodes; each test leaves all of them ready."""
    yield from _harness(ClusterSpec(MODEL_DIR, num_nodes=3, tp=1))


@pytest.fixture(scope="module")
def compressed() -> Iterator[Harness]:
    """Two nodes of two ranks each that keep older keys and values in 8 bits, for tests that kill nodes."""
    yield from _harness(ClusterSpec(MODEL_DIR, num_nodes=2, tp=2, worker_flags=("--kv-compression", "lazy-fp8")))


@pytest.fixture(scope="module")
def pair() -> Iterator[Harness]:
    """Two nodes of two ranks each, for tests that kill ranks, routers and the orchestrator."""
    yield from _harness(ClusterSpec(MODEL_DIR, num_nodes=2, tp=2))


@pytest.fixture(scope="module")
def lone() -> Iterator[Harness]:
    """One node of two ranks, for tests that leave no other to go to."""
    yield from _harness(ClusterSpec(MODEL_DIR, num_nodes=1, tp=2))


@pytest.fixture(scope="session")
def client_of() -> type[Client]:
    """A client for a router's address."""
    return Client


class Answers:
    """New answers, and whether two are the same: token ids, text, log probabilities, reason and usage."""

    new = Answer

    @staticmethod
    def assert_equal(answer: Answer, undisturbed: Answer) -> None:
        assert answer.choices.keys() == undisturbed.choices.keys()
        for choice, expected in undisturbed.choices.items():
            seen = answer.choices[choice]
            assert seen.token_ids == expected.token_ids
            assert seen.text == expected.text
            assert seen.logprobs == pytest.approx(expected.logprobs, abs=1e-3)
            assert seen.reason == expected.reason
        assert answer.usage.completion_tokens == undisturbed.usage.completion_tokens
        assert answer.usage.prompt_tokens == undisturbed.usage.prompt_tokens


@pytest.fixture(scope="session")
def answers() -> type[Answers]:
    return Answers


@pytest.fixture(scope="module")
def busy() -> Iterator[Harness]:
    """Two nodes that run two sequences each at once, and refuse who would wait for 0.3 s."""
    flags = ("--max-sequences", "2", "--ttft-objective-s", "0.3")
    yield from _harness(ClusterSpec(MODEL_DIR, num_nodes=2, tp=1, worker_flags=flags))


@pytest.fixture
def holds() -> Callable[[Callable[[], bool], float], bool]:
    """Waits, bounded, until a condition holds; returns whether it does."""

    def wait(condition: Callable[[], bool], timeout_s: float) -> bool:
        deadline = time.monotonic() + timeout_s
        while not (held := condition()) and time.monotonic() < deadline:
            time.sleep(0.02)
        return held

    return wait


def pytest_collection_modifyitems(items: Sequence[pytest.Item]) -> None:
    for item in items:
        if "/tests/cluster/" in str(item.path):
            item.add_marker(pytest.mark.cluster)
