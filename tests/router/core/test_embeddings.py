"""How a request for vectors is divided among nodes: which input an error names, and how long it waits."""

from __future__ import annotations

import asyncio
import time
from array import array
from dataclasses import dataclass
from typing import Any

import pytest

from ryzanstein import clock, errors
from ryzanstein.cluster import OWN_ENGINE, EngineTraits
from ryzanstein.embeddings import Embedded, EmbeddingRequest
from ryzanstein.errors import Code, RyzansteinError
from ryzanstein.generation.prompts import TextPrompt
from ryzanstein.generation.request import CACHE_SCOPES
from ryzanstein.router.core import embeddings
from ryzanstein.router.core.embeddings import Embedder
from ryzanstein.router.failover.placement import RunnerPolicy
from ryzanstein.router.nodes.breaker import Breaker, BreakerState
from ryzanstein.router.telemetry import RouterTelemetry


@dataclass
class Link:
    node_id: str = "node-0"
    features: frozenset[str] = frozenset()
    engine: EngineTraits = OWN_ENGINE


class Links:
    """A roster of these nodes, which never changes."""

    def __init__(self, *links: Link) -> None:
        self._links = links
        self.breakers = {link.node_id: Breaker(time.monotonic, lambda state: None) for link in links}

    def least_loaded(self, model: str, excluded: Any = (), excluding: Any = None) -> Link | None:
        admitted = (link for link in self._links if self.breakers[link.node_id].admits)
        return next((link for link in admitted if link.node_id not in excluded), None)

    def breaker(self, node_id: str) -> Breaker:
        return self.breakers[node_id]

    def drained(self, model: str) -> tuple[str, ...]:
        return ()

    async def changed(self, timeout_s: float, model: str = "") -> None:
        await asyncio.sleep(timeout_s)


def embedder(*links: Link) -> Embedder:
    return Embedder(Links(*links), RunnerPolicy(), RouterTelemetry())  # type: ignore[arg-type]


def request(num_inputs: int, **more: Any) -> EmbeddingRequest:
    return EmbeddingRequest("demo", tuple(TextPrompt(str(i)) for i in range(num_inputs)), **more)


@pytest.mark.parametrize(
    ("new_messages", "visible"),
    [
        ("inputs[{}]", "inputs[70]"),
        ("inputs[{}].text", "inputs[70].text"),
        ("input[{}]", "inputs[70]"),  # a node of an earlier version
        ("input", "inputs"),
        ("dimensions", "dimensions"),
    ],
)
async def test_an_error_names_the_input_by_its_place_in_the_whole_request(
    monkeypatch: pytest.MonkeyPatch, new_messages: str, visible: str
) -> None:
    async def refusing(link: Link, asked: EmbeddingRequest, inputs: Any) -> Any:
        wrong = next((i for i, each in enumerate(inputs) if each.text == "70"), None)
        if wrong is not None:
            raise errors.invalid(new_messages.format(wrong), "must have at least one token")
        return [Embedded(array("f", [1.0]), 1) for _ in inputs]

    monkeypatch.setattr(embeddings, "embed", refusing)
    with pytest.raises(RyzansteinError) as refused:
        await embedder(Link()).embed(request(100))
    assert refused.value.violations[0].field == refused.value.metadata["field"] == visible
    assert refused.value.message == f"{visible}: must have at least one token"


async def test_inputs_of_a_cache_scope_go_to_no_node_that_would_ignore_it(monkeypatch: pytest.MonkeyPatch) -> None:
    asked_of: list[str] = []

    async def answering(link: Link, asked: EmbeddingRequest, inputs: Any) -> list[Embedded]:
        asked_of.append(link.node_id)
        return [Embedded(array("f", [1.0]), 1) for _ in inputs]

    monkeypatch.setattr(embeddings, "embed", answering)
    old, new = Link("old"), Link("new", frozenset({CACHE_SCOPES}))
    await embedder(old, new).embed(request(100, cache_scope="a"))
    assert set(asked_of) == {"new"}
    with pytest.raises(RyzansteinError) as refused:
        await embedder(old).embed(request(1, cache_scope="a"))
    assert (refused.value.reason, refused.value.metadata["features"]) == ("NODES_TOO_OLD", CACHE_SCOPES)
    assert len(await embedder(old).embed(request(1))) == 1


async def test_inputs_go_to_no_node_whose_engine_makes_no_embeddings(monkeypatch: pytest.MonkeyPatch) -> None:
    asked_of: list[str] = []

    async def answering(link: Link, asked: EmbeddingRequest, inputs: Any) -> list[Embedded]:
        asked_of.append(link.node_id)
        return [Embedded(array("f", [1.0]), 1) for _ in inputs]

    monkeypatch.setattr(embeddings, "embed", answering)
    foreign = [Link(name, engine=EngineTraits("llama.cpp b7200", frozenset({"embeddings"}))) for name in "abcdefgh"]
    await embedder(*foreign, Link("own")).embed(request(100))
    assert set(asked_of) == {"own"}
    with pytest.raises(RyzansteinError) as refused:
        await embedder(*foreign).embed(request(1))
    assert (refused.value.code, refused.value.reason) == (Code.FAILED_PRECONDITION, "ENGINE_LACKS")
    assert refused.value.metadata["engine"] == "llama.cpp b7200"


async def test_no_request_waits_for_a_node_beyond_its_deadline() -> None:
    began = time.monotonic()
    with pytest.raises(RyzansteinError) as late:
        await embedder().embed(request(1, deadline=clock.unix_s() + 0.1))
    assert (late.value.code, time.monotonic() - began < 2) == (Code.DEADLINE_EXCEEDED, True)


async def test_a_breaker_that_lets_a_probe_pass_is_noticed_and_closed_by_its_success(monkeypatch: pytest.MonkeyPatch) -> None:
    async def answering(link: Link, asked: EmbeddingRequest, inputs: Any) -> list[Embedded]:
        return [Embedded(array("f", [1.0]), 1) for _ in inputs]

    monkeypatch.setattr(embeddings, "embed", answering)
    links = Links(Link())
    links.breakers["node-0"].open()
    began = time.monotonic()
    asked = Embedder(links, RunnerPolicy(), RouterTelemetry())  # type: ignore[arg-type]
    assert len(await asked.embed(request(3))) == 3
    assert time.monotonic() - began < 5
    assert links.breakers["node-0"].state is BreakerState.CLOSED


async def test_an_input_that_is_too_large_for_the_router_is_named(start_node: Any, start_router: Any) -> None:
    client = await start_router(await start_node("a"), max_prompt_chars=3)
    with pytest.raises(RyzansteinError) as refused:
        await client.router.core.embed(EmbeddingRequest("demo", (TextPrompt("abc"), TextPrompt("abcd"))))
    assert [each.field for each in refused.value.violations] == ["inputs[1].text"]
