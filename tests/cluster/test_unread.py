"""People who close the page, stop an answer or reload, over HTTP, at real routers and a real model."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from typing import Any

import httpx
import pytest

from ryzanstein.cli.processes.cluster import ClusterSpec, LocalCluster
from ryzanstein.demo import MODEL_DIR
from ryzanstein.v1 import inference_pb2 as inference

pytestmark = pytest.mark.long

Holds = Callable[[Callable[[], bool], float], bool]
LONG = 1500


class Stream:
    """What a browser has seen of an answer, and how to go on with it."""

    def __init__(self) -> None:
        self.response_id = self.last_event_id = self.text = ""
        self.done = False

    def take(self, lines: Iterator[str], until_chars: int | None = None) -> None:
        for line in lines:
            if line.startswith("id: "):
                self.last_event_id = line.removeprefix("id: ")
            elif line == "data: [DONE]":
                self.done = True
            elif line.startswith("data: "):
                chunk = json.loads(line.removeprefix("data: "))
                self.response_id = chunk["id"]
                self.text += chunk["choices"][0]["delta"].get("content", "")
            if until_chars is not None and len(self.text) >= until_chars:
                return

    def ask(self, url: str, body: dict[str, Any], until_chars: int | None = None, **headers: str) -> Stream:
        sent = {name.replace("_", "-"): value for name, value in headers.items()}
        with httpx.stream("POST", f"{url}/v1/chat/completions", json=body, headers=sent, timeout=60, trust_env=False) as answer:
            assert answer.status_code == 200, answer.read()
            self.take(answer.iter_lines(), until_chars)
        return self

    def go_on(self, url: str) -> Stream:
        events, headers = f"{url}/v1/generations/{self.response_id}/events", {"Last-Event-ID": self.last_event_id}
        with httpx.stream("GET", events, headers=headers, timeout=60, trust_env=False) as answer:
            assert answer.status_code == 200, answer.read()
            self.take(answer.iter_lines())
        return self


def body(text: str, tokens: int) -> dict[str, Any]:
    options = {"max_tokens": tokens, "temperature": 0, "ignore_eos": tokens == LONG, "stream": True}
    return {"model": "demo", "messages": [{"role": "user", "content": text}], **options}


@pytest.fixture(scope="module")
def cluster() -> Iterator[LocalCluster]:
    """One node, two routers that pause what nobody reads after 0.3 s."""
    flags = ("--unread-grace-s", "0.3")
    with LocalCluster(ClusterSpec(MODEL_DIR, num_nodes=1, num_routers=2, tp=1, router_flags=flags)) as cluster:
        yield cluster


@pytest.fixture
def urls(cluster: LocalCluster) -> list[str]:
    return [cluster.http_url_of(name) for name in ("router-0", "router-1")]


def value(cluster: LocalCluster, service: str, name: str) -> float:
    page = httpx.get(cluster.services[service].metrics_url, timeout=10, trust_env=False).text
    return sum(float(line.rpartition(" ")[2]) for line in page.splitlines() if line.startswith(name))


def test_a_closed_page_frees_the_node_and_a_reload_goes_on(cluster: LocalCluster, urls: list[str], holds: Holds) -> None:
    question = body("Count from 1 to 60.", LONG)
    undisturbed = Stream().ask(urls[0], question)
    assert undisturbed.done
    page = Stream().ask(urls[0], question, until_chars=20)
    assert holds(lambda: value(cluster, "router-0", "ryzanstein_router_generations_paused_total") == 1, 20)
    assert holds(lambda: value(cluster, "node-0", "ryzanstein_worker_running{") == 0, 20)
    page.go_on(urls[1])
    assert page.done
    assert page.text == undisturbed.text


def test_who_stops_an_answer_can_ask_the_next_question_anywhere(cluster: LocalCluster, urls: list[str], client_of: Any) -> None:
    stopped = Stream().ask(urls[0], body("Count from 1 to 60.", LONG), until_chars=20, x_session_id="stopped")
    asked = Stream().ask(urls[1], body("Count from 1 to 5.", 40), x_session_id="stopped")
    assert asked.done
    client = client_of(cluster.services["router-0"].grpc_address)
    messages = client.sessions.GetSession(inference.GetSessionRequest(session_id="stopped"), timeout=10).session.messages
    client.close()
    question, visible, following, answer = (message.content for message in messages)
    assert (question, following, answer) == ("Count from 1 to 60.", "Count from 1 to 5.", asked.text)
    assert visible.startswith(stopped.text)


def test_a_disconnect_cancels_at_once_when_it_is_asked_to(cluster: LocalCluster, urls: list[str], holds: Holds) -> None:
    name = 'ryzanstein_router_generations_total{model="demo",outcome="cancelled"}'
    before = value(cluster, "router-1", name)
    paused = value(cluster, "router-1", "ryzanstein_router_generations_paused_total")
    Stream().ask(urls[1], body("Count from 1 to 60.", LONG), until_chars=20, x_cancel_on_disconnect="true")
    assert holds(lambda: value(cluster, "router-1", name) == before + 1, 20)
    assert value(cluster, "router-1", "ryzanstein_router_generations_paused_total") == paused


def test_a_detached_answer_is_there_for_who_comes_back(cluster: LocalCluster, urls: list[str], holds: Holds) -> None:
    name = 'ryzanstein_router_generations_total{model="demo",outcome="complete"}'
    before = value(cluster, "router-0", name)
    page = Stream().ask(urls[0], body("Count from 1 to 60.", LONG), until_chars=20, x_run_detached="true")
    assert holds(lambda: value(cluster, "router-0", name) == before + 1, 60)
    assert page.go_on(urls[1]).done
