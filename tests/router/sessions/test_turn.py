"""A conversation through the router: what the node is sent, what is kept, and who is refused."""

from __future__ import annotations

import asyncio
from typing import Any

import grpc
import pytest

from ryzanstein.errors import Code, RyzansteinError
from ryzanstein.generation.prompts import Message, Role
from ryzanstein.rpc.status import error_from_rpc
from ryzanstein.v1 import inference_pb2 as inference

USER, ASSISTANT = inference.ROLE_USER, inference.ROLE_ASSISTANT


def chat(text: str, tokens: int = 2, session_id: str = "s", **more: Any) -> inference.ChatRequest:
    return inference.ChatRequest(
        messages=[inference.Message(role=USER, content=text)],
        sampling=inference.SamplingParams(max_tokens=tokens),
        session_id=session_id,
        **more,
    )


async def stored(client: Any) -> list[tuple[int, str]]:
    session = (await client.sessions.GetSession(inference.GetSessionRequest(session_id="s"))).session
    return [(message.role, message.content) for message in session.messages]


def sent(node: Any) -> list[tuple[int, str]]:
    return [(message.role, message.content) for message in node.submits[-1].messages.messages]


async def refused(call: Any) -> RyzansteinError:
    with pytest.raises(grpc.aio.AioRpcError) as failure:
        await call
    return error_from_rpc(failure.value)


async def test_earlier_turns_stand_in_front_and_the_answer_is_kept(start_node: Any, start_router: Any) -> None:
    node = await start_node("a")
    client = await start_router(node)
    await client.inference.Chat(chat("one"))
    await client.inference.Chat(chat("two"))
    first = [(USER, "one"), (ASSISTANT, "0.0 0.1 ")]
    assert sent(node) == [*first, (USER, "two")]
    assert await stored(client) == [*first, (USER, "two"), (ASSISTANT, "0.0 0.1 ")]
    session = (await client.sessions.GetSession(inference.GetSessionRequest(session_id="s"))).session
    assert (session.model, session.node_id) == ("demo", "a")


async def test_whoever_has_read_the_end_finds_the_turn_stored(start_node: Any, start_router: Any) -> None:
    client = await start_router(await start_node("a"), session_store="sqlite")
    for turn in range(5):
        async for response in client.inference.StreamChat(inference.StreamChatRequest(chat=chat(f"turn {turn}"))):
            if response.event.HasField("finished"):
                assert len(await stored(client)) == 2 * (turn + 1)


async def test_a_restarted_router_remembers(start_node: Any, start_router: Any) -> None:
    node = await start_node("a")
    first = await start_router(node, session_store="sqlite")
    await first.inference.Chat(chat("one"))
    second = await start_router(node, session_store="sqlite")
    await second.inference.Chat(chat("two"))
    assert sent(node) == [(USER, "one"), (ASSISTANT, "0.0 0.1 "), (USER, "two")]


async def test_a_session_goes_on_elsewhere_with_its_history_when_its_node_dies(start_node: Any, start_router: Any) -> None:
    nodes = [await start_node("a"), await start_node("b")]
    client = await start_router(*nodes)
    answered = (await client.inference.Chat(chat("one"))).node_id
    dead, alive = sorted(nodes, key=lambda node: node.node_id != answered)
    await dead.die()
    assert (await client.inference.Chat(chat("two"))).node_id == alive.node_id
    assert sent(alive) == [(USER, "one"), (ASSISTANT, "0.0 0.1 "), (USER, "two")]


async def test_a_second_request_while_one_is_answered_is_refused(start_node: Any, start_router: Any, until: Any) -> None:
    node = await start_node("a", step_s=0.01)
    client = await start_router(node)
    running = client.inference.Chat(chat("one", tokens=50))
    await until(lambda: bool(node.submits))
    error = await refused(client.inference.Chat(chat("two")))
    assert (error.code, error.reason, error.retry_after_s) == (Code.ABORTED, "SESSION_BUSY", 1.0)
    await running
    await client.inference.Chat(chat("three"))
    assert [content for _, content in sent(node)][::2] == ["one", "three"]


async def test_a_cancelled_answer_is_not_kept_and_frees_the_session(start_node: Any, start_router: Any, until: Any) -> None:
    node = await start_node("a", step_s=0.01)
    client = await start_router(node)
    stream = client.inference.StreamChat(inference.StreamChatRequest(chat=chat("one", tokens=500)))
    frames = aiter(stream)
    started = (await anext(frames)).event.started
    await client.inference.CancelGeneration(inference.CancelGenerationRequest(generation_id=started.generation_id))
    events = [response.event async for response in frames]
    assert events[-1].finished.finish_reason == inference.FINISH_REASON_CANCELLED
    assert await stored(client) == []
    await client.inference.Chat(chat("two"))
    assert sent(node) == [(USER, "two")]


async def test_a_session_that_is_deleted_meanwhile_stays_deleted(start_node: Any, start_router: Any, until: Any) -> None:
    node = await start_node("a", step_s=0.01)
    client = await start_router(node)
    running = client.inference.Chat(chat("one", tokens=30))
    await until(lambda: bool(node.submits))
    await client.sessions.DeleteSession(inference.DeleteSessionRequest(session_id="s"))
    await running
    error = await refused(client.sessions.GetSession(inference.GetSessionRequest(session_id="s")))
    assert (error.code, error.resource) == (Code.NOT_FOUND, ("session", "s"))
    assert client.value("session_turns_total", outcome="dropped") == 1


async def test_another_model_than_the_sessions_is_refused(start_node: Any, start_router: Any) -> None:
    client = await start_router(await start_node("a"))
    await client.inference.Chat(chat("one"))
    error = await refused(client.inference.Chat(chat("two", model="other")))
    assert (error.code, error.violations[0].field) == (Code.INVALID_ARGUMENT, "model")


async def test_a_conversation_that_has_become_too_long_is_refused(start_node: Any, start_router: Any) -> None:
    client = await start_router(await start_node("a"), max_session_messages=3)
    await client.inference.Chat(chat("one"))
    error = await refused(client.inference.Chat(chat("two " * 10)))
    assert (error.code, error.reason) == (Code.FAILED_PRECONDITION, "SESSION_FULL")


async def test_sessions_are_created_listed_and_deleted_over_grpc(start_node: Any, start_router: Any) -> None:
    client = await start_router(await start_node("a"))
    message = inference.Message(role=inference.ROLE_SYSTEM, content="be brief")
    made = (await client.sessions.CreateSession(inference.CreateSessionRequest(messages=[message]))).session
    assert len(made.session_id) == 32
    await client.inference.Chat(chat("one", session_id=made.session_id))
    page = await client.sessions.ListSessions(inference.ListSessionsRequest())
    assert [(session.session_id, len(session.messages)) for session in page.sessions] == [(made.session_id, 0)]
    kept = (await client.sessions.GetSession(inference.GetSessionRequest(session_id=made.session_id))).session
    assert [m.role for m in kept.messages] == [inference.ROLE_SYSTEM, USER, ASSISTANT]
    await client.sessions.DeleteSession(inference.DeleteSessionRequest(session_id=made.session_id))
    assert not (await client.sessions.ListSessions(inference.ListSessionsRequest())).sessions


async def test_a_second_request_is_refused_by_every_router_that_shares_the_sessions(
    start_node: Any, start_router: Any, until: Any
) -> None:
    node = await start_node("a", step_s=0.01)
    one = await start_router(node, session_store="sqlite", router_id="r1", tuning={"claim_ttl_s": 0.5})
    other = await start_router(node, session_store="sqlite", router_id="r2")
    running = one.inference.Chat(chat("one", tokens=100))
    await until(lambda: bool(node.submits))
    await asyncio.sleep(0.7)  # longer than the claim lives: it is renewed
    error = await refused(other.inference.Chat(chat("two")))
    assert (error.code, error.reason, error.retry_after_s) == (Code.ABORTED, "SESSION_BUSY", 1.0)
    await running
    await other.inference.Chat(chat("three"))
    assert [content for _, content in sent(node)][::2] == ["one", "three"]


async def test_a_session_whose_answer_was_cancelled_is_free_for_every_router(
    start_node: Any, start_router: Any, until: Any
) -> None:
    node = await start_node("a", step_s=0.01)
    one = await start_router(node, session_store="sqlite", router_id="r1")
    other = await start_router(node, session_store="sqlite", router_id="r2")
    stream = one.inference.StreamChat(inference.StreamChatRequest(chat=chat("one", tokens=500)))
    started = (await anext(aiter(stream))).event.started
    await one.inference.CancelGeneration(inference.CancelGenerationRequest(generation_id=started.generation_id))
    await until(lambda: not one.router.core.running)
    await asyncio.sleep(0.1)
    await other.inference.Chat(chat("two"))
    assert sent(node) == [(USER, "two")]


def named(tenant: str) -> dict[str, Any]:
    return {"metadata": (("x-tenant-id", tenant),)}


async def test_a_tenant_neither_ends_nor_waits_for_what_speaks_in_another_one_s_session(
    start_node: Any, start_router: Any
) -> None:
    """Also while the other one's session has not been stored yet."""
    client = await start_router(await start_node("a", step_s=0.01))
    stream = client.inference.StreamChat(inference.StreamChatRequest(chat=chat("one", tokens=60)), **named("acme"))
    generation_id = (await stream.read()).event.started.generation_id
    stream.cancel()  # it goes on, unread: its tenant could come back, or end it by another turn
    for _ in range(3):
        await client.inference.Chat(chat("mine"), **named("beta"))
    request = inference.AttachGenerationRequest(generation_id=generation_id)
    tokens = 0
    async for response in client.inference.AttachGeneration(request, **named("acme")):
        tokens += len(response.event.delta.token_ids)
    assert tokens == 60


@pytest.mark.parametrize("ending", ["", ".object"])
async def test_what_is_kept_of_a_response_is_no_session(start_node: Any, start_router: Any, ending: str) -> None:
    """Its id has a digest of the tenant, which whoever knows the tenant's name can compute."""
    client = await start_router(await start_node("a"))
    session_id = "0123456789abcdef-resp_1" + ending
    for part in dict.fromkeys(("0123456789abcdef-resp_1", session_id)):
        await client.router.sessions.create(part, "demo", (Message(Role.ASSISTANT, "secret"),))
    for call, code in (
        (client.sessions.GetSession(inference.GetSessionRequest(session_id=session_id)), Code.NOT_FOUND),
        (client.sessions.DeleteSession(inference.DeleteSessionRequest(session_id=session_id)), Code.NOT_FOUND),
        (client.sessions.CreateSession(inference.CreateSessionRequest(session_id=session_id)), Code.INVALID_ARGUMENT),
        (client.inference.Chat(chat("more", session_id=session_id)), Code.NOT_FOUND),
    ):
        assert (await refused(call)).code is code
    assert len((await client.router.sessions.get(session_id)).messages) == 1
