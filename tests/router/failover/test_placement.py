"""How long a generation waits for a node, and whose failures are held against it."""

from __future__ import annotations

import asyncio
import time
from typing import Any

import grpc
import pytest

from ryzanstein import errors
from ryzanstein.cluster import NO_MODEL
from ryzanstein.errors import Code, RyzansteinError
from ryzanstein.rpc.status import error_from_rpc
from ryzanstein.v1 import inference_pb2 as inference
from ryzanstein.v1 import worker_pb2 as worker

pytestmark = pytest.mark.long

WAIT_S = 1.0


def request(tokens: int, session_id: str = "s") -> inference.StreamChatRequest:
    chat = inference.ChatRequest(
        messages=[inference.Message(role="ROLE_USER", content="hello")],
        sampling=inference.SamplingParams(max_tokens=tokens),
        session_id=session_id,
    )
    return inference.StreamChatRequest(chat=chat)


class Reading:
    """A stream that is being read: the tokens so far, without a gap, and the nodes that gave them."""

    def __init__(self, client: Any, tokens: int, session_id: str = "s") -> None:
        self.tokens: list[int] = []
        self.nodes: list[str] = []
        self.generation_id = ""
        self.took_s = 0.0
        self._stream = client.inference.StreamChat(request(tokens, session_id))
        self.task = asyncio.create_task(self._read())

    async def _read(self) -> None:
        began = time.monotonic()
        try:
            async for response in self._stream:
                self._take(response.event)
        finally:
            self.took_s = time.monotonic() - began

    def _take(self, event: inference.GenerationEvent) -> None:
        if event.HasField("started"):
            self.generation_id = event.started.generation_id
        elif event.HasField("delta"):
            assert event.delta.first_index == len(self.tokens), "a gap or a repeat"
            self.tokens.extend(event.delta.token_ids)
            self.nodes += [event.delta.node_id] * (event.delta.node_id not in self.nodes)

    async def failure(self) -> RyzansteinError:
        with pytest.raises(grpc.aio.AioRpcError) as failed:
            await self.task
        return error_from_rpc(failed.value)


def whole(tokens: int) -> list[int]:
    return [1000 + index for index in range(tokens)]


async def primary_first(client: Any, nodes: list[Any]) -> list[Any]:
    reading = Reading(client, 1)
    await reading.task
    return sorted(nodes, key=lambda node: node.node_id not in reading.nodes)


@pytest.mark.parametrize("num_nodes", [1, 3])
async def test_an_answer_that_is_older_than_the_wait_survives_the_loss_of_all_ranks_at_once(
    start_node: Any, start_router: Any, until: Any, num_nodes: int
) -> None:
    nodes = [await start_node(name, step_s=0.02) for name in "abc"[:num_nodes]]
    client = await start_router(*nodes, failover_wait_s=WAIT_S)
    reading = Reading(client, 120)
    await until(lambda: len(reading.tokens) >= 5)
    await asyncio.sleep(1.3 * WAIT_S)
    for node in nodes:
        node.ranks_lost = True
    await asyncio.sleep(0.4 * WAIT_S)
    for node in nodes:
        node.ranks_lost = False
    await reading.task
    assert reading.tokens == whole(120)
    assert client.value("failovers_exhausted_total", cause="node_fault") == 0


async def test_an_old_answer_is_given_up_after_the_whole_wait_without_a_node(
    start_node: Any, start_router: Any, until: Any
) -> None:
    node = await start_node("a", step_s=0.02)
    client = await start_router(node, failover_wait_s=WAIT_S)
    reading = Reading(client, 1000)
    await until(lambda: len(reading.tokens) >= 5)
    await asyncio.sleep(1.3 * WAIT_S)
    node.ranks_lost = True
    struck = time.monotonic()
    error = await reading.failure()
    assert time.monotonic() - struck >= WAIT_S
    assert (error.code, error.reason, error.retry_after_s) == (Code.UNAVAILABLE, "NO_NODES", 1.0)
    assert error.metadata["cause"] in ("node_fault", "node_state"), "whichever of the node's frames came first"


async def test_a_begun_answer_waits_for_room_however_often_it_is_refused(
    start_node: Any, start_router: Any, until: Any
) -> None:
    nodes = [await start_node(name, step_s=0.02) for name in "ab"]
    client = await start_router(*nodes, failover_wait_s=WAIT_S)
    primary, backup = await primary_first(client, nodes)
    reading = Reading(client, 60)
    await until(lambda: len(reading.tokens) >= 5)
    backup.refuse = RyzansteinError("full", Code.RESOURCE_EXHAUSTED, "QUEUE_FULL", retry_after_s=0.3)
    await primary.die()
    await asyncio.sleep(2.5 * WAIT_S)
    assert not reading.task.done()
    assert len(backup.submits) <= 12, "as often as the node asked for"
    backup.refuse = None
    await reading.task
    assert reading.tokens == whole(60)
    assert client.value("breaker_state", node_id=backup.node_id) == 0


@pytest.mark.parametrize("num_nodes", [1, 2])
async def test_a_begun_answer_outlasts_a_lack_of_memory(start_node: Any, start_router: Any, until: Any, num_nodes: int) -> None:
    nodes = [await start_node(name, step_s=0.02) for name in "ab"[:num_nodes]]
    client = await start_router(*nodes, failover_wait_s=WAIT_S)
    reading = Reading(client, 60)
    await until(lambda: len(reading.tokens) >= 5)
    for node in nodes:
        node.refuse = RyzansteinError("no memory", Code.RESOURCE_EXHAUSTED, errors.OUT_OF_MEMORY, retry_after_s=0.3)
    primary = next(node for node in nodes if node.node_id in reading.nodes)
    await primary.die()
    await primary.start()
    await asyncio.sleep(0.5)
    for node in nodes:
        node.refuse = None
    await reading.task
    assert reading.tokens == whole(60)


async def test_a_begun_answer_ends_with_its_error_when_memory_stays_short(
    start_node: Any, start_router: Any, until: Any
) -> None:
    nodes = [await start_node(name, step_s=0.02) for name in "ab"]
    client = await start_router(*nodes, failover_wait_s=60.0, tuning={"max_fruitless_attempts": 3})
    reading = Reading(client, 60)
    await until(lambda: len(reading.tokens) >= 5)
    before = sum(len(node.submits) for node in nodes)
    for node in nodes:
        node.refuse = RyzansteinError("no memory", Code.RESOURCE_EXHAUSTED, errors.OUT_OF_MEMORY, retry_after_s=0.1)
    primary = next(node for node in nodes if node.node_id in reading.nodes)
    await primary.die()
    await primary.start()
    error = await reading.failure()
    assert (error.code, error.reason) == (Code.RESOURCE_EXHAUSTED, errors.OUT_OF_MEMORY)
    assert 2 <= sum(len(node.submits) for node in nodes) - before <= 4
    assert client.value("failovers_exhausted_total", cause="request_fault") == 1


async def test_faults_of_a_request_are_counted_anew_after_each_token(start_node: Any, start_router: Any, until: Any) -> None:
    """One node could not run it at its beginning and another one much later: they do not agree."""
    nodes = [await start_node(name, step_s=0.02) for name in "abc"]
    client = await start_router(*nodes, failover_wait_s=60.0)
    primary = (await primary_first(client, nodes))[0]
    not_finite = RyzansteinError("not finite", Code.INTERNAL, errors.LOGITS_NOT_FINITE)
    primary.refuse = not_finite
    reading = Reading(client, 60)
    await until(lambda: len(reading.tokens) >= 5)
    second = next(node for node in nodes if node.node_id in reading.nodes)
    (third,) = (node for node in nodes if node not in (primary, second))
    primary.refuse, second.refuse = None, not_finite
    third.refuse = RyzansteinError("full", Code.RESOURCE_EXHAUSTED, "QUEUE_FULL", retry_after_s=0.1)
    await second.die()
    await second.start()
    await until(lambda: client.value("link_up", node_id=second.node_id) == 1 and primary.node_id in reading.nodes)
    before = len(second.submits)
    await primary.die()
    await until(lambda: len(second.submits) > before)
    third.refuse = None
    await reading.task
    assert reading.tokens == whole(60)
    assert reading.nodes == [second.node_id, primary.node_id, third.node_id]


async def test_a_request_that_comes_while_the_only_node_recovers_waits_for_it(
    start_node: Any, start_router: Any, until: Any
) -> None:
    """The node's word that it is not ready and its beat that says so travel apart."""
    node = await start_node("a")
    client = await start_router(node)
    node.refuse = RyzansteinError("recovers", Code.UNAVAILABLE, "NODE_NOT_READY")
    reading = Reading(client, 8)
    await until(lambda: len(node.submits) >= 2)
    node.refuse = None
    await reading.task
    assert reading.tokens == whole(8)


async def test_a_request_that_kills_whoever_runs_it_ends_and_does_not_ask_to_be_sent_again(
    start_node: Any, start_router: Any
) -> None:
    nodes = [await start_node(name) for name in "ab"]
    client = await start_router(*nodes, tuning={"max_fruitless_attempts": 3})
    keep_alive = [asyncio.create_task(_restarted_whenever_dead(node)) for node in nodes]
    error = await Reading(client, 8).failure()
    for task in keep_alive:
        task.cancel()
    assert (error.code, error.reason, error.retry_after_s) == (Code.INTERNAL, "ATTEMPTS_EXHAUSTED", None)
    submits = sum(len(node.submits) for node in nodes)
    assert 3 <= submits <= 6, "an attempt that was not even accepted counts half"
    assert error.metadata["attempts"] == str(submits)


async def _restarted_whenever_dead(node: Any) -> None:
    while True:
        node.die_at = 0
        await asyncio.sleep(0.02)
        if node._server is None:
            await node.start()


async def test_fruitless_attempts_are_counted_anew_after_each_token(start_node: Any, start_router: Any, until: Any) -> None:
    node = await start_node("a")
    client = await start_router(node, tuning={"max_fruitless_attempts": 2})
    reading = Reading(client, 8)
    for index in range(1, 8):
        node.die_at = index
        await until(lambda: node.die_at is None and node._server is None)
        await node.start()
    await reading.task
    assert reading.tokens == whole(8)


async def test_a_hedge_that_is_refused_leaves_the_answer_to_the_healthy_attempt(
    start_node: Any, start_router: Any, until: Any
) -> None:
    nodes = [await start_node(name, step_s=0.01) for name in "ab"]
    client = await start_router(*nodes, tuning={"suspicion": {"grace_s": 60.0}})
    primary, backup = await primary_first(client, nodes)
    backup.refuse = RyzansteinError("too long", Code.INVALID_ARGUMENT, "CONTEXT_TOO_LONG", {"context_length": "8"})
    reading = Reading(client, 60)
    await until(lambda: len(reading.tokens) >= 5)
    primary.frozen = True
    await until(lambda: client.value("hedges_total", outcome="lost") == 1)
    primary.frozen = False
    await reading.task
    assert reading.tokens == whole(60)
    assert reading.nodes == [primary.node_id]
    assert client.value("breaker_state", node_id=backup.node_id) == 0


async def test_what_was_accepted_once_is_no_clients_mistake_when_the_last_node_cannot_hold_it(
    start_node: Any, start_router: Any, until: Any
) -> None:
    nodes = [await start_node(name, step_s=0.01) for name in "ab"]
    client = await start_router(*nodes, failover_wait_s=WAIT_S)
    primary, small = await primary_first(client, nodes)
    small.refuse = RyzansteinError("too long", Code.INVALID_ARGUMENT, "CONTEXT_TOO_LONG", {"context_length": "8"})
    reading = Reading(client, 60)
    await until(lambda: len(reading.tokens) >= 5)
    asked = len(small.submits)
    await primary.die()
    error = await reading.failure()
    assert (error.code, error.reason, error.metadata["cause"]) == (Code.UNAVAILABLE, "NO_NODES", "refused")
    assert error.retry_after_s is not None
    assert len(small.submits) == asked + 1, "it is not asked again"


async def test_a_node_with_too_small_a_context_leaves_the_request_to_a_larger_one(start_node: Any, start_router: Any) -> None:
    nodes = [await start_node(name) for name in "ab"]
    client = await start_router(*nodes)
    primary, large = await primary_first(client, nodes)
    large.context_length = 2 * primary.context_length
    too_long = RyzansteinError("too long", Code.INVALID_ARGUMENT, "CONTEXT_TOO_LONG", {"context_length": "4096"})
    primary.refuse = too_long
    await asyncio.sleep(0.6)  # an idle node's next beat
    reading = Reading(client, 8)
    await reading.task
    assert (reading.tokens, reading.nodes) == (whole(8), [large.node_id])
    large.refuse = too_long
    assert (await Reading(client, 8).failure()).reason == "CONTEXT_TOO_LONG"


async def small_and_large(start_node: Any, start_router: Any, large_context: int = 8192) -> tuple[Any, Any, Any]:
    """A client, a node that refuses the request as too long, and one that has its ranks no more."""
    small, large = [await start_node(name) for name in ("small", "large")]
    large.context_length = large_context
    client = await start_router(small, large, failover_wait_s=WAIT_S)
    small.refuse = RyzansteinError("too long", Code.INVALID_ARGUMENT, "CONTEXT_TOO_LONG", {"context_length": "4096"})
    large.state, large.context_length = worker.NODE_STATE_RECOVERING, 0
    await asyncio.sleep(0.6)  # an idle node's next beat
    return client, small, large


async def test_a_node_with_a_larger_context_is_waited_for_while_its_ranks_restart(start_node: Any, start_router: Any) -> None:
    client, _, large = await small_and_large(start_node, start_router)
    reading = Reading(client, 8)
    await asyncio.sleep(WAIT_S / 2)
    large.state, large.context_length = worker.NODE_STATE_READY, 8192
    await reading.task
    assert (reading.tokens, reading.nodes) == (whole(8), ["large"])


async def test_a_request_that_only_a_lost_node_could_hold_may_be_sent_again(start_node: Any, start_router: Any) -> None:
    client, _, large = await small_and_large(start_node, start_router)
    await large.die()
    error = await Reading(client, 8).failure()
    assert (error.code, error.reason, error.metadata["cause"]) == (Code.UNAVAILABLE, "NO_NODES", "refused")
    assert error.retry_after_s is not None


async def test_the_only_node_that_could_hold_it_leaves_while_the_request_waits(
    start_node: Any, start_router: Any, until: Any
) -> None:
    client, small, large = await small_and_large(start_node, start_router)
    reading = Reading(client, 8)
    await until(lambda: bool(small.submits))
    await asyncio.sleep(WAIT_S / 4)  # its refusal arrives
    await large.die()
    await until(lambda: not client.router.links.members.get("large"))
    client.router.linker.follow([small.address])  # its lease expired
    error = await reading.failure()
    assert (error.code, error.reason, error.metadata["cause"]) == (Code.UNAVAILABLE, "NO_NODES", "refused")


async def test_a_node_that_starts_and_does_not_come_leaves_the_refusal_standing(start_node: Any, start_router: Any) -> None:
    small, starting = [await start_node(name) for name in ("small", "starting")]
    starting.state, starting.context_length = worker.NODE_STATE_STARTING, 0
    client = await start_router(small, starting, ready_nodes=1, failover_wait_s=WAIT_S)
    small.refuse = RyzansteinError("too long", Code.INVALID_ARGUMENT, "CONTEXT_TOO_LONG", {"context_length": "4096"})
    began = time.monotonic()
    error = await Reading(client, 8).failure()
    assert (error.code, error.reason) == (Code.INVALID_ARGUMENT, "CONTEXT_TOO_LONG")
    assert time.monotonic() - began >= WAIT_S / 2


async def test_a_node_without_a_model_is_not_waited_for(start_node: Any, start_router: Any) -> None:
    small, empty = [await start_node(name) for name in ("small", "empty")]
    empty.state, empty.context_length, empty.model, empty.reason = worker.NODE_STATE_STARTING, 0, "", NO_MODEL
    client = await start_router(small, empty, ready_nodes=1, failover_wait_s=60.0)
    small.refuse = RyzansteinError("too long", Code.INVALID_ARGUMENT, "CONTEXT_TOO_LONG", {"context_length": "4096"})
    async with asyncio.timeout(30):
        error = await Reading(client, 8).failure()
    assert (error.code, error.reason) == (Code.INVALID_ARGUMENT, "CONTEXT_TOO_LONG")


async def test_a_model_that_is_unloaded_is_not_held_against_the_request(start_node: Any, start_router: Any, until: Any) -> None:
    nodes = [await start_node(name, step_s=0.01) for name in "ab"]
    client = await start_router(*nodes, tuning={"max_fruitless_attempts": 1})
    primary, backup = await primary_first(client, nodes)
    primary.freeze_at = 0
    reading = Reading(client, 8)
    await until(lambda: primary.num_running == 1 and bool(reading.generation_id))
    primary.state = worker.NODE_STATE_STARTING
    await reading.task
    assert (reading.tokens, reading.nodes) == (whole(8), [backup.node_id])


BY_OPERATOR = "draining: requested by an operator"


async def drain(client: Any, until: Any, node: Any, reason: str = BY_OPERATOR) -> None:
    node.state, node.reason = worker.NODE_STATE_DRAINING, reason
    await until(lambda: {view.node_id: view.state for view in client.router.links.snapshot()}[node.node_id] == node.state)


async def test_a_new_request_fails_at_once_when_all_nodes_were_taken_out_of_service(
    start_node: Any, start_router: Any, until: Any
) -> None:
    nodes = [await start_node(name) for name in "ab"]
    client = await start_router(*nodes, failover_wait_s=60.0)
    for node in nodes:
        await drain(client, until, node)
    reading = Reading(client, 3)
    error = await reading.failure()
    assert (error.code, error.reason, error.metadata["cause"]) == (Code.UNAVAILABLE, "NO_NODES", "draining")
    assert "all its nodes are draining (a, b)" in error.message
    assert reading.took_s < 10.0


@pytest.mark.parametrize(
    "reason", ["draining: the node stops", "draining: requested by an operator, the node stops", "draining: the model changes"]
)
async def test_a_node_that_stops_or_changes_its_model_is_waited_for(
    start_node: Any, start_router: Any, until: Any, reason: str
) -> None:
    first, second = [await start_node(name) for name in "ab"]
    client = await start_router(first, second, failover_wait_s=60.0)
    await drain(client, until, first)
    await drain(client, until, second, reason)
    reading = Reading(client, 3)
    await asyncio.sleep(0.3)
    assert not reading.task.done()
    second.state, second.reason = worker.NODE_STATE_READY, ""
    await reading.task
    assert reading.tokens == whole(3)


async def test_a_node_that_is_away_is_waited_for_while_the_others_drain(start_node: Any, start_router: Any, until: Any) -> None:
    drained, away = [await start_node(name) for name in "ab"]
    client = await start_router(drained, away, failover_wait_s=60.0)
    await drain(client, until, drained)
    await away.die()
    await until(lambda: client.value("link_up", node_id="b") == 0)
    reading = Reading(client, 3)
    await asyncio.sleep(0.3)
    assert not reading.task.done()
    await away.start()
    await reading.task
    assert reading.tokens == whole(3)


async def test_what_has_begun_waits_also_when_only_nodes_that_drain_are_left(
    start_node: Any, start_router: Any, until: Any
) -> None:
    nodes = [await start_node(name, step_s=0.02) for name in "ab"]
    client = await start_router(*nodes, failover_wait_s=60.0)
    primary, other = await primary_first(client, nodes)
    reading = Reading(client, 100)
    await until(lambda: len(reading.tokens) >= 5)
    await drain(client, until, other)
    primary.state, primary.reason = worker.NODE_STATE_DRAINING, BY_OPERATOR
    primary.ranks_lost = True
    await until(lambda: client.value("link_up", node_id=primary.node_id) == 1)
    await asyncio.sleep(0.3)
    assert not reading.task.done()
    other.state, other.reason = worker.NODE_STATE_READY, ""
    await reading.task
    assert reading.tokens == whole(100)
