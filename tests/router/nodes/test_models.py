"""A node with several models: each has a link of its own, so that one's loss leaves the other's answers alone."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

from ryzanstein.cluster import NO_MODEL
from ryzanstein.router.nodes.breaker import BreakerState
from ryzanstein.router.nodes.index import MAX_FURTHER_MODELS
from ryzanstein.v1 import inference_pb2 as inference
from ryzanstein.v1 import worker_pb2 as worker

TOKENS = 60


def chat(model: str) -> inference.StreamChatRequest:
    messages = [inference.Message(role=inference.ROLE_USER, content="hello")]
    sampling = inference.SamplingParams(max_tokens=TOKENS)
    return inference.StreamChatRequest(chat=inference.ChatRequest(model=model, messages=messages, sampling=sampling))


async def read(stream: Any) -> tuple[list[int], list[str]]:
    """The tokens of an answer, and the nodes that they came from, each once."""
    tokens, nodes = [], []
    async for response in stream:
        assert response.event.delta.first_index in (0, len(tokens))
        tokens += response.event.delta.token_ids
        if response.event.delta.node_id:
            nodes.append(response.event.delta.node_id)
    return tokens, list(dict.fromkeys(nodes))


def models(router: Any) -> set[str]:
    return {model.name for model in router.router.links.models}


async def test_each_model_is_served_on_a_link_of_its_own(start_node: Any, start_router: Any, until: Callable[..., Any]) -> None:
    node = await start_node("a", other_models=("second",))
    router = await start_router(node)
    await until(lambda: models(router) == {"demo", "second"})
    for model, node_id in (("demo", "a"), ("second", "a/second")):
        tokens, nodes = await read(router.inference.StreamChat(chat(model)))
        assert (len(tokens), nodes) == (TOKENS, [node_id])
        assert node.submits[-1].model == model
    assert len(node.connections) == 2


async def test_the_loss_of_one_models_ranks_moves_only_its_answers(
    start_node: Any, start_router: Any, until: Callable[..., Any]
) -> None:
    nodes = [await start_node(name, other_models=("second",), step_s=0.005) for name in "ab"]
    router = await start_router(*nodes)
    await until(lambda: all(model.ready_nodes == 2 for model in router.router.links.models) and len(models(router)) == 2)
    streams = [asyncio.create_task(read(router.inference.StreamChat(chat(name)))) for name in ("demo", "second") * 4]
    await until(lambda: sum(node.num_running for node in nodes) == len(streams))
    nodes[0].lost_models = {"second"}
    answers = [await stream for stream in streams]
    assert all(len(tokens) == TOKENS for tokens, _ in answers)
    assert all(len(names) == 1 for _, names in answers[::2]), "nothing of the first model moved"
    assert all(names[-1] == "b/second" for _, names in answers[1::2])
    assert router.router.links.breaker("a").state is BreakerState.CLOSED


async def test_a_model_that_the_node_has_no_longer_is_not_served(
    start_node: Any, start_router: Any, until: Callable[..., Any]
) -> None:
    node = await start_node("a", other_models=("second", "third"))
    router = await start_router(node)
    await until(lambda: models(router) == {"demo", "second", "third"})
    node.other_models = ("third",)
    # Its stream stays for what runs there; a node that has unloaded the model ends it.
    await until(lambda: [link.model for link in router.router.linker.links if link.departed] == ["second"])
    node.other_models = ("third", "second")
    await until(lambda: not [link for link in router.router.linker.links if link.departed])
    assert models(router) == {"demo", "second", "third"}


async def test_a_node_that_comes_back_has_all_its_models_again(
    start_node: Any, start_router: Any, until: Callable[..., Any]
) -> None:
    node = await start_node("a", other_models=("second",))
    router = await start_router(node)
    await until(lambda: models(router) == {"demo", "second"})
    await node.die()
    await until(lambda: models(router) == set())
    await node.start()
    await until(lambda: models(router) == {"demo", "second"})
    assert len(node.connections) == 2


async def test_a_member_that_leaves_and_returns_keeps_all_its_models(
    start_node: Any, start_router: Any, until: Callable[..., Any]
) -> None:
    node = await start_node("a", other_models=("second",))
    router = await start_router(node)
    linker = router.router.linker
    await until(lambda: models(router) == {"demo", "second"})
    linker.follow([])
    assert [link.departed for link in linker.links] == [True, True]
    linker.follow([node.address])
    assert [link.departed for link in linker.links] == [False, False]
    await node.die()
    linker.follow([])
    await until(lambda: not linker.links)


async def test_an_older_node_is_never_asked_for_a_model_in_vain(
    start_node: Any, start_router: Any, until: Callable[..., Any]
) -> None:
    node = await start_node("a", other_models=("second",), knows_models=False)
    router = await start_router(node)
    tokens, nodes = await read(router.inference.StreamChat(chat("demo")))
    assert (len(tokens), nodes) == (TOKENS, ["a"])
    await asyncio.sleep(0.3)
    assert models(router) == {"demo"}
    assert router.router.links.members == {"a": node.address}


async def test_a_node_that_lists_nonsense_gets_a_bounded_number_of_links(
    start_node: Any, start_router: Any, until: Callable[..., Any]
) -> None:
    names = ("", "x" * 10_000, "same", "same", *(f"m{number}" for number in range(200)))
    node = await start_node("a", other_models=names)
    router = await start_router(node)
    await until(lambda: len(models(router)) == 1 + MAX_FURTHER_MODELS)
    links = router.router.links.reports()
    assert len(links) == 1 + MAX_FURTHER_MODELS
    assert max(len(link.node_id) for link in links) < 100


async def test_a_model_is_known_while_its_only_node_loads_it_again_and_unknown_when_it_is_unloaded(
    start_node: Any, start_router: Any, until: Callable[..., Any]
) -> None:
    node = await start_node("a", other_models=("second",))
    router = await start_router(node)
    await until(lambda: models(router) == {"demo", "second"})
    node.state, node.model, node.reason = worker.NODE_STATE_STARTING, "", "loading demo"
    await until(lambda: "demo" not in models(router))
    assert router.router.links.known_models == {"demo", "second"}
    node.reason = NO_MODEL
    await until(lambda: router.router.links.known_models == {"second"})


async def test_a_model_that_a_node_lists_is_known_before_its_link_is_up(
    start_node: Any, start_router: Any, until: Callable[..., Any]
) -> None:
    node = await start_node("a", other_models=("second",), lost_models={"second"})
    router = await start_router(node, ready_nodes=1)
    await until(lambda: "demo" in models(router))
    assert "second" in router.router.links.known_models
