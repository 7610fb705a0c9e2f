"""A generation that nobody reads is paused after the grace, goes on when somebody comes back, and makes way for a new turn."""

from __future__ import annotations

import asyncio
import random
from typing import Any

import grpc
import pytest

from ryzanstein.errors import Code, RyzansteinError
from ryzanstein.generation.tokens import FinishReason, Token
from ryzanstein.rpc.status import error_from_rpc
from ryzanstein.v1 import inference_pb2 as inference

pytestmark = pytest.mark.long

LONG = 4000
GRACE_S = 0.3
STORES = pytest.mark.parametrize("store", ["memory", "sqlite"])


class Client:
    """One generation as its client sees it. A lost or repeated token fails the test."""

    def __init__(self, router: Any) -> None:
        self.router = router
        self.generation_id = ""
        self.tokens: list[int] = []
        self.reason = 0
        self.stream: Any = None

    def ask(self, text: str = "hello", tokens: int = LONG, session_id: str = "", key: str = "", **choice: str) -> Client:
        chat = inference.ChatRequest(
            messages=[inference.Message(role=inference.ROLE_USER, content=text)],
            sampling=inference.SamplingParams(max_tokens=tokens),
            session_id=session_id,
            request_id=key,
        )
        metadata = tuple((name.replace("_", "-"), value) for name, value in choice.items())
        self.stream = self.router.inference.StreamChat(inference.StreamChatRequest(chat=chat), metadata=metadata)
        return self

    def attach(self) -> Client:
        request = inference.AttachGenerationRequest(generation_id=self.generation_id, from_index={0: len(self.tokens)})
        self.stream = self.router.inference.AttachGeneration(request)
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
                assert event.delta.first_index == len(self.tokens), "a gap or a repeat"
                self.tokens += event.delta.token_ids
            else:
                self.reason = event.finished.finish_reason
        assert self.tokens == [1000 + index for index in range(len(self.tokens))]
        return self

    def leave(self) -> None:
        self.stream.cancel()


async def refused(call: Any) -> RyzansteinError:
    with pytest.raises(grpc.aio.AioRpcError) as failure:
        await call
    return error_from_rpc(failure.value)


async def messages(router: Any, session_id: str = "s") -> list[str]:
    session = (await router.sessions.GetSession(inference.GetSessionRequest(session_id=session_id))).session
    return [message.content for message in session.messages]


def text(tokens: int) -> str:
    return "".join(f"0.{index} " for index in range(tokens))


@pytest.fixture
async def node(start_node: Any) -> Any:
    return await start_node("a", step_s=0.01)


async def paused(router: Any, until: Any, count: int = 1) -> None:
    await until(lambda: router.value("generations_paused_total") == count)


@STORES
async def test_it_gives_its_node_back_after_the_grace_and_goes_on_where_it_was(
    node: Any, start_router: Any, until: Any, store: str
) -> None:
    router = await start_router(node, unread_grace_s=GRACE_S, session_store=store)
    client = await Client(router).ask(tokens=300, session_id="s").read(5)
    client.leave()
    await paused(router, until)
    await until(lambda: node.num_running == 0)
    assert router.value("generations_running") == 0
    assert len(node.submits) == 1
    await client.attach().read()
    assert len(client.tokens) == 300
    assert client.reason == inference.FINISH_REASON_LENGTH
    assert [submit.attempt for submit in node.submits] == [0, 1]
    assert router.value("generations_unpaused_total") == 1
    assert await messages(router) == ["hello", text(300)]


async def test_whoever_comes_back_within_the_grace_finds_it_running(node: Any, start_router: Any, until: Any) -> None:
    router = await start_router(node, unread_grace_s=2.0)
    client = await Client(router).ask(tokens=100).read(3)
    client.leave()
    await asyncio.sleep(0.2)
    await client.attach().read()
    assert len(client.tokens) == 100
    assert len(node.submits) == 1
    assert router.value("generations_paused_total") == 0


async def test_one_of_several_readers_is_enough(node: Any, start_router: Any) -> None:
    router = await start_router(node, unread_grace_s=GRACE_S)
    client = await Client(router).ask(tokens=200).read(3)
    other = Client(router)
    other.generation_id = client.generation_id
    await other.attach().read(3)
    client.leave()
    await other.read()
    assert len(other.tokens) == 200
    assert router.value("generations_paused_total") == 0


async def test_many_pauses_lose_and_repeat_nothing(node: Any, start_router: Any, until: Any) -> None:
    router = await start_router(node, unread_grace_s=0.05, session_store="sqlite")
    rng = random.Random(7)
    client = await Client(router).ask(tokens=400, session_id="s").read(1)
    while not client.reason:
        client.leave()
        await asyncio.sleep(rng.choice((0.0, 0.04, 0.05, 0.06, 0.1)))
        await client.attach().read(len(client.tokens) + rng.randint(1, 40))
    assert len(client.tokens) == 400
    assert await messages(router) == ["hello", text(400)]
    assert router.value("generations_paused_total") >= 1
    await until(lambda: router.value("generations_running") == 0 and node.num_running == 0)


async def test_the_end_of_the_window_ends_it_and_keeps_what_was_shown(node: Any, start_router: Any, until: Any) -> None:
    router = await start_router(node, unread_grace_s=0.1, reattach_window_s=0.4)
    client = await Client(router).ask(session_id="s").read(5)
    client.leave()
    await paused(router, until)
    await until(lambda: router.value("generations_abandoned_total") == 1)
    await until(lambda: router.value("generations_total", model="demo", outcome="cancelled") == 1)
    assert (await refused(client.attach().read())).reason == "GENERATION_NOT_FOUND"
    kept = await messages(router)
    assert kept[0] == "hello"
    assert text(LONG).startswith(kept[1])
    assert len(kept[1]) >= len(text(5))
    assert router.value("generations_running") == router.value("generations_retained") == 0


async def test_a_detached_one_runs_to_its_end_and_can_be_read_then(node: Any, start_router: Any, until: Any) -> None:
    router = await start_router(node, unread_grace_s=0.1, reattach_window_s=0.8, session_store="sqlite")
    client = await Client(router).ask(tokens=150, session_id="s", x_run_detached="true").read(5)
    client.leave()
    assert (await refused(Client(router).ask(session_id="s").read())).reason == "SESSION_BUSY"
    await until(lambda: router.value("generations_total", model="demo", outcome="complete") == 1)
    await client.attach().read()
    assert len(client.tokens) == 150
    assert await messages(router) == ["hello", text(150)]
    assert router.value("generations_paused_total") == router.value("generations_abandoned_total") == 0
    await asyncio.sleep(1.0)
    assert (await refused(client.attach().read())).reason == "GENERATION_NOT_FOUND"


async def test_a_unary_call_may_run_detached(node: Any, start_router: Any, until: Any) -> None:
    router = await start_router(node, unread_grace_s=0.1)
    chat = inference.ChatRequest(
        messages=[inference.Message(role=inference.ROLE_USER, content="hello")],
        sampling=inference.SamplingParams(max_tokens=100),
        session_id="s",
    )
    call = router.inference.Chat(chat, metadata=(("x-cancel-on-disconnect", "false"),))
    await until(lambda: bool(node.submits))
    call.cancel()
    await until(lambda: router.value("session_turns_total", outcome="stored") == 1)
    assert await messages(router) == ["hello", text(100)]


@pytest.mark.parametrize("choice", [{"x_cancel_on_disconnect": "maybe"}, {"x_run_detached": "1"}])
async def test_a_choice_that_makes_no_sense_is_refused(node: Any, start_router: Any, choice: dict[str, str]) -> None:
    router = await start_router(node)
    error = await refused(Client(router).ask(**choice).read())
    assert (error.code, error.violations[0].field) == (Code.INVALID_ARGUMENT, next(iter(choice)).replace("_", "-"))
    assert not node.submits


async def test_the_same_request_under_its_key_lets_a_paused_one_go_on(node: Any, start_router: Any, until: Any) -> None:
    router = await start_router(node, unread_grace_s=0.1)
    client = await Client(router).ask(tokens=200, session_id="s", key="k").read(5)
    client.leave()
    await paused(router, until)
    again = await Client(router).ask(tokens=200, session_id="s", key="k").read()
    assert again.generation_id == client.generation_id
    assert len(again.tokens) == 200
    assert await messages(router) == ["hello", text(200)]


async def test_a_paused_one_can_be_cancelled_and_leaves_no_turn(node: Any, start_router: Any, until: Any) -> None:
    router = await start_router(node, unread_grace_s=0.1)
    client = await Client(router).ask(session_id="s").read(5)
    client.leave()
    await paused(router, until)
    cancel = inference.CancelGenerationRequest(generation_id=client.generation_id)
    await router.inference.CancelGeneration(cancel)
    await client.attach().read()
    assert client.reason == inference.FINISH_REASON_CANCELLED
    assert (await refused(router.inference.CancelGeneration(cancel))).code is Code.NOT_FOUND
    assert await messages(router) == []


async def test_a_full_router_lets_a_paused_one_wait(node: Any, start_router: Any, until: Any) -> None:
    router = await start_router(node, unread_grace_s=0.1, max_running=1, reattach_window_s=2.0)
    client = await Client(router).ask(tokens=100).read(5)
    client.leave()
    await paused(router, until)
    other = await Client(router).ask().read(1)
    error = await refused(client.attach().read())
    assert (error.code, error.reason) == (Code.RESOURCE_EXHAUSTED, "QUEUE_FULL")
    await router.inference.CancelGeneration(inference.CancelGenerationRequest(generation_id=other.generation_id))
    await until(lambda: router.value("generations_running") == 0)
    await client.attach().read()
    assert len(client.tokens) == 100


async def test_paused_ones_are_evicted_like_ended_ones(node: Any, start_router: Any, until: Any) -> None:
    router = await start_router(node, unread_grace_s=0.1, max_retained_tokens=4)
    client = await Client(router).ask(session_id="s").read(5)
    client.leave()
    await until(lambda: router.value("generations_evicted_total") == 1)
    await until(lambda: router.value("session_turns_total", outcome="stored") == 1)
    assert (await refused(client.attach().read())).reason == "GENERATION_NOT_FOUND"
    assert router.value("generations_running") == router.value("generations_retained") == 0


@STORES
@pytest.mark.parametrize("after_the_grace", [False, True])
async def test_a_new_turn_ends_it_at_once_and_keeps_what_was_shown(
    node: Any, start_router: Any, until: Any, store: str, after_the_grace: bool
) -> None:
    router = await start_router(node, unread_grace_s=0.2 if after_the_grace else 60.0, session_store=store)
    client = await Client(router).ask(session_id="s").read(5)
    client.leave()
    if after_the_grace:
        await paused(router, until)
    else:
        await until(lambda: router.value("requests_total", face="grpc", method="StreamChat", code="CANCELLED") == 1)
    await Client(router).ask("again", tokens=2, session_id="s").read()
    first, visible, second, answer = await messages(router)
    assert (first, second, answer) == ("hello", "again", text(2))
    assert text(LONG).startswith(visible)
    assert len(visible) >= len(text(5))
    prompt = [message.content for message in node.submits[-1].messages.messages]
    assert prompt == [first, visible, second]
    assert router.value("generations_interrupted_total") == 1
    await until(lambda: node.num_running == 0)
    late = Client(router)
    late.generation_id = client.generation_id
    await late.attach().read()
    assert late.reason == inference.FINISH_REASON_CANCELLED


async def test_tokens_that_come_while_it_is_being_ended_do_not_complete_it(node: Any, start_router: Any, until: Any) -> None:
    """Else its session would have the half of an answer that its reader gets whole."""
    router = await start_router(node, unread_grace_s=60.0)
    client = await Client(router).ask(session_id="s").read(5)
    client.leave()
    await until(lambda: router.value("requests_total", face="grpc", method="StreamChat", code="CANCELLED") == 1)
    generation = router.router.core.find(client.generation_id)
    (attempt,) = generation.log.live

    def complete() -> None:
        """In the same iteration of the loop, before the generation's task hears that it is stopped."""
        tokens = generation.log.choices[0].tokens
        for index in range(len(tokens), LONG):
            generation.log.append(attempt, 0, index, Token(1000 + index, f"0.{index} "), "a")
        generation.log.finish(attempt, 0, FinishReason.LENGTH)

    ending = asyncio.create_task(router.router.core.interrupt(client.generation_id))
    asyncio.get_running_loop().call_soon(complete)
    assert await ending
    async with asyncio.timeout(20):
        await client.attach().read()
    assert client.reason == inference.FINISH_REASON_CANCELLED
    _, stored = await messages(router)
    assert len(text(5)) <= len(stored) <= len(text(len(client.tokens)))


async def test_unread_turns_can_be_left_out(node: Any, start_router: Any, until: Any) -> None:
    router = await start_router(node, unread_turns="drop")
    client = await Client(router).ask(session_id="s").read(5)
    client.leave()
    await until(lambda: router.value("requests_total", face="grpc", method="StreamChat", code="CANCELLED") == 1)
    await Client(router).ask("again", tokens=2, session_id="s").read()
    assert await messages(router) == ["again", text(2)]


async def test_what_was_never_shown_is_left_out(node: Any, start_router: Any, until: Any) -> None:
    router = await start_router(node, unread_grace_s=0.1)
    chat = inference.ChatRequest(
        messages=[inference.Message(role=inference.ROLE_USER, content="hello")],
        sampling=inference.SamplingParams(max_tokens=LONG),
        session_id="s",
        request_id="k",
    )
    call = router.inference.Chat(chat)
    await until(lambda: node.num_running == 1)
    await asyncio.sleep(0.1)
    call.cancel()
    await paused(router, until)
    await Client(router).ask("again", tokens=2, session_id="s").read()
    assert await messages(router) == ["again", text(2)]


async def test_while_somebody_reads_the_session_is_busy(node: Any, start_router: Any) -> None:
    router = await start_router(node)
    client = await Client(router).ask(tokens=200, session_id="s").read(5)
    error = await refused(Client(router).ask("again", session_id="s").read())
    assert (error.code, error.reason, error.retry_after_s) == (Code.ABORTED, "SESSION_BUSY", 1.0)
    await client.read()
    assert await messages(router) == ["hello", text(200)]
    assert router.value("refused_total", reason="session_busy") == 1


@STORES
async def test_of_a_reader_who_comes_back_and_a_new_turn_one_wins(node: Any, start_router: Any, until: Any, store: str) -> None:
    """At many moments around the end of the grace: whichever wins, the session has what its clients were told."""
    node.step_s = 0.002
    router = await start_router(node, unread_grace_s=0.1, session_store=store)
    rng = random.Random(11)
    won = {"reader": 0, "turn": 0}
    for number in range(40):
        session_id = f"s{number}"
        client = await Client(router).ask(tokens=120, session_id=session_id).read(2)
        client.leave()
        moment = rng.choice((0.0, 0.002, 0.05, 0.095, 0.1, 0.105, 0.15))

        async def come_back(client: Client = client, moment: float = moment) -> None:
            await asyncio.sleep(moment + rng.uniform(-0.003, 0.003))
            await client.attach().read()

        async def next_turn(session_id: str = session_id, moment: float = moment) -> str:
            await asyncio.sleep(moment + rng.uniform(-0.003, 0.003))
            try:
                await Client(router).ask("again", tokens=2, session_id=session_id).read()
            except grpc.aio.AioRpcError as failure:
                return error_from_rpc(failure).reason
            return ""

        async with asyncio.timeout(20):
            _, reason = await asyncio.gather(come_back(), next_turn())
        stored = await messages(router, session_id)
        if client.reason == inference.FINISH_REASON_CANCELLED:
            won["turn"] += 1
            assert reason == ""
            assert stored[-2:] == ["again", text(2)]
            assert len(stored) == 2 or (len(stored) == 4 and text(120).startswith(stored[1]))
        else:
            won["reader"] += 1
            assert (client.reason, len(client.tokens)) == (inference.FINISH_REASON_LENGTH, 120)
            assert stored[:2] == ["hello", text(120)]
            assert reason == "SESSION_BUSY" or stored[2:] == ["again", text(2)]
    assert min(won.values()) > 0, won
    await until(lambda: router.value("generations_running") == 0 and node.num_running == 0)


async def test_one_that_was_resumed_after_a_failure_is_paused_like_any_other(node: Any, start_router: Any, until: Any) -> None:
    router = await start_router(node, unread_grace_s=0.1, failover_wait_s=0.3, session_store="sqlite")
    node.die_at = 7
    client = Client(router).ask(tokens=200, session_id="s")
    assert (await refused(client.read())).reason == "NO_NODES"
    await node.start()
    await until(lambda: router.value("link_up", node_id="a") == 1)
    await client.attach().read(10)
    client.leave()
    await paused(router, until)
    await client.attach().read()
    assert len(client.tokens) == 200
    assert await messages(router) == ["hello", text(200)]


async def test_one_that_was_resumed_after_a_failure_makes_way_for_a_new_turn(node: Any, start_router: Any, until: Any) -> None:
    router = await start_router(node, failover_wait_s=0.3)
    node.die_at = 7
    client = Client(router).ask(session_id="s")
    assert (await refused(client.read())).reason == "NO_NODES"
    await node.start()
    await until(lambda: router.value("link_up", node_id="a") == 1)
    await client.attach().read(10)
    client.leave()
    await until(lambda: router.value("requests_total", face="grpc", method="AttachGeneration", code="CANCELLED") == 1)
    await Client(router).ask("again", tokens=2, session_id="s").read()
    first, visible, *rest = await messages(router)
    assert (first, rest) == ("hello", ["again", text(2)])
    assert text(LONG).startswith(visible)
    assert len(visible) >= len(text(10))
