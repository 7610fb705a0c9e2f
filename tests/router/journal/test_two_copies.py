"""A generation that two routers know, and what a reader or a new turn at either of them may rely on."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import Awaitable, Callable
from functools import partial
from pathlib import Path
from typing import Any

import grpc
import pytest

from ryzanstein.generation.tokens import FinishReason, Token
from ryzanstein.router.generations.token_log import AppendResult
from ryzanstein.router.journal.journal import JournalUnavailableError
from ryzanstein.rpc.status import error_from_rpc
from ryzanstein.v1 import inference_pb2 as inference

pytestmark = pytest.mark.long


class Client:
    """One generation as its client sees it, at any router. A lost or repeated token fails the test."""

    def __init__(self) -> None:
        self.generation_id = ""
        self.tokens: list[int] = []
        self.reason = 0
        self.stream: Any = None

    def ask(self, router: Any, tokens: int = 4000, text: str = "hello", session_id: str = "s", key: str = "") -> Client:
        self.stream = router.inference.StreamChat(inference.StreamChatRequest(chat=chat(tokens, text, session_id, key)))
        return self

    def attach(self, router: Any, **from_index: int) -> Client:
        wanted = {int(choice[1:]): index for choice, index in from_index.items()} or {0: len(self.tokens)}
        request = inference.AttachGenerationRequest(generation_id=self.generation_id, from_index=wanted)
        self.stream = router.inference.AttachGeneration(request, timeout=60)
        return self

    async def read(self, until_tokens: int | None = None) -> Client:
        while until_tokens is None or not self.generation_id or len(self.tokens) < until_tokens:
            response = await self.stream.read()
            if response is grpc.aio.EOF:
                break
            event = response.event
            if event.HasField("started"):
                self.generation_id = event.started.generation_id
            elif event.HasField("delta"):
                assert event.delta.first_index == len(self.tokens)
                self.tokens += event.delta.token_ids
            else:
                self.reason = event.finished.finish_reason
        return self


def chat(tokens: int = 4000, text: str = "hello", session_id: str = "s", key: str = "") -> inference.ChatRequest:
    return inference.ChatRequest(
        messages=[inference.Message(role=inference.ROLE_USER, content=text)],
        sampling=inference.SamplingParams(max_tokens=tokens),
        session_id=session_id,
        request_id=key,
    )


async def reason(call: Awaitable[Any]) -> str:
    """Why a call was refused; empty: it was not."""
    try:
        await call
    except grpc.aio.AioRpcError as failure:
        return error_from_rpc(failure).reason
    return ""


async def lengths(router: Any, session_id: str = "s") -> list[int]:
    """How many words each message of the session has: a scripted node says one per token."""
    session = (await router.sessions.GetSession(inference.GetSessionRequest(session_id=session_id))).session
    return [len(message.content.split()) for message in session.messages]


@pytest.fixture
async def node(start_node: Any) -> Any:
    return await start_node("a", step_s=0.01)


@pytest.fixture
def start(node: Any, start_router: Any, tmp_path: Path) -> Callable[..., Awaitable[Any]]:
    """Starts a router of one SQLite file."""

    async def start(name: str, **settings: Any) -> Any:
        shared = {"session_store": "sqlite", "session_dir": tmp_path, "tuning": {"store": {"wait_s": 5.0}}}
        return await start_router(node, router_id=name, state_dir=tmp_path / name, **shared, **settings)

    return start


@pytest.mark.parametrize("then", ["window", "turn"])
async def test_a_paused_copy_is_dropped_when_another_router_has_gone_on(node: Any, start: Any, until: Any, then: str) -> None:
    """The router was cut off from its clients and from the journal; it must neither store nor answer in that session."""
    times = {"unread_grace_s": 0.3, "reattach_window_s": 2.5 if then == "window" else 30.0, "lease_s": 1.0}
    first, second = await start("first", **times), await start("second", **times)
    client = await Client().ask(first, 600).read(5)
    journal = first.router.core._cluster.journal
    write, renew = journal.write, journal.renew

    async def cut_off(*_: Any) -> Any:
        raise JournalUnavailableError("cut off")

    journal.write = journal.renew = cut_off
    client.stream.cancel()
    await asyncio.gather(first.server.stop(0), first.peers.stop(0))
    await until(lambda: first.value("generations_paused_total") == 1)
    reading = asyncio.create_task(client.attach(second).read())
    await until(lambda: second.value("generations_taken_over_total", cause="unreachable") == 1)
    journal.write, journal.renew = write, renew
    await until(lambda: first.value("generations_moved_total") == 1)
    assert first.value("generations_retained") == first.value("generations_running") == 0
    if then == "turn":
        assert await reason(Client().ask(second, 2, "again").read()) == "SESSION_BUSY", "its reader is at the second router"
    else:
        await asyncio.sleep(3)
    node.step_s = 0.001
    await reading
    assert (len(client.tokens), client.reason) == (600, inference.FINISH_REASON_LENGTH)
    assert await lengths(second) == [1, 600]


async def test_what_is_read_again_stays_known_to_every_router_and_under_its_key(start: Any) -> None:
    times = {"unread_grace_s": 0.3, "reattach_window_s": 0.8, "lease_s": 0.5}
    first, second = await start("first", **times), await start("second", **times)
    client = await Client().ask(first, 20, key="k").read()
    for _ in range(4):
        await asyncio.sleep(0.6)
        again = Client()
        again.generation_id = client.generation_id
        assert len((await again.attach(first).read()).tokens) == 20
    elsewhere = Client()
    elsewhere.generation_id = client.generation_id
    assert len((await elsewhere.attach(second).read()).tokens) == 20
    resent = await Client().ask(second, 20, key="k").read()
    assert resent.generation_id == client.generation_id
    assert await lengths(second) == [1, 20]


async def test_the_claim_of_an_interrupted_generation_is_free_when_its_router_says_so(start: Any, until: Any) -> None:
    """With a store that takes its time to release it."""
    settings = {"unread_grace_s": 0.1, "unread_turns": "drop"}
    first, second = await start("first", **settings), await start("second", **settings)
    store = first.router.core._turns.store._store
    release = store.release

    async def slow(*arguments: Any) -> None:
        await asyncio.sleep(0.05)
        await release(*arguments)

    store.release = slow
    for number in range(5):
        client = await Client().ask(first, session_id=f"s{number}").read(3)
        client.stream.cancel()
        await until(lambda number=number: first.value("generations_paused_total") == number + 1)
        assert await reason(Client().ask(second, 1, "again", f"s{number}").read()) == ""


async def test_a_unary_call_that_is_relayed_has_shown_nothing(node: Any, start: Any, until: Any) -> None:
    first, second = await start("first", unread_grace_s=0.3), await start("second", unread_grace_s=0.3)
    call = first.inference.Chat(chat(key="k"))
    await until(lambda: node.num_running == 1)
    again = second.inference.Chat(chat(key="k"))
    await until(lambda: second.value("generations_relayed_total") == 1)
    await asyncio.sleep(0.2)
    call.cancel()
    again.cancel()
    await until(lambda: first.value("generations_paused_total") == 1)
    await Client().ask(first, 2, "again").read()
    assert await lengths(first) == [1, 2], "only the new turn"


async def test_a_reader_who_is_refused_does_not_make_a_paused_generation_run(node: Any, start: Any, until: Any) -> None:
    router = await start("only", unread_grace_s=0.2)
    client = await Client().ask(router).read(3)
    client.stream.cancel()
    await until(lambda: router.value("generations_paused_total") == 1)
    await until(lambda: node.num_running == 0)
    assert await reason(client.attach(router, c5=0).read()) == "INVALID_ARGUMENT"
    await asyncio.sleep(0.3)
    assert router.value("generations_running") == node.num_running == 0
    assert len((await client.attach(router).read(20)).tokens) >= 20


@pytest.mark.parametrize("in_time", [True, False])
async def test_an_answer_is_complete_if_its_last_frame_comes_before_its_deadline(node: Any, start: Any, in_time: bool) -> None:
    router = await start("only")
    node.step_s = 0.05
    client = await Client().ask(router).read(3)
    core = router.router.core
    generation = core.find(client.generation_id)
    (attempt,) = generation.log.live
    log = generation.log

    def complete() -> None:
        tokens = log.choices[0].tokens
        for index in range(len(tokens), len(tokens) + 3):
            log.append(attempt, 0, index, Token(1000 + index, f"0.{index} "), "a")
        if log.finish(attempt, 0, FinishReason.STOP) is AppendResult.NEW:
            generation.end_choice(0)

    overdue = partial(core._lifecycle._overdue, generation)
    # Both in one pass of the loop: before the generation's task runs again.
    for event in (complete, overdue) if in_time else (overdue, complete):
        event()
    async with asyncio.timeout(20):
        if in_time:
            await client.read()
            assert client.reason == inference.FINISH_REASON_STOP
            assert await lengths(router) == [1, len(client.tokens)]
            return
        with pytest.raises(grpc.aio.AioRpcError) as late:
            await client.read()
    assert late.value.code() is grpc.StatusCode.DEADLINE_EXCEEDED
    assert not log.complete


async def test_a_session_stays_busy_while_a_router_that_drains_answers_in_it(
    node: Any, start_routers: Any, new_client: Any
) -> None:
    first, second = await start_routers(2, node, tuning={"store": {"wait_s": 5}})
    client = new_client()
    stream = await client.ask(first, 300, 5, session_id="s")
    reading = asyncio.create_task(client.seen.read(stream))
    first.send(signal.SIGTERM)
    async with asyncio.timeout(20):
        while not first.events("draining"):  # noqa: ASYNC110 - another process tells nobody
            await asyncio.sleep(0.02)
    await asyncio.sleep(0.3)
    with pytest.raises(grpc.aio.AioRpcError) as refused:
        await new_client().ask(second, 2, session_id="s")
    assert error_from_rpc(refused.value).reason == "SESSION_BUSY"
    await reading
    assert client.seen.num_tokens == 300
    assert await first.ended() == 0
    await new_client().ask(second, 2, session_id="s")
    session = (await second.sessions.GetSession(inference.GetSessionRequest(session_id="s"))).session
    assert [len(message.content.split()) for message in session.messages] == [1, 300, 1, 2]


@pytest.mark.parametrize("error", [ValueError("odd"), JournalUnavailableError("gone")], ids=["odd", "gone"])
async def test_a_relayed_reader_does_not_depend_on_the_store(node: Any, start: Any, until: Any, error: Exception) -> None:
    first, second = await start("first"), await start("second")
    client = await Client().ask(first, 150).read(5)
    elsewhere = Client()
    elsewhere.generation_id = client.generation_id
    await elsewhere.attach(second).read(10)
    asked = 0

    async def failing(*_: Any) -> Any:
        nonlocal asked
        asked += 1
        raise error

    second.router.core._cluster.journal.find = failing
    node.step_s = 1.0  # while nothing comes the owner's lease is looked up
    rest = asyncio.create_task(elsewhere.read())
    await until(lambda: asked > 2)
    node.step_s = 0.001
    assert len((await rest).tokens) == 150
