"""One router is cut off from the store that the others still reach: it lives, answers, and has turns that wait."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import suppress
from typing import Any
from urllib.parse import urlsplit

import grpc
import pytest

from ryzanstein.errors import Code
from ryzanstein.rpc.status import error_from_rpc
from ryzanstein.v1 import inference_pb2 as inference


class Wire:
    """A TCP connection to a server that can be cut, like a network that fails for one host."""

    def __init__(self, host: str, port: int) -> None:
        self._target = host, port
        self._tasks: set[asyncio.Task[None]] = set()
        self._server: asyncio.Server | None = None
        self.port = 0

    async def join(self) -> None:
        self._server = await asyncio.start_server(self._serve, "127.0.0.1", self.port)
        self.port = self._server.sockets[0].getsockname()[1]

    async def cut(self) -> None:
        assert self._server is not None
        self._server.close()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._tasks.add(task)
        try:
            there, back = await asyncio.open_connection(*self._target)
            async with asyncio.TaskGroup() as both:
                both.create_task(_copy(reader, back))
                both.create_task(_copy(there, writer))
        finally:
            self._tasks.discard(task)
            for end in (writer, back):
                end.close()


async def _copy(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    with suppress(ConnectionError):
        while data := await reader.read(65536):
            writer.write(data)
            await writer.drain()
    writer.close()


@pytest.fixture
async def wire(start_redis: Any) -> AsyncIterator[Callable[[], Awaitable[tuple[Wire, str]]]]:
    wires: list[Wire] = []

    async def joined() -> tuple[Wire, str]:
        url = (await start_redis()).url
        parts = urlsplit(url)
        wires.append(Wire(parts.hostname or "", parts.port or 6379))
        await wires[-1].join()
        return wires[-1], url

    yield joined
    for each in wires:
        await each.cut()


async def messages(router: Any) -> list[str]:
    session = (await router.sessions.GetSession(inference.GetSessionRequest(session_id="s"))).session
    return [message.content for message in session.messages]


@pytest.mark.long
async def test_no_other_router_answers_without_the_turns_that_wait(
    start_node: Any, start_routers: Any, new_client: Any, wire: Any
) -> None:
    node = await start_node("a", step_s=0.02)
    connection, url = await wire()
    flags = {"session_store": "redis", "lease_s": 0.5, "tuning": {"claim_ttl_s": 1}, "reattach_window_s": 2}
    (first,) = await start_routers(1, node, redis_url=url.replace(str(urlsplit(url).port), str(connection.port)), **flags)
    (second,) = await start_routers(1, node, redis_url=url, **flags)
    await new_client().ask(first, 3, session_id="s")
    before = await messages(second)
    client = new_client()
    await client.ask(first, 50, until_tokens=5, session_id="s")
    await connection.cut()
    await client.come_back(first)
    assert client.seen.num_tokens == 50
    # The lease and the claim expire, and the turn still waits.
    for _ in range(6):
        with pytest.raises(grpc.aio.AioRpcError) as failure:
            await new_client().ask(second, 2, session_id="s")
        error = error_from_rpc(failure.value)
        assert (error.code, error.reason) == (Code.ABORTED, "SESSION_BUSY")
        await asyncio.sleep(0.5)
    assert await messages(second) == before
    await connection.join()

    for _ in range(150):
        if len(await messages(second)) == len(before) + 2:
            break
        await asyncio.sleep(0.1)
    await new_client().ask(second, 2, session_id="s")
    assert len(await messages(second)) == len(before) + 4
