"""Routers are killed and stopped in the middle of answers of a real model; the client comes back at another router."""

from __future__ import annotations

import asyncio
import signal
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import grpc
import httpx
import pytest

from ryzanstein.cli.processes.cluster import ClusterSpec, LocalCluster
from ryzanstein.demo import MODEL_DIR
from ryzanstein.rpc.status import error_from_rpc
from ryzanstein.survey.look import look
from ryzanstein.survey.reach import KeyedRouter
from ryzanstein.survey.views import ClusterStatus, RouterMember
from ryzanstein.v1 import inference_pb2 as inference

pytestmark = pytest.mark.long

QUESTION = "Count from 1 to 60."
GREEDY: dict[str, Any] = {"max_tokens": 90, "ignore_eos": True, "logprobs": 2}
SAMPLED: dict[str, Any] = {
    "max_tokens": 90,
    "ignore_eos": True,
    "temperature": 0.9,
    "top_p": 0.95,
    "seed": 2026,
    "repetition_penalty": 1.05,
    "presence_penalty": 0.3,
    "frequency_penalty": 0.2,
    "min_tokens": 20,
    "logprobs": 2,
}
KINDS = {
    "greedy": GREEDY,
    "sampled": SAMPLED,
    "three-choices": {**SAMPLED, "n": 3},
    "stop-string": {"max_tokens": 200, "stop": ["39 40", "39, 40"]},
}


class Routers:
    """A cluster with two routers. `client(name)` opens a new connection to one of them."""

    def __init__(self, cluster: LocalCluster, client_of: Any) -> None:
        self.cluster = cluster
        self._client_of = client_of
        self._clients: list[Any] = []

    def client(self, name: str) -> Any:
        self._clients.append(self._client_of(self.cluster.services[name].grpc_address))
        return self._clients[-1]

    def close(self) -> None:
        for client in self._clients:
            client.close()


@pytest.fixture(scope="module")
def routers(client_of: Any) -> Iterator[Routers]:
    """Two nodes of one rank, two routers; each test leaves all of them ready."""
    with LocalCluster(ClusterSpec(MODEL_DIR, num_nodes=2, num_routers=2, tp=1)) as cluster:
        routers = Routers(cluster, client_of)
        yield routers
        routers.close()


def asked(client: Any, session_id: str = "", **params: Any) -> Any:
    chat = client.request(QUESTION, session_id=session_id, **params)
    return client.inference.StreamChat(inference.StreamChatRequest(chat=chat), timeout=60)


def attached(client: Any, answer: Any) -> Any:
    seen = {choice: len(seen.token_ids) for choice, seen in answer.choices.items()}
    # Ends are said again to a reader that comes back; the client below counts them once.
    for choice in answer.choices.values():
        choice.reason = 0
    request = inference.AttachGenerationRequest(generation_id=answer.generation_id, from_index=seen)
    return client.inference.AttachGeneration(request, timeout=60)


def read_until(client: Any, stream: Any, answer: Any, index: int) -> None:
    """Until the stream has started and choice 0 has so many tokens."""
    for response in stream:
        client.take(response.event, answer)
        if 0 in answer.choices and len(answer.choices[0].token_ids) >= index:
            return


@pytest.mark.timeout(240)
@pytest.mark.parametrize("kind", KINDS)
def test_a_killed_router_changes_no_answer(routers: Routers, answers: Any, kind: str) -> None:
    params = KINDS[kind]
    undisturbed = routers.client("router-1").chat(QUESTION, **params)
    for index in (1, len(undisturbed.token_ids) // 2):
        first, second = routers.client("router-0"), routers.client("router-1")
        answer = answers.new()
        read_until(first, asked(first, **params), answer, index)
        routers.cluster.kill("router-0")
        second.read(attached(second, answer), answer)
        answers.assert_equal(answer, undisturbed)
        routers.cluster.restart("router-0")
        routers.cluster.wait_nodes(2)


@pytest.mark.timeout(180)
def test_a_turn_is_stored_once_and_the_conversation_goes_on(routers: Routers, answers: Any) -> None:
    first, second = routers.client("router-0"), routers.client("router-1")
    answer = answers.new()
    read_until(first, asked(first, session_id="dead-router", **GREEDY), answer, 30)
    routers.cluster.kill("router-0")
    second.read(attached(second, answer), answer)
    routers.cluster.restart("router-0")
    routers.cluster.wait_nodes(2)
    stored = second.sessions.GetSession(inference.GetSessionRequest(session_id="dead-router"), timeout=10).session
    assert [message.content for message in stored.messages] == [QUESTION, answer.text]
    again = routers.client("router-0").chat("Hello!", session_id="dead-router", max_tokens=8)
    assert again.prompt_tokens > answer.prompt_tokens + 30


@pytest.mark.timeout(180)
def test_a_stopped_router_loses_its_generation_and_says_so(routers: Routers, answers: Any) -> None:
    """Its node stops with it: a fast one would have sent the whole answer before the other router takes over."""
    params = {**SAMPLED, "max_tokens": 400, "n": 3}
    undisturbed = routers.client("router-1").chat(QUESTION, **params)
    first, second = routers.client("router-0"), routers.client("router-1")
    answer, stuck = answers.new(), answers.new()
    stream = asked(first, **params)
    read_until(first, stream, stuck, 5)
    answer.generation_id = stuck.generation_id
    routers.cluster.kill(stuck.node_id, signal.SIGSTOP)
    routers.cluster.kill("router-0", signal.SIGSTOP)
    read_until(second, resumed := attached(second, answer), answer, 20)
    routers.cluster.kill("router-0", signal.SIGCONT)
    with pytest.raises(grpc.RpcError) as failure:
        first.read(stream, stuck)
    routers.cluster.kill(stuck.node_id, signal.SIGCONT)
    assert error_from_rpc(failure.value).reason == "GENERATION_MOVED"  # type: ignore[arg-type]
    second.read(resumed, answer)
    answers.assert_equal(answer, undisturbed)
    back = routers.client("router-0")
    back.read(attached(back, stuck), stuck)
    answers.assert_equal(stuck, undisturbed)


@pytest.mark.timeout(180)
def test_two_clients_at_two_routers_get_the_same_answer(routers: Routers, answers: Any) -> None:
    """At the one that took over, and at the dead one when it is back."""
    undisturbed = routers.client("router-1").chat(QUESTION, **SAMPLED)
    first = routers.client("router-0")
    begun = answers.new()
    read_until(first, asked(first, **SAMPLED), begun, 10)
    routers.cluster.restart("router-0")
    readers = []
    for name in ("router-0", "router-1"):
        answer, client = answers.new(), routers.client(name)
        answer.generation_id = begun.generation_id
        stream = attached(client, answer)
        readers.append((threading.Thread(target=client.read, args=(stream, answer)), answer))
    for thread, _ in readers:
        thread.start()
    for thread, answer in readers:
        thread.join()
        answers.assert_equal(answer, undisturbed)
    routers.cluster.wait_nodes(2)


@pytest.mark.timeout(180)
def test_server_sent_events_go_on_at_another_router(routers: Routers) -> None:
    body = {
        "messages": [{"role": "user", "content": QUESTION}],
        "stream": True,
        "temperature": 0.0,
        "max_tokens": 90,
        "ignore_eos": True,
    }
    with httpx.Client(timeout=60) as http:
        url = routers.cluster.http_url_of("router-1")
        whole = Events().read(http.stream("POST", f"{url}/v1/chat/completions", json=body))
        cut = Events().read(
            http.stream("POST", f"{routers.cluster.http_url_of('router-0')}/v1/chat/completions", json=body), until_chars=40
        )
        routers.cluster.kill("router-0")
        headers = {"Last-Event-ID": cut.last_id}
        cut.read(http.stream("GET", f"{url}/v1/generations/{cut.response_id}/events", headers=headers))
    assert cut.text == whole.text
    assert cut.done
    routers.cluster.restart("router-0")
    routers.cluster.wait_nodes(2)


class Events:
    """What a browser has seen of a stream of events."""

    def __init__(self) -> None:
        self.text = self.last_id = self.response_id = ""
        self.done = False

    def read(self, stream: Any, until_chars: int | None = None) -> Events:
        with stream as response:
            for line in response.iter_lines():
                self._take(line)
                if until_chars is not None and len(self.text) >= until_chars:
                    break
        return self

    def _take(self, line: str) -> None:
        if line.startswith("id: "):
            self.last_id = line[4:]
        elif line.startswith("data: {"):
            chunk = httpx.Response(200, text=line[6:]).json()
            self.response_id = chunk["id"]
            for choice in chunk["choices"]:
                self.text += choice["delta"].get("content") or ""
        self.done |= line == "data: [DONE]"


@pytest.mark.timeout(180)
def test_routers_know_each_other_and_where_clients_reach_them(routers: Routers) -> None:
    cluster = routers.cluster
    asked(routers.client("router-0"), max_tokens=5).initial_metadata()

    def seen_by(name: str) -> ClusterStatus:
        return asyncio.run(look(cluster.orchestrator_address, KeyedRouter(cluster.services[name].grpc_address)))

    def until(condition: Callable[[], bool]) -> None:
        deadline = time.monotonic() + 30
        while not condition():
            assert time.monotonic() < deadline, seen_by("router-0")
            time.sleep(0.2)

    expected = [RouterMember(name, cluster.services[name].grpc_address) for name in ("router-0", "router-1")]
    assert list(seen_by("router-0").routers) == list(seen_by("router-1").routers) == expected
    until(lambda: (figures := seen_by("router-0").router.figures) is not None and figures.generated_tokens > 0)
    assert any(node.figures is not None and node.figures.decode_tokens > 0 for node in seen_by("router-0").nodes)
    cluster.kill("router-1")
    until(lambda: list(seen_by("router-0").routers) == expected[:1])
    cluster.restart("router-1")
    until(lambda: list(seen_by("router-0").routers) == expected)
