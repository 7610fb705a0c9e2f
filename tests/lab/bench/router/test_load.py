"""The load generator against a real gRPC node: it counts what a gRPC library's client counts, and notices what is missing."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any

import grpc
import pytest

from ryzanstein.errors import RyzansteinError, unavailable
from ryzanstein.lab.bench.router.load.call_end import by_reason
from ryzanstein.lab.bench.router.load.connections import StreamLoad, answer_once, connections, ready
from ryzanstein.lab.bench.router.scripted.engine import ScriptedEngine
from ryzanstein.lab.bench.router.scripted.node import ScriptedChat
from ryzanstein.lab.bench.router.scripted.script import WORD, Script
from ryzanstein.rpc.server import RpcServer
from ryzanstein.rpc.status import abort
from ryzanstein.v1 import inference_pb2 as inference
from ryzanstein.v1.inference_pb2_grpc import (
    InferenceServiceStub,
    add_InferenceServiceServicer_to_server,
)


class LosesToken(ScriptedChat):  # type: ignore[misc]
    """Leaves out one token of each answer."""

    async def StreamChat(self, request: Any, context: Any) -> AsyncIterator[inference.StreamChatResponse]:
        async for response in super().StreamChat(request, context):
            if response.event.delta.first_index != 3:
                yield response


class Refuses(ScriptedChat):  # type: ignore[misc]
    """Ends with headers alone, and gRPC's own details."""

    async def StreamChat(self, request: Any, context: Any) -> AsyncIterator[inference.StreamChatResponse]:
        await context.abort(grpc.StatusCode.RESOURCE_EXHAUSTED, "full, 100 %")
        yield inference.StreamChatResponse()


class GivesUp(ScriptedChat):  # type: ignore[misc]
    """Ends after two tokens as our services do, with an ErrorInfo."""

    async def StreamChat(self, request: Any, context: Any) -> AsyncIterator[inference.StreamChatResponse]:
        async for response in super().StreamChat(request, context):
            if response.event.delta.first_index == 2:
                await abort(context, unavailable("NODE_LOST", "the node is gone"))
            yield response


@pytest.fixture
async def serve() -> AsyncIterator[Any]:
    servers: list[RpcServer] = []

    async def start(servicer: type[ScriptedChat] = ScriptedChat) -> int:
        server = RpcServer("127.0.0.1", 0, [])
        add_InferenceServiceServicer_to_server(servicer(ScriptedEngine()), server.server)  # type: ignore[abstract]
        await server.start()
        servers.append(server)
        return server.port

    yield start
    for server in servers:
        await server.stop(0)


async def test_it_counts_what_a_grpc_client_counts(serve: Any) -> None:
    port, script = await serve(), Script(tokens=50)
    async with grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel:
        events = [response.event async for response in InferenceServiceStub(channel).StreamChat(script.request())]
    deltas = [event.delta for event in events if event.HasField("delta")]
    async with connections(port, 1) as (connection,):
        tally = await answer_once(connection, script)
    assert tally.problems == []
    assert (tally.answers, tally.tokens, tally.messages) == (1, 50, len(deltas))
    assert "".join(delta.text for delta in deltas) == WORD * 50


async def test_many_streams_share_connections_and_windows(serve: Any) -> None:
    """More bytes than the windows, on the stream and on the connection: they are given back."""
    port = await serve()
    async with connections(port, 2, window_bytes=65_535) as opened:
        load = StreamLoad(opened, Script(tokens=3000, step_s=0.0))
        load.start(8)
        tally = await load.stop(60)
    assert tally.problems == []
    assert (tally.answers, tally.tokens) == (8, 24_000)


async def test_answers_follow_each_other_until_it_is_asked_to_stop(serve: Any, until: Any) -> None:
    async with connections(await serve(), 1) as opened:
        load = StreamLoad(opened, Script(tokens=2))
        load.start(4)
        await until(lambda: load.so_far().answers >= 20)
        tally = await load.stop(20)
    assert tally.problems == []
    assert tally.answers >= 20
    assert tally.tokens == 2 * tally.answers


async def test_a_lost_token_is_noticed(serve: Any) -> None:
    async with connections(await serve(LosesToken), 1) as (connection,):
        tally = await answer_once(connection, Script(tokens=6))
    assert tally.problems == ["a wrong index: 4 came after 3 tokens"]


async def test_a_refusal_says_its_status_and_a_later_end_the_services_reason(serve: Any) -> None:
    async with connections(await serve(Refuses), 1) as (connection,):
        tally = await answer_once(connection, Script(tokens=6))
    assert tally.problems == ["RESOURCE_EXHAUSTED: full, 100 %"]
    async with connections(await serve(GivesUp), 1) as opened:
        load = StreamLoad(opened, Script(tokens=6))
        load.start(2)
        tally = await load.stop(20)
    assert tally.problems == ["UNAVAILABLE NODE_LOST: the node is gone, after 2 tokens"] * 2
    assert by_reason([*tally.problems, "RESOURCE_EXHAUSTED: full"]) == {"UNAVAILABLE NODE_LOST": 2, "RESOURCE_EXHAUSTED": 1}


async def test_a_connection_that_breaks_breaks_its_streams(serve: Any, until: Any) -> None:
    port = await serve()
    async with connections(port, 1) as opened:
        load = StreamLoad(opened, Script(tokens=1000, step_s=0.05))
        load.start(3)
        await until(lambda: load.begun == 3)
        opened[0].transport.abort()
        tally = await load.stop(10)
    assert by_reason(problem.replace(",", ":") for problem in tally.problems) == {"connection lost": 3}


async def test_a_server_that_answers_is_ready_and_one_that_refuses_is_not(serve: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    await ready(await serve())
    monkeypatch.setattr("ryzanstein.lab.bench.router.load.connections._READY_S", 0.2)
    with pytest.raises(RyzansteinError) as failure:
        await ready(await serve(Refuses))
    assert failure.value.reason == "NOT_READY"
