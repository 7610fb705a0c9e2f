"""Nodes that the orchestrator no longer lists: what runs is linked, and their models are still known."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import grpc
import pytest

from ryzanstein import errors
from ryzanstein.cluster import NO_MODEL, STOPS
from ryzanstein.router.nodes.table import DepartedModels
from ryzanstein.rpc.status import error_from_rpc
from ryzanstein.v1 import inference_pb2 as inference
from ryzanstein.v1 import worker_pb2 as worker


def models(router: Any) -> set[str]:
    return {model.name for model in router.router.links.models}


async def refusal(router: Any, model: str) -> errors.RyzansteinError:
    """The error of a request for the model."""
    messages = [inference.Message(role=inference.ROLE_USER, content="hello")]
    with pytest.raises(grpc.aio.AioRpcError) as refused:
        await router.inference.Chat(inference.ChatRequest(model=model, messages=messages))
    return error_from_rpc(refused.value)


@pytest.mark.parametrize("model", ["", "second"])
async def test_a_departed_node_that_still_answers_gets_its_lost_link_again(
    start_node: Any, start_router: Any, until: Callable[..., Any], model: str
) -> None:
    node = await start_node("a", other_models=("second",))
    router = await start_router(node)
    linker = router.router.linker
    await until(lambda: models(router) == {"demo", "second"})
    linker.follow([])
    link = next(link for link in linker.links if link.model == model)
    link._connection.end("link_lost")
    await until(lambda: models(router) == {"demo", "second"} - {model or "demo"})
    linker.follow([])
    await until(lambda: models(router) == {"demo", "second"})
    await node.die()
    await until(lambda: not linker.links)


async def test_a_departed_node_is_not_asked_for_a_model_that_it_no_longer_lists(
    start_node: Any, start_router: Any, until: Callable[..., Any]
) -> None:
    node = await start_node("a", other_models=("second",))
    router = await start_router(node)
    linker = router.router.linker
    await until(lambda: models(router) == {"demo", "second"})
    node.other_models = ()
    await until(lambda: [link.model for link in linker.links if link.departed] == ["second"])
    linker.follow([])
    next(link for link in linker.links if link.model)._connection.end("link_lost")
    await until(lambda: [link.model for link in linker.links] == [""])
    await asyncio.sleep(0.2)
    assert [link.model for link in linker.links] == [""]


async def test_the_model_of_a_node_that_disappeared_is_missing_and_not_unknown(
    start_node: Any, start_router: Any, until: Callable[..., Any]
) -> None:
    gone, stays = await start_node("a", other_models=("second",)), await start_node("b")
    router = await start_router(gone, stays, failover_wait_s=0.1)
    linker = router.router.linker
    await until(lambda: models(router) == {"demo", "second"})
    await gone.die()
    linker.follow([stays.address])
    await until(lambda: [link.node_id for link in linker.links] == ["b"])
    assert (await refusal(router, "second")).reason == "NO_NODES"
    assert (await refusal(router, "third")).reason == "MODEL_NOT_FOUND"
    assert router.router.links.known_models == {"demo"}, "a request without a model takes the one that is left"


@pytest.mark.parametrize(
    ("last", "expected"),
    [
        ((worker.NODE_STATE_DRAINING, "second", STOPS), "NO_NODES"),  # it may be restarted
        ((worker.NODE_STATE_STARTING, "", NO_MODEL), "MODEL_NOT_FOUND"),
    ],
)
async def test_the_model_of_a_node_that_left_is_unknown_only_if_it_was_unloaded(
    start_node: Any, start_router: Any, until: Callable[..., Any], last: tuple[int, str, str], expected: str
) -> None:
    leaves, stays = await start_node("a", model="second"), await start_node("b")
    router = await start_router(leaves, stays, failover_wait_s=0.1)
    linker = router.router.linker
    leaves.state, leaves.model, leaves.reason = last
    await until(lambda: models(router) == {"demo"})
    linker.follow([stays.address])
    await leaves.die()
    await until(lambda: [link.node_id for link in linker.links] == ["b"])
    assert (await refusal(router, "second")).reason == expected


async def test_a_model_that_the_orchestrator_lists_is_known_before_its_node_is_linked(
    start_node: Any, start_router: Any
) -> None:
    router = await start_router(await start_node("a"), failover_wait_s=0.1)
    linker = router.router.linker
    linker.follow([*(link.address for link in linker.links), "127.0.0.1:1"], models=["demo", "second"])
    assert (await refusal(router, "second")).reason == "NO_NODES"
    assert (await refusal(router, "third")).reason == "MODEL_NOT_FOUND"


def test_a_departed_model_is_forgotten_after_a_while() -> None:
    now = 100.0
    departed = DepartedModels(lambda: now, keep_s=60.0)
    departed.add("second")
    now = 159.0
    assert "second" in departed
    departed.add("third")
    now = 161.0
    assert "second" not in departed
    assert "third" in departed
