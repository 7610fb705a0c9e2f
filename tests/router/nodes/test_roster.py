"""Links to nodes that fall silent, talk nonsense, change their name or come back."""

from __future__ import annotations

import asyncio
import time
from typing import Any

import pytest

from ryzanstein.router.nodes.links.connection import WORKING_BEAT_S
from ryzanstein.v1 import inference_pb2 as inference

TOKENS = 80


def stream_of(client: Any, tokens: int = TOKENS) -> Any:
    chat = inference.ChatRequest(
        messages=[inference.Message(role=inference.ROLE_USER, content="hello")],
        sampling=inference.SamplingParams(max_tokens=tokens),
        session_id="s",
    )
    return client.inference.StreamChat(inference.StreamChatRequest(chat=chat))


async def read(stream: Any, at: dict[int, Any] | None = None) -> tuple[list[int], list[str]]:
    """Token ids and nodes; `at` has what to do when so many tokens have come."""
    tokens: list[int] = []
    nodes: list[str] = []
    async for response in stream:
        if response.event.HasField("delta"):
            assert response.event.delta.first_index == len(tokens)
            tokens += response.event.delta.token_ids
            nodes += [response.event.delta.node_id] * (response.event.delta.node_id not in nodes)
        for count in [count for count in at or {} if count <= len(tokens)]:
            await at.pop(count)()
    return tokens, nodes


WHOLE = [1000 + index for index in range(TOKENS)]


@pytest.fixture
async def pair(start_node: Any, start_router: Any) -> tuple[Any, Any, Any]:
    """A router that never gives a silent link up, the session's primary, its backup."""
    nodes = [await start_node("a", step_s=0.01), await start_node("b", step_s=0.01)]
    client = await start_router(*nodes, tuning={"suspicion": {"grace_s": 60.0}})
    _, answered = await read(stream_of(client, 1))
    primary, backup = sorted(nodes, key=lambda node: node.node_id not in answered)
    return client, primary, backup


async def test_an_address_that_nobody_answers_at_says_why_until_a_node_does(
    start_node: Any, start_router: Any, until: Any
) -> None:
    node = await start_node("a")
    client = await start_router(node)

    def failures() -> list[str]:
        return [report.failure for report in client.router.links.reports()]

    assert failures() == [""]
    await node.die()
    await until(lambda: "UNAVAILABLE" in failures()[0])
    assert node.address.rpartition(":")[2] in failures()[0]


async def test_a_silent_single_node_is_given_up_and_taken_back_when_it_speaks(
    start_node: Any, start_router: Any, until: Any
) -> None:
    node = await start_node("a", step_s=0.01, fixed_incarnation="same")
    client = await start_router(node, tuning={"suspicion": {"grace_s": 0.1}})

    async def freeze() -> None:
        node.frozen = True
        await until(lambda: client.value("link_losses_total", node_id="a", cause="silence") >= 1)
        assert client.value("breaker_state", node_id="a") == 2
        node.frozen = False

    tokens, _ = await read(stream_of(client), {5: freeze})
    assert tokens == WHOLE
    await until(lambda: client.value("breaker_state", node_id="a") == 0)


async def test_a_backup_that_appears_after_the_suspicion_is_still_used(pair: Any, until: Any) -> None:
    client, primary, backup = pair
    await backup.die()
    await until(lambda: client.value("link_up", node_id=backup.node_id) == 0)

    async def freeze() -> None:
        primary.frozen = True
        await until(lambda: any(view.suspected for view in client.router.links.snapshot()))
        await backup.start()

    tokens, nodes = await read(stream_of(client), {5: freeze})
    assert tokens == WHOLE
    assert nodes == [primary.node_id, backup.node_id]


async def test_a_suspected_node_that_dies_leaves_the_answer_to_the_hedge(pair: Any, until: Any) -> None:
    client, primary, backup = pair
    backup.stalled = True

    async def freeze_then_die() -> None:
        primary.frozen = True
        await until(lambda: bool(backup.submits))
        await primary.die()
        await until(lambda: client.value("hedges_total", outcome="took_over") == 1)
        backup.stalled = False

    tokens, nodes = await read(stream_of(client), {5: freeze_then_die})
    assert tokens == WHOLE
    assert nodes == [primary.node_id, backup.node_id]
    assert client.value("failovers_total", cause="silence") == 1


async def test_a_hedge_whose_node_dies_leaves_the_answer_to_the_suspected_node(pair: Any, until: Any) -> None:
    client, primary, backup = pair
    backup.stalled = True

    async def freeze_then_kill_backup() -> None:
        primary.frozen = True
        await until(lambda: bool(backup.submits))
        await backup.die()
        await until(lambda: client.value("hedges_total", outcome="lost") == 1)
        primary.frozen = False

    tokens, nodes = await read(stream_of(client), {5: freeze_then_kill_backup})
    assert tokens == WHOLE
    assert nodes == [primary.node_id]


async def test_missing_beats_are_no_silence_while_tokens_come(pair: Any) -> None:
    client, primary, _ = pair
    primary.mute_beats = True
    tokens, nodes = await read(stream_of(client))
    assert (tokens, nodes) == (WHOLE, [primary.node_id])
    assert client.value("hedges_total", outcome="started") == 0


async def test_a_frame_that_makes_no_sense_ends_the_link_and_not_the_answer(pair: Any) -> None:
    client, primary, backup = pair

    async def tear() -> None:
        primary.torn_columns = True

    tokens, nodes = await read(stream_of(client), {5: tear})
    assert tokens == WHOLE
    assert nodes == [primary.node_id, backup.node_id]
    assert client.value("link_losses_total", node_id=primary.node_id, cause="protocol") == 1


async def test_rows_of_handles_that_nobody_submitted_are_ignored(pair: Any) -> None:
    client, primary, _ = pair
    primary.strangers = True
    assert await read(stream_of(client)) == (WHOLE, [primary.node_id])


async def test_a_node_that_comes_back_under_another_name_is_one_node(start_node: Any, start_router: Any, until: Any) -> None:
    node = await start_node("a")
    client = await start_router(node)
    await node.die()
    node.node_id = "b"
    await node.start()
    await until(lambda: [view.node_id for view in client.router.links.snapshot()] == ["b"])
    assert client.router.telemetry.registry.get_sample_value("ryzanstein_router_link_up", {"node_id": "a"}) is None
    tokens, nodes = await read(stream_of(client))
    assert (tokens, nodes) == (WHOLE, ["b"])


async def test_an_address_that_leaves_and_comes_back_at_once_is_linked_again(
    start_node: Any, start_router: Any, until: Any
) -> None:
    node = await start_node("a")
    await node.die()
    client = await start_router(node, ready_nodes=0)
    client.router.linker.follow([])
    client.router.linker.follow([node.address])
    await node.start()
    await until(lambda: client.router.core.ready)


async def test_many_generations_move_at_once_and_stay_whole(start_node: Any, start_router: Any, until: Any) -> None:
    nodes = [await start_node("a", step_s=0.01), await start_node("b", step_s=0.01)]
    client = await start_router(*nodes)
    requests = [
        inference.ChatRequest(
            messages=[inference.Message(role=inference.ROLE_USER, content="hello")],
            sampling=inference.SamplingParams(max_tokens=TOKENS),
            session_id=f"s{i}",
        )
        for i in range(64)
    ]
    streams = [client.inference.StreamChat(inference.StreamChatRequest(chat=request)) for request in requests]
    readings = [asyncio.create_task(read(stream)) for stream in streams]
    await until(lambda: client.value("tokens_total", model="demo", node_id="a") > 300)
    await nodes[0].die()
    for reading in readings:
        tokens, _ = await reading
        assert tokens == WHOLE
    assert client.value("detected_to_rerouted_seconds_count") == client.value("failovers_total", cause="link_lost") > 0


async def test_a_router_says_that_it_is_there_and_more_often_while_work_runs(pair: Any) -> None:
    client, primary, backup = pair
    await asyncio.sleep(0.3)
    before = len(primary.router_beats), len(backup.router_beats)
    asked_at = time.monotonic()
    tokens, _ = await read(stream_of(client, 200))
    took_s = time.monotonic() - asked_at
    working, idle = (len(node.router_beats) - count for node, count in zip((primary, backup), before, strict=True))
    assert len(tokens) == 200
    assert primary.router_beats[before[0]] - asked_at < 0.5, "with the first submit after idleness"
    assert took_s / WORKING_BEAT_S / 3 <= working <= took_s / WORKING_BEAT_S + 2
    assert took_s - 1.5 <= idle <= took_s + 1.5


@pytest.mark.lab
async def test_a_node_that_hears_nothing_is_backed_up_though_its_tokens_come(pair: Any, until: Any) -> None:
    client, primary, _ = pair

    async def stop_hearing() -> None:
        primary.deaf = True
        await until(lambda: client.value("suspicions_total", node_id=primary.node_id, cause="deaf") == 1)
        assert client.value("node_suspected", node_id=primary.node_id) == 1
        primary.deaf = False
        await until(lambda: client.value("node_suspected", node_id=primary.node_id) == 0)

    tokens, _ = await read(stream_of(client, 2000), {20: stop_hearing})
    assert tokens == [1000 + index for index in range(2000)]
    assert client.value("hedges_total", outcome="started") == 1
    assert client.value("link_losses_total", node_id=primary.node_id, cause="deaf") == 0


async def test_an_idle_node_that_hears_nothing_is_given_up_and_taken_back(
    start_node: Any, start_router: Any, until: Any
) -> None:
    node = await start_node("a", fixed_incarnation="same")
    client = await start_router(node, tuning={"suspicion": {"grace_s": 0.1}})
    await until(lambda: len(node.router_beats) >= 1)
    await asyncio.sleep(0.1)
    node.deaf = True
    await until(lambda: client.value("link_losses_total", node_id="a", cause="deaf") == 1)
    node.deaf = False
    await until(lambda: client.value("link_up", node_id="a") == 1)


async def test_an_older_node_that_answers_no_beats_is_not_deaf(start_node: Any, start_router: Any) -> None:
    node = await start_node("a", step_s=0.01, answers_beats=False)
    client = await start_router(node, tuning={"suspicion": {"grace_s": 0.1}})
    tokens, _ = await read(stream_of(client, 300))
    assert len(tokens) == 300
    assert len(node.router_beats) >= 8
    assert client.value("suspicions_total", node_id="a", cause="deaf") == 0
    assert client.value("link_losses_total", node_id="a", cause="deaf") == 0
