"""Whose a session is: another tenant's is as unknown as one that never was, and its ids are free."""

from __future__ import annotations

import base64
from typing import Any

import grpc
import pytest

from ryzanstein.errors import Code, RyzansteinError
from ryzanstein.router.sessions.names import store_name
from ryzanstein.rpc.status import error_from_rpc
from ryzanstein.v1 import inference_pb2 as inference

RED, BLUE = ({"metadata": (("x-tenant-id", tenant),)} for tenant in ("red", "blue"))
NOBODY: dict[str, Any] = {}


@pytest.fixture
async def client(start_node: Any, start_router: Any) -> Any:
    return await start_router(await start_node("a"))


async def delta(client: Any, session_id: str, user: str = "", **call: Any) -> None:
    message = inference.Message(role=inference.ROLE_USER, content="hello")
    await client.inference.Chat(inference.ChatRequest(messages=[message], session_id=session_id, user=user), **call)


async def read(client: Any, session_id: str, **call: Any) -> inference.Session:
    response = await client.sessions.GetSession(inference.GetSessionRequest(session_id=session_id), **call)
    return response.session


async def listed(client: Any, **call: Any) -> set[str]:
    page = await client.sessions.ListSessions(inference.ListSessionsRequest(), **call)
    return {session.session_id for session in page.sessions}


async def delete(client: Any, session_id: str, **call: Any) -> None:
    await client.sessions.DeleteSession(inference.DeleteSessionRequest(session_id=session_id), **call)


async def refusal(call: Any) -> RyzansteinError:
    with pytest.raises(grpc.aio.AioRpcError) as failure:
        await call
    return error_from_rpc(failure.value)


async def test_another_tenant_neither_reads_lists_nor_deletes_a_session(client: Any) -> None:
    await delta(client, "spoken", **RED)
    await client.sessions.CreateSession(inference.CreateSessionRequest(session_id="made"), **RED)
    for session_id in ("spoken", "made"):
        for other in (BLUE, NOBODY):
            unknown = await refusal(read(client, "never", **other))
            for attempt in (read, delete):
                error = await refusal(attempt(client, session_id, **other))
                assert error.message == unknown.message.replace("never", session_id)
                assert (error.code, error.reason, error.metadata) == (Code.NOT_FOUND, unknown.reason, unknown.metadata)
    assert await listed(client, **BLUE) == await listed(client) == set()
    assert await listed(client, **RED) == {"spoken", "made"}
    await delta(client, "spoken", **RED)
    assert len((await read(client, "spoken", **RED)).messages) == 4
    await delete(client, "made", **RED)
    assert await listed(client, **RED) == {"spoken"}


async def test_each_tenant_has_all_ids_of_its_own(client: Any) -> None:
    for who in (RED, BLUE, NOBODY):
        created = await client.sessions.CreateSession(inference.CreateSessionRequest(session_id="chat-1"), **who)
        assert created.session.session_id == "chat-1"
        await delta(client, "chat-1", **who)
        assert len((await read(client, "chat-1", **who)).messages) == 2
        assert await listed(client, **who) == {"chat-1"}
        error = await refusal(client.sessions.CreateSession(inference.CreateSessionRequest(session_id="chat-1"), **who))
        assert (error.code, error.message) == (Code.ALREADY_EXISTS, "session 'chat-1' already exists")
    await delete(client, "chat-1", **RED)
    assert len((await read(client, "chat-1", **BLUE)).messages) == 2


async def test_users_of_one_tenant_share_its_sessions(client: Any) -> None:
    await delta(client, "common", user="ann", **RED)
    await delta(client, "common", user="bob", **RED)
    assert len((await read(client, "common", **RED)).messages) == 4


@pytest.mark.parametrize("who", [RED, NOBODY])
async def test_a_name_of_the_store_is_no_id(client: Any, who: dict[str, Any]) -> None:
    await delta(client, "mine", **BLUE)
    name = store_name("blue", "mine")
    assert (await client.router.sessions.get(name)).tenant == "blue"
    for attempt in (read, delete, delta):
        assert (await refusal(attempt(client, name, **who))).code is Code.NOT_FOUND
    error = await refusal(client.sessions.CreateSession(inference.CreateSessionRequest(session_id=name), **who))
    assert error.code is Code.INVALID_ARGUMENT
    assert len((await read(client, "mine", **BLUE)).messages) == 2


async def test_errors_name_the_session_as_its_tenant_does(start_node: Any, start_router: Any) -> None:
    client = await start_router(await start_node("a", step_s=0.05))
    message = inference.Message(role=inference.ROLE_USER, content="hello")
    chat = inference.ChatRequest(messages=[message], session_id="busy")
    stream = client.inference.StreamChat(inference.StreamChatRequest(chat=chat), **RED)
    await stream.read()
    error = await refusal(client.inference.Chat(chat, **RED))
    assert (error.reason, error.message) == ("SESSION_BUSY", "session 'busy' is busy with another request")
    assert error.metadata == {"session_id": "busy"}
    assert (await client.inference.Chat(chat, **BLUE)).choices[0].text


@pytest.mark.parametrize("size", [1, 2, 5])
async def test_a_page_s_token_tells_of_no_other_tenant(client: Any, size: int) -> None:
    for number in range(12):
        who, letter = (RED, "r") if number % 4 == 1 else (BLUE, "b")
        await client.sessions.CreateSession(inference.CreateSessionRequest(session_id=f"{letter}{number}"), **who)
    found, token = [], ""
    for _ in range(9):
        page = await client.sessions.ListSessions(inference.ListSessionsRequest(page_size=size, page_token=token), **RED)
        found += [session.session_id for session in page.sessions]
        token = page.next_page_token
        if not token:
            break
        assert b"b" not in base64.urlsafe_b64decode(token).partition(b" ")[2].rpartition(b"~")[2]
    assert found == ["r9", "r5", "r1"]
