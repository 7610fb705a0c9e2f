"""Whose a session is: where a gateway names the tenant, another tenant's session is as unknown as one that never was."""

from __future__ import annotations

from typing import Any

import grpc
import pytest

from ryzanstein.errors import Code, RyzansteinError
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


async def test_another_tenant_neither_reads_lists_continues_nor_deletes_a_session(client: Any) -> None:
    await delta(client, "spoken", **RED)
    await client.sessions.CreateSession(inference.CreateSessionRequest(session_id="made"), **RED)
    for session_id in ("spoken", "made"):
        unknown = await refusal(read(client, "never", **BLUE))
        for attempt in (read, delta, delete):
            error = await refusal(attempt(client, session_id, **BLUE))
            assert (error.code, error.reason) == (unknown.code, unknown.reason) == (Code.NOT_FOUND, unknown.reason)
    assert await listed(client, **BLUE) == set()
    assert client.value("refused_total", reason="foreign_tenant") == 2
    assert await listed(client, **RED) == await listed(client) == {"spoken", "made"}
    await delta(client, "spoken", **RED)
    assert len((await read(client, "spoken", **RED)).messages) == 4
    await delete(client, "made", **RED)
    assert await listed(client, **RED) == {"spoken"}


async def test_who_names_no_tenant_finds_all_sessions_and_users_share_them(client: Any) -> None:
    await delta(client, "theirs", **RED)
    await delta(client, "common", user="ann")
    await delta(client, "common", user="bob")
    assert len((await read(client, "common")).messages) == 4
    assert len((await read(client, "theirs")).messages) == 2
    assert await listed(client) == {"theirs", "common"}
    await delete(client, "theirs")
    assert await listed(client) == {"common"}


async def test_a_session_of_nobody_is_found_by_its_id_and_listed_for_nobody_in_particular(client: Any) -> None:
    await delta(client, "old")
    assert len((await read(client, "old", **RED)).messages) == 2
    await delta(client, "old", **RED)
    assert await listed(client, **RED) == set()
