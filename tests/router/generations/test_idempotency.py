"""A request that is sent again under its key joins its own generation: over gRPC, one router, scripted nodes."""

from __future__ import annotations

import asyncio
from typing import Any

import grpc
import pytest

from ryzanstein.errors import Code, RyzansteinError
from ryzanstein.generation.request import RequestKey
from ryzanstein.router.generations.idempotency import IdempotencyKeys, UnsharedKeys
from ryzanstein.router.telemetry import RouterTelemetry
from ryzanstein.rpc.status import error_from_rpc
from ryzanstein.v1 import inference_pb2 as inference
from ryzanstein.v1 import worker_pb2 as worker

pytestmark = pytest.mark.long

STORES = pytest.mark.parametrize("store", ["memory", "sqlite"])


def chat(text: str = "hello", tokens: int = 30, key: str = "k", **more: Any) -> inference.ChatRequest:
    sampling = more.pop("sampling", {})
    return inference.ChatRequest(
        messages=[inference.Message(role=inference.ROLE_USER, content=text)],
        sampling=inference.SamplingParams(max_tokens=tokens, **sampling),
        request_id=key,
        **more,
    )


def stream(client: Any, request: inference.ChatRequest, **call: Any) -> Any:
    return client.inference.StreamChat(inference.StreamChatRequest(chat=request), **call)


async def begun(call: Any) -> str:
    """The generation's id; the stream stays open."""
    return str((await call.read()).event.started.generation_id)


async def rest(call: Any) -> list[int]:
    tokens: list[int] = []
    while (response := await call.read()) is not grpc.aio.EOF:
        tokens += response.event.delta.token_ids
    return tokens


async def refused(call: Any) -> RyzansteinError:
    with pytest.raises(grpc.aio.AioRpcError) as failure:
        await call
    return error_from_rpc(failure.value)


async def num_messages(client: Any, session_id: str = "s") -> int:
    session = (await client.sessions.GetSession(inference.GetSessionRequest(session_id=session_id))).session
    return len(session.messages)


@STORES
async def test_a_turn_that_is_sent_again_after_a_broken_stream_is_stored_once(
    start_node: Any, start_router: Any, store: str
) -> None:
    node = await start_node("a", step_s=0.01)
    client = await start_router(node, session_store=store)
    broken = stream(client, chat(session_id="s"))
    generation_id = await begun(broken)
    broken.cancel()
    again = stream(client, chat(session_id="s"))
    assert await begun(again) == generation_id
    assert await rest(again) == [1000 + index for index in range(30)]
    late = await client.inference.Chat(chat(session_id="s"))
    assert (late.generation_id, list(late.choices[0].token_ids)) == (generation_id, [1000 + index for index in range(30)])
    assert await num_messages(client) == 2
    assert len(node.submits) == 1
    assert client.value("keyed_requests_total", outcome="begun") == 1
    assert client.value("keyed_requests_total", outcome="attached") == 2


@STORES
async def test_of_many_that_come_at_once_one_runs(start_node: Any, start_router: Any, store: str) -> None:
    node = await start_node("a", step_s=0.01)
    client = await start_router(node, session_store=store)
    sampling = {"n": 3, "logprobs": 1}
    answers = await asyncio.gather(*(client.inference.Chat(chat(session_id="s", sampling=sampling)) for _ in range(20)))
    assert all(answer == answers[0] for answer in answers)
    assert [len(choice.logprobs) for choice in answers[0].choices] == [30, 30, 30]
    assert len(node.submits) == 1
    assert await num_messages(client) == 2


async def test_another_body_is_refused_and_another_tenant_has_keys_of_its_own(start_node: Any, start_router: Any) -> None:
    client = await start_router(await start_node("a"), session_store="sqlite")
    first = await client.inference.Chat(chat())
    for other in (chat("other"), chat(tokens=31), chat(session_id="s"), chat(model="demo"), chat(sampling={"seed": 1})):
        error = await refused(client.inference.Chat(other))
        assert (error.code, error.reason) == (Code.FAILED_PRECONDITION, "IDEMPOTENCY_MISMATCH")
        assert "hello" not in error.message
    text = inference.CompleteRequest(text="hello", request_id="k", sampling=inference.SamplingParams(max_tokens=30))
    assert (await refused(client.inference.Complete(text))).reason == "IDEMPOTENCY_MISMATCH"
    foreign = await client.inference.Chat(chat("other"), metadata=(("x-tenant-id", "acme"),))
    assert foreign.generation_id != first.generation_id
    assert client.value("keyed_requests_total", outcome="mismatch") == 6


async def test_a_key_is_not_the_tracing_id(start_node: Any, start_router: Any) -> None:
    node = await start_node("a")
    client = await start_router(node)
    for _ in range(2):
        await client.inference.Chat(chat(key=""), metadata=(("x-request-id", "same"),))
    assert [submit.request_id for submit in node.submits] == ["same", "same"]
    await client.inference.Chat(chat(), metadata=(("x-request-id", "one"),))
    await client.inference.Chat(chat(), metadata=(("x-request-id", "two"),))
    assert [submit.request_id for submit in node.submits[2:]] == ["one"]


@STORES
async def test_a_refused_request_and_a_failed_one_free_their_key(
    start_node: Any, start_router: Any, until: Any, store: str
) -> None:
    node = await start_node("a", step_s=0.01)
    client = await start_router(node, session_store=store, max_running=1)
    holder = client.inference.Chat(chat(key="", tokens=200))
    await until(lambda: client.router.core.running == 1)
    assert (await refused(client.inference.Chat(chat()))).reason == "QUEUE_FULL"
    assert (await refused(client.inference.Chat(chat("other")))).reason == "QUEUE_FULL"
    await holder
    node.refuse = RyzansteinError("too long", Code.INVALID_ARGUMENT, "CONTEXT_TOO_LONG", {"prompt_tokens": "9"})
    assert (await refused(client.inference.Chat(chat()))).reason == "CONTEXT_TOO_LONG"
    node.refuse = None
    assert (await client.inference.Chat(chat(session_id="s"))).choices[0].text
    assert await num_messages(client) == 2


@STORES
async def test_a_first_caller_that_leaves_takes_nothing_from_the_second(
    start_node: Any, start_router: Any, until: Any, store: str
) -> None:
    """A unary call, and a stream that asked to end with its connection."""
    node = await start_node("a", step_s=0.01)
    client = await start_router(node, session_store=store)
    first = client.inference.Chat(chat())
    await until(lambda: len(node.submits) == 1)
    second = client.inference.Chat(chat())
    await asyncio.sleep(0.05)
    first.cancel()
    assert len((await second).choices[0].token_ids) == 30
    leaving = stream(client, chat(key="l"), metadata=(("x-cancel-on-disconnect", "true"),))
    generation_id = await begun(leaving)
    leaving.cancel()
    again = await client.inference.Chat(chat(key="l"))
    assert (again.generation_id, len(again.choices[0].token_ids)) == (generation_id, 30)
    assert len(node.submits) == 2


async def test_a_first_caller_that_leaves_before_anything_runs_frees_the_key_for_the_second(
    start_node: Any, start_router: Any, until: Any
) -> None:
    node = await start_node("a")
    client = await start_router(node, session_store="sqlite", failover_wait_s=20)
    node.state = worker.NODE_STATE_RECOVERING
    await until(lambda: not client.router.core.ready)
    calls = [client.inference.Chat(chat(session_id="s")) for _ in range(4)]
    await until(lambda: client.router.core.running == 1)
    for call in calls[:3]:
        call.cancel()
    node.state = worker.NODE_STATE_READY
    assert len((await calls[3]).choices[0].token_ids) == 30
    assert await num_messages(client) == 2


@STORES
async def test_a_key_ends_with_its_window(start_node: Any, start_router: Any, until: Any, store: str) -> None:
    node = await start_node("a")
    client = await start_router(node, session_store=store, reattach_window_s=0.2)
    first = await client.inference.Chat(chat())
    await until(lambda: client.value("generations_retained") == 0)
    second = await client.inference.Chat(chat("other"))
    assert second.generation_id != first.generation_id
    await until(lambda: client.value("generations_retained") == 0)
    core = client.router.core
    await until(lambda: not core._keys._holdings and not core._keys._by_generation)


async def test_what_was_cancelled_stays_cancelled(start_node: Any, start_router: Any) -> None:
    """A repetition that was under way when the user pressed stop starts nothing."""
    node = await start_node("a", step_s=0.01)
    client = await start_router(node)
    first = stream(client, chat(tokens=500))
    await client.inference.CancelGeneration(inference.CancelGenerationRequest(generation_id=await begun(first)))
    answer = await client.inference.Chat(chat(tokens=500))
    assert answer.choices[0].finish_reason == inference.FINISH_REASON_CANCELLED
    assert len(node.submits) == 1


async def test_a_key_out_of_bounds_names_its_field(start_node: Any, start_router: Any) -> None:
    client = await start_router(await start_node("a"))
    error = await refused(client.inference.Chat(chat(key="k" * 256)))
    assert (error.code, error.violations[0].field) == (Code.INVALID_ARGUMENT, "request_id")
    assert "255" in error.violations[0].description


async def left_without_a_node(client: Any, node: Any) -> str:
    """The id of a generation in a session that has ended after seven tokens because its node died."""
    node.die_at = 7
    call = stream(client, chat(session_id="s"))
    generation_id = await begun(call)
    error = await refused(rest(call))
    assert (error.reason, error.retry_after_s) == ("NO_NODES", 1.0)
    return generation_id


async def back(node: Any, client: Any, until: Any) -> None:
    await node.start()
    await until(lambda: client.value("link_up", node_id="a"))


def attach(client: Any, generation_id: str) -> Any:
    return client.inference.AttachGeneration(inference.AttachGenerationRequest(generation_id=generation_id))


@STORES
async def test_what_may_go_on_keeps_its_key_and_is_stored_once(
    start_node: Any, start_router: Any, until: Any, store: str
) -> None:
    """Its client comes back both ways at once: it attaches, and sends the request again."""
    node = await start_node("a", step_s=0.01)
    client = await start_router(node, session_store=store, failover_wait_s=0.3)
    generation_id = await left_without_a_node(client, node)
    assert (await refused(client.inference.Chat(chat(session_id="s")))).reason == "NO_NODES", "there is none yet"
    await back(node, client, until)
    attached, again = attach(client, generation_id), stream(client, chat(session_id="s"))
    assert await begun(again) == generation_id
    assert await rest(attached) == await rest(again) == [1000 + index for index in range(30)]
    assert (await client.inference.Chat(chat(session_id="s"))).generation_id == generation_id
    assert await num_messages(client) == 2
    assert [submit.attempt for submit in node.submits] == [0, 1], "one run for all of them"
    assert client.value("keyed_requests_total", outcome="begun") == 1


@STORES
async def test_what_was_resumed_and_then_failed_for_good_frees_its_key(
    start_node: Any, start_router: Any, until: Any, store: str
) -> None:
    node = await start_node("a", step_s=0.01)
    client = await start_router(node, session_store=store, failover_wait_s=0.3)
    generation_id = await left_without_a_node(client, node)
    await back(node, client, until)
    node.refuse = RyzansteinError("not numbers", Code.INTERNAL, "LOGITS_NOT_FINITE")
    assert (await refused(rest(attach(client, generation_id)))).reason == "LOGITS_NOT_FINITE"
    node.refuse = None
    answer = await client.inference.Chat(chat(session_id="s"))
    assert answer.generation_id != generation_id
    assert (await refused(rest(attach(client, generation_id)))).reason == "LOGITS_NOT_FINITE"
    assert await num_messages(client) == 2


async def test_resuming_takes_a_place_as_a_new_request_does(start_node: Any, start_router: Any, until: Any) -> None:
    node = await start_node("a", step_s=0.01)
    client = await start_router(node, failover_wait_s=0.3, max_running=1)
    generation_id = await left_without_a_node(client, node)
    await back(node, client, until)
    other = client.inference.Chat(chat(key="", tokens=60))
    await until(lambda: client.router.core.running == 1)
    assert (await refused(rest(attach(client, generation_id)))).reason == "QUEUE_FULL"
    await other
    attached = attach(client, generation_id)
    await begun(attached)
    assert (await refused(client.inference.Chat(chat(key="")))).reason == "QUEUE_FULL"
    assert len(await rest(attached)) == 30
    assert client.router.core._admission.running == client.router.core.running == 0


async def test_a_key_that_is_being_given_back_is_free_for_another_body() -> None:
    class Slow(UnsharedKeys):
        async def free(self, key: RequestKey, generation_id: str) -> None:
            await given_back.wait()

    given_back = asyncio.Event()
    keys = IdempotencyKeys(Slow(), RouterTelemetry())
    assert await keys.claim(RequestKey("k", b"one"), "first", 1.0) == "first"
    keys.free("first")
    second = asyncio.create_task(keys.claim(RequestKey("k", b"two"), "second", 1.0))
    await asyncio.sleep(0.01)
    assert not second.done()
    given_back.set()
    assert await second == "second"
    await keys.close()
