"""What ended for want of nodes and asks to try again goes on where it ended when its client comes back."""

from __future__ import annotations

import asyncio
import time
from typing import Any

import grpc
import pytest

from ryzanstein.errors import Code, RyzansteinError
from ryzanstein.rpc.status import error_from_rpc
from ryzanstein.v1 import inference_pb2 as inference

pytestmark = pytest.mark.long

TOKENS = 60
WAIT_S = 0.3


class Reader:
    """A client with all that it has seen of one generation. A lost or repeated token fails the test."""

    def __init__(self, client: Any) -> None:
        self.inference = client.inference
        self.generation_id = ""
        self.tokens: list[int] = []
        self.finished = 0

    async def ask(self, tokens: int = TOKENS, session_id: str = "", timeout_s: float | None = None) -> None:
        chat = inference.ChatRequest(
            messages=[inference.Message(role="ROLE_USER", content="hello")],
            sampling=inference.SamplingParams(max_tokens=tokens),
            session_id=session_id,
        )
        await self._read(self.inference.StreamChat(inference.StreamChatRequest(chat=chat), timeout=timeout_s))

    async def come_back(self) -> None:
        request = inference.AttachGenerationRequest(generation_id=self.generation_id, from_index={0: len(self.tokens)})
        await self._read(self.inference.AttachGeneration(request))

    async def _read(self, stream: Any) -> None:
        async for response in stream:
            event = response.event
            if event.HasField("started"):
                self.generation_id = event.started.generation_id
            elif event.HasField("delta"):
                assert event.delta.first_index == len(self.tokens), "a gap or a repeat"
                self.tokens.extend(event.delta.token_ids)
            else:
                self.finished += 1


async def refused(call: Any) -> RyzansteinError:
    with pytest.raises(grpc.aio.AioRpcError) as failure:
        await call
    return error_from_rpc(failure.value)


def whole(tokens: int = TOKENS) -> list[int]:
    return [1000 + index for index in range(tokens)]


@pytest.fixture
async def node(start_node: Any) -> Any:
    return await start_node("a", step_s=0.01)


async def left_without_a_node(client: Any, node: Any, **asked: Any) -> Reader:
    """A reader whose generation has ended after seven tokens because its node died."""
    reader = Reader(client)
    node.die_at = 7
    error = await refused(reader.ask(**asked))
    assert (error.code, error.reason, error.retry_after_s) == (Code.UNAVAILABLE, "NO_NODES", 1.0)
    assert reader.tokens == whole(7)
    return reader


async def back(node: Any, client: Any) -> None:
    """The node serves again."""
    await node.start()
    async with asyncio.timeout(10):
        while not client.value("link_up", node_id="a"):  # noqa: ASYNC110 - a metric tells nobody
            await asyncio.sleep(0.01)


async def test_it_goes_on_where_it_ended(node: Any, start_router: Any) -> None:
    client = await start_router(node, failover_wait_s=WAIT_S)
    reader = await left_without_a_node(client, node)
    assert (await refused(reader.come_back())).reason == "NO_NODES", "there is none yet"
    await back(node, client)
    readers = [reader, Reader(client)]
    readers[1].generation_id = reader.generation_id
    await asyncio.gather(*(each.come_back() for each in readers))
    assert [each.tokens for each in readers] == [whole()] * 2
    assert [each.finished for each in readers] == [1, 1]
    assert [submit.attempt for submit in node.submits] == [0, 1], "one run for both, above the earlier attempt"
    assert client.value("generations_running") == client.value("generations_waiting") == 0


async def test_a_turn_is_stored_once_when_the_answer_was_ended_and_resumed(node: Any, start_router: Any) -> None:
    client = await start_router(node, failover_wait_s=WAIT_S)
    reader = await left_without_a_node(client, node, session_id="s")
    await back(node, client)
    await reader.come_back()
    assert reader.tokens == whole()
    await reader.come_back()
    session = await client.sessions.GetSession(inference.GetSessionRequest(session_id="s"))
    assert [message.role for message in session.session.messages] == [inference.ROLE_USER, inference.ROLE_ASSISTANT]
    assert len(node.submits) == 2


async def test_a_session_in_which_somebody_speaks_asks_to_come_back_later(node: Any, start_router: Any, until: Any) -> None:
    client = await start_router(node, failover_wait_s=WAIT_S)
    reader = await left_without_a_node(client, node, session_id="s")
    await back(node, client)
    other = asyncio.create_task(Reader(client).ask(100, session_id="s"))
    await until(lambda: node.num_running == 1)
    error = await refused(reader.come_back())
    assert (error.code, error.reason, error.retry_after_s) == (Code.ABORTED, "SESSION_BUSY", 1.0)
    await other
    await reader.come_back()
    assert reader.tokens == whole()


async def test_a_full_router_asks_to_come_back_later(node: Any, start_router: Any, until: Any) -> None:
    client = await start_router(node, failover_wait_s=WAIT_S, max_running=1, reattach_window_s=0.8)
    reader = await left_without_a_node(client, node)
    await back(node, client)
    other = asyncio.create_task(Reader(client).ask(200))
    await until(lambda: node.num_running == 1)
    refusals = 0
    while True:
        try:
            await reader.come_back()
            break
        except grpc.aio.AioRpcError as failure:
            error = error_from_rpc(failure)
            assert (error.code, error.reason) == (Code.RESOURCE_EXHAUSTED, "QUEUE_FULL")
            assert error.retry_after_s is not None
            refusals += 1
        await asyncio.sleep(0.2)
    await other
    assert refusals >= 5, "longer than the window to come back, which begins anew each time"
    assert reader.tokens == whole()


async def test_the_deadline_ends_it_for_good(node: Any, start_router: Any) -> None:
    client = await start_router(node, failover_wait_s=WAIT_S)
    began = time.monotonic()
    reader = await left_without_a_node(client, node, timeout_s=2.0)
    await node.start()
    await asyncio.sleep(2.1 - (time.monotonic() - began))
    for _ in range(2):
        error = await refused(reader.come_back())
        assert (error.code, error.retry_after_s) == (Code.DEADLINE_EXCEEDED, None)
    assert len(node.submits) == 1


async def test_what_nobody_comes_back_for_is_forgotten(node: Any, start_router: Any) -> None:
    client = await start_router(node, failover_wait_s=WAIT_S, reattach_window_s=0.2)
    reader = await left_without_a_node(client, node)
    await node.start()
    await asyncio.sleep(0.5)
    assert (await refused(reader.come_back())).reason == "GENERATION_NOT_FOUND"


async def test_what_does_not_ask_to_be_tried_again_is_not(node: Any, start_router: Any) -> None:
    client = await start_router(node, tuning={"max_fruitless_attempts": 1})
    node.freeze_at = 0
    reader = Reader(client)
    asking = asyncio.create_task(refused(reader.ask()))
    async with asyncio.timeout(10):
        while not reader.generation_id:  # noqa: ASYNC110 - the reader tells nobody
            await asyncio.sleep(0.01)
    node.ranks_lost = True
    reported = await asking
    assert (reported.reason, reported.retry_after_s) == ("ATTEMPTS_EXHAUSTED", None)
    node.ranks_lost, node.freeze_at = False, None
    again = await refused(reader.come_back())
    assert (again.reason, again.message) == (reported.reason, reported.message)
    assert len(node.submits) == 1


async def test_the_first_reader_gets_a_refusal_that_came_before_it(node: Any, start_router: Any) -> None:
    client = await start_router(node)
    node.refuse = RyzansteinError("full", Code.RESOURCE_EXHAUSTED, "QUEUE_FULL")
    for _ in range(20):
        assert (await refused(Reader(client).ask())).reason == "QUEUE_FULL"
    assert len(node.submits) == 20
