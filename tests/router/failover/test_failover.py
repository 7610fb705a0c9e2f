"""Nodes that die, freeze, stall, repeat and come back: the client's stream stays whole."""

from __future__ import annotations

import asyncio
from typing import Any

import grpc
import pytest

from ryzanstein import errors
from ryzanstein.errors import Code, RyzansteinError
from ryzanstein.rpc.status import error_from_rpc
from ryzanstein.v1 import inference_pb2 as inference
from ryzanstein.v1 import worker_pb2 as worker

TOKENS = 24


def request(tokens: int = TOKENS, session_id: str = "s", **sampling: Any) -> inference.StreamChatRequest:
    return inference.StreamChatRequest(
        chat=inference.ChatRequest(
            messages=[inference.Message(role="ROLE_USER", content="hello")],
            sampling=inference.SamplingParams(max_tokens=tokens, **sampling),
            session_id=session_id,
        )
    )


class Reading:
    """A stream read to its end: per choice the token ids in order, and the nodes that gave them."""

    def __init__(self) -> None:
        self.started: list[Any] = []
        self.tokens: dict[int, list[int]] = {}
        self.text = ""
        self.nodes: list[str] = []
        self.moves: list[tuple[int, Any]] = []
        self.finished: list[Any] = []

    async def read(self, stream: Any) -> Reading:
        async for response in stream:
            self._add(response.event)
        return self

    def _add(self, event: inference.GenerationEvent) -> None:
        if event.HasField("started"):
            self.started.append(event.started)
        elif event.HasField("finished"):
            self.finished.append(event.finished)
        else:
            tokens = self.tokens.setdefault(event.delta.choice, [])
            assert event.delta.first_index == len(tokens), "a gap or a repeat"
            tokens.extend(event.delta.token_ids)
            self.text += event.delta.text
            if event.delta.HasField("moved"):
                self.moves.append((event.delta.first_index, event.delta.moved))
            if self.nodes[-1:] != [event.delta.node_id]:
                self.nodes.append(event.delta.node_id)


def whole(tokens: int = TOKENS, choice: int = 0) -> list[int]:
    return [1000 * (choice + 1) + index for index in range(tokens)]


async def primary_first(client: Any, nodes: list[Any]) -> list[Any]:
    """The nodes in the order in which the session of `request` prefers them."""
    reading = await Reading().read(client.inference.StreamChat(request(1)))
    return sorted(nodes, key=lambda node: node.node_id not in reading.nodes)


@pytest.fixture
async def pair(start_node: Any, start_router: Any) -> tuple[Any, Any, Any]:
    """A router with two nodes: the client, the session's primary, its backup."""
    nodes = [await start_node("a"), await start_node("b")]
    client = await start_router(*nodes)
    primary, backup = await primary_first(client, nodes)
    return client, primary, backup


@pytest.mark.parametrize("index", [0, 1, 2, 7, TOKENS - 1])
async def test_a_node_that_dies_at_any_index_loses_and_repeats_nothing(pair: Any, index: int) -> None:
    client, primary, backup = pair
    primary.die_at = index
    reading = await Reading().read(client.inference.StreamChat(request()))
    assert reading.tokens == {0: whole()}
    assert reading.nodes[-1] == backup.node_id
    assert reading.finished[-1].usage.completion_tokens == TOKENS
    assert len(reading.started) == 1
    moved = backup.submits[-1]
    assert moved.attempt == 1
    assert [list(choice.token_ids) for choice in moved.generated] == ([whole(index)] if index else [])
    said = [(at, move.from_node_id, move.cause, move.attempt) for at, move in reading.moves]
    assert said == ([(index, primary.node_id, "link_lost", 1)] if index else []), "before the first token nothing moved"
    assert all(0 < move.silence.ToNanoseconds() < 30e9 for _, move in reading.moves)
    assert client.value("failovers_total", cause="link_lost") == 1


async def test_every_choice_moves_with_what_it_has(pair: Any) -> None:
    client, primary, _ = pair
    primary.die_at = 5
    reading = await Reading().read(client.inference.StreamChat(request(n=3)))
    assert reading.tokens == {choice: whole(choice=choice) for choice in range(3)}
    assert [at for at, _ in reading.moves] == [5, 5, 5]
    assert [end.choice for end in reading.finished] == [0, 1, 2]
    assert reading.finished[-1].usage.completion_tokens == 3 * TOKENS


@pytest.mark.parametrize("switch", ["frozen", "stalled"])
async def test_a_node_that_goes_silent_or_stalls_is_hedged_and_loses_the_race(
    start_node: Any, start_router: Any, switch: str
) -> None:
    nodes = [await start_node("a", step_s=0.01), await start_node("b", step_s=0.01)]
    client = await start_router(*nodes, tuning={"suspicion": {"stall_s": 0.3}})
    primary, backup = await primary_first(client, nodes)
    stream = client.inference.StreamChat(request(60))
    reading = Reading()
    async for response in stream:
        reading._add(response.event)
        if len(reading.tokens.get(0, [])) == 5:
            setattr(primary, switch, True)
    assert reading.tokens == {0: whole(60)}
    assert reading.nodes == [primary.node_id, backup.node_id]
    assert client.value("hedges_total", outcome="won") == 1
    assert client.value("breaker_state", node_id=primary.node_id) > 0


async def test_a_false_alarm_costs_work_and_nothing_else(start_node: Any, start_router: Any, until: Any) -> None:
    nodes = [await start_node("a", step_s=0.01), await start_node("b", step_s=0.01)]
    client = await start_router(*nodes, tuning={"suspicion": {"grace_s": 60.0}})
    primary, backup = await primary_first(client, nodes)
    backup.stalled = True
    stream = client.inference.StreamChat(request(60))
    reading = Reading()
    async for response in stream:
        reading._add(response.event)
        if len(reading.tokens.get(0, [])) == 5 and not primary.frozen:
            primary.frozen = True
            await until(lambda: client.value("hedges_total", outcome="started") == 1)
            primary.frozen = False
    assert reading.tokens == {0: whole(60)}
    assert reading.nodes == [primary.node_id]
    assert client.value("hedges_total", outcome="false_alarm") == 1
    await until(lambda: bool(backup.cancels))
    assert client.value("breaker_state", node_id=primary.node_id) == 0


async def test_rows_that_come_twice_are_dropped_and_counted(pair: Any) -> None:
    client, primary, _ = pair
    primary.repeat_rows = True
    reading = await Reading().read(client.inference.StreamChat(request()))
    assert reading.tokens == {0: whole()}
    assert client.value("dropped_rows_total", kind="duplicate") == TOKENS


async def test_a_node_that_skips_an_index_is_left(pair: Any) -> None:
    client, primary, backup = pair
    primary.gap_at = 6
    reading = await Reading().read(client.inference.StreamChat(request()))
    assert reading.tokens == {0: whole()}
    assert reading.nodes == [primary.node_id, backup.node_id]
    assert client.value("failovers_total", cause="protocol") == 1


async def test_a_single_node_that_dies_and_comes_back_finishes_the_answer(
    start_node: Any, start_router: Any, until: Any
) -> None:
    node = await start_node("a")
    client = await start_router(node)
    node.die_at = 4
    stream = asyncio.create_task(Reading().read(client.inference.StreamChat(request())))
    await until(lambda: node.die_at is None and client.value("link_up", node_id="a") == 0)
    await node.start()
    reading = await stream
    assert reading.tokens == {0: whole()}
    assert [submit.attempt for submit in node.submits] == [0, 1]


async def test_without_any_node_for_too_long_the_stream_ends_as_no_nodes(start_node: Any, start_router: Any) -> None:
    node = await start_node("a")
    client = await start_router(node, failover_wait_s=0.3)
    node.die_at = 4
    with pytest.raises(grpc.aio.AioRpcError) as failure:
        await Reading().read(client.inference.StreamChat(request()))
    error = error_from_rpc(failure.value)
    assert (error.code, error.reason) == (Code.UNAVAILABLE, "NO_NODES")
    assert error.retry_after_s == 1.0
    assert client.value("failovers_exhausted_total", cause="link_lost") == 1


async def test_a_node_that_loses_its_ranks_loses_its_generations(pair: Any) -> None:
    client, primary, backup = pair
    reading = Reading()
    async for response in client.inference.StreamChat(request(200)):
        reading._add(response.event)
        if len(reading.tokens.get(0, [])) >= 5:
            primary.state = worker.NODE_STATE_RECOVERING
    assert reading.tokens == {0: whole(200)}
    assert reading.nodes == [primary.node_id, backup.node_id]
    assert client.value("failovers_total", cause="node_state") == 1


async def test_a_clients_error_ends_the_generation_at_once_and_blames_no_node(pair: Any) -> None:
    client, primary, backup = pair
    primary.refuse = RyzansteinError("too long", Code.INVALID_ARGUMENT, "CONTEXT_TOO_LONG", {"prompt_tokens": "9"})
    before = len(backup.submits)
    for _ in range(5):
        with pytest.raises(grpc.aio.AioRpcError) as failure:
            await Reading().read(client.inference.StreamChat(request()))
        error = error_from_rpc(failure.value)
        assert (error.code, error.reason, error.metadata) == (Code.INVALID_ARGUMENT, "CONTEXT_TOO_LONG", {"prompt_tokens": "9"})
    assert len(backup.submits) == before
    assert client.value("breaker_state", node_id=primary.node_id) == 0


async def test_back_pressure_goes_to_the_next_node_and_blames_none(pair: Any) -> None:
    client, primary, backup = pair
    primary.refuse = RyzansteinError("full", Code.RESOURCE_EXHAUSTED, "QUEUE_FULL")
    for _ in range(5):
        reading = await Reading().read(client.inference.StreamChat(request()))
        assert reading.nodes == [backup.node_id]
    assert client.value("breaker_state", node_id=primary.node_id) == 0


async def test_back_pressure_of_all_nodes_is_reported_at_once(pair: Any) -> None:
    client, primary, backup = pair
    for node in (primary, backup):
        node.refuse = RyzansteinError("full", Code.RESOURCE_EXHAUSTED, "QUEUE_FULL")
    with pytest.raises(grpc.aio.AioRpcError) as failure:
        await Reading().read(client.inference.StreamChat(request()))
    error = error_from_rpc(failure.value)
    assert (error.code, error.reason, error.retry_after_s) == (Code.RESOURCE_EXHAUSTED, "QUEUE_FULL", 1.0)


async def test_a_deadline_that_a_nodes_queue_cannot_meet_is_tried_on_another_node(pair: Any) -> None:
    client, primary, backup = pair
    primary.refuse = errors.deadline_unreachable(2.0, 1.0, 1.25)
    reading = await Reading().read(client.inference.StreamChat(request()))
    assert reading.nodes == [backup.node_id]
    assert client.value("breaker_state", node_id=primary.node_id) == 0
    backup.refuse = errors.deadline_unreachable(3.0, 1.0, 2.25)
    with pytest.raises(grpc.aio.AioRpcError) as failure:
        await Reading().read(client.inference.StreamChat(request()))
    error = error_from_rpc(failure.value)
    assert (error.code, error.reason, error.retry_after_s) == (Code.DEADLINE_EXCEEDED, "DEADLINE_UNREACHABLE", 2.25)


async def test_a_request_that_every_node_fails_on_is_given_up_after_some_attempts(pair: Any) -> None:
    client, primary, backup = pair
    for node in (primary, backup):
        node.refuse, node.refuse_node_fault = RyzansteinError("rank died", Code.INTERNAL, "RANK_DIED"), True
    with pytest.raises(grpc.aio.AioRpcError) as failure:
        await Reading().read(client.inference.StreamChat(request()))
    assert error_from_rpc(failure.value).code is Code.INTERNAL
    assert len(primary.submits) + len(backup.submits) <= 1 + 5


CONSTRAINED = {"constraint": inference.Constraint(regex="[0-9]+")}


async def test_a_constraint_goes_only_to_nodes_that_enforce_it(start_node: Any, start_router: Any) -> None:
    old, new = await start_node("old"), await start_node("new")
    old.features = ()
    client = await start_router(old, new)
    for session in "abcdef":
        reading = await Reading().read(client.inference.StreamChat(request(session_id=session, **CONSTRAINED)))
        assert reading.nodes == ["new"]
    assert old.submits == []
    assert new.submits[-1].sampling.constraint.regex == "[0-9]+"


async def test_a_constraint_that_no_node_enforces_is_refused_at_once(start_node: Any, start_router: Any) -> None:
    node = await start_node("old")
    node.features = ()
    client = await start_router(node)
    with pytest.raises(grpc.aio.AioRpcError) as failure:
        await Reading().read(client.inference.StreamChat(request(**CONSTRAINED)))
    error = error_from_rpc(failure.value)
    assert (error.code, error.reason) == (Code.FAILED_PRECONDITION, "CONSTRAINTS_UNSUPPORTED")
    assert node.submits == []
    assert client.value("failovers_exhausted_total", cause="constraints_unsupported") == 1
    assert (await Reading().read(client.inference.StreamChat(request()))).tokens == {0: whole()}


async def test_a_constraint_that_fails_on_two_nodes_is_the_requests_fault(pair: Any) -> None:
    client, primary, backup = pair
    for node in (primary, backup):
        node.refuse = errors.constraint_failed("the constraint became too complex")
    with pytest.raises(grpc.aio.AioRpcError) as failure:
        await Reading().read(client.inference.StreamChat(request(**CONSTRAINED)))
    assert error_from_rpc(failure.value).reason == "CONSTRAINT_FAILED"
    for node in (primary, backup):
        assert client.value("breaker_state", node_id=node.node_id) == 0
