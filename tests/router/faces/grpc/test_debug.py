"""What a router tells an operator who looks for a request that hangs: where it is, and where the router's own tasks are."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import grpc
import pytest

from ryzanstein import errors
from ryzanstein.embeddings import EmbeddingRequest
from ryzanstein.errors import RyzansteinError
from ryzanstein.generation.prompts import TextPrompt
from ryzanstein.router.assembly import grpc_face
from ryzanstein.router.config import RouterSettings
from ryzanstein.v1 import debug_pb2 as pb
from ryzanstein.v1 import inference_pb2 as inference
from ryzanstein.v1 import worker_pb2 as worker
from ryzanstein.v1.debug_pb2_grpc import DebugServiceStub


@asynccontextmanager
async def debugged(client: Any) -> AsyncIterator[Any]:
    async with grpc.aio.insecure_channel(f"127.0.0.1:{client.server.port}") as channel:
        yield DebugServiceStub(channel)


def ask(client: Any) -> Any:
    chat = inference.ChatRequest(
        messages=[inference.Message(role=inference.ROLE_USER, content="hello")],
        sampling=inference.SamplingParams(max_tokens=200),
    )
    return client.inference.StreamChat(inference.StreamChatRequest(chat=chat))


async def test_a_request_is_found_at_each_of_its_stages(start_node: Any, start_router: Any, until: Any) -> None:
    node = await start_node("a", prepares=set(), freeze_at=0)
    client = await start_router(node)
    requests = client.router.core.requests

    async def reached(stage: pb.RequestStage.ValueType) -> pb.FoundRequest:
        await until(lambda: [each.stage.value for each in requests()] == [stage])
        async with debugged(client) as stub:
            (found,) = (await stub.FindRequests(pb.FindRequestsRequest(), timeout=5)).requests
        return found

    node.state = worker.NODE_STATE_RECOVERING
    await until(lambda: not client.router.core.models() or not client.router.core.models()[0].ready_nodes)
    call = ask(client)
    found = await reached(pb.REQUEST_STAGE_WAITING)
    assert (found.node_id, found.tokens) == ("", 0)
    node.state = worker.NODE_STATE_READY
    found = await reached(pb.REQUEST_STAGE_SENT)
    assert (found.node_id, found.prompt_tokens) == ("a", 0)
    node.prepares = None
    found = await reached(pb.REQUEST_STAGE_PREFILL)
    assert (found.node_id, found.prompt_tokens) == ("a", 7)
    node.freeze_at = 3
    await until(lambda: [each.tokens for each in requests()] == [3])
    found = await reached(pb.REQUEST_STAGE_DECODE)
    assert found.age.ToNanoseconds() >= found.silent.ToNanoseconds() > 0
    async with debugged(client) as stub:
        for id in (found.request_id, found.generation_id, f"chatcmpl-{found.generation_id}"):
            answer = await stub.FindRequests(pb.FindRequestsRequest(id=id), timeout=5)
            assert [each.generation_id for each in answer.requests] == [found.generation_id]
        other = await stub.FindRequests(pb.FindRequestsRequest(id="other"), timeout=5)
        assert ([*other.requests], other.total) == ([], 1)
        young = pb.FindRequestsRequest()
        young.older_than.FromSeconds(60)
        assert not (await stub.FindRequests(young, timeout=5)).requests
    call.cancel()


async def test_what_is_no_generation_is_found_too(
    start_node: Any, start_router: Any, until: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A request that waits for its tenant's limits, and one for vectors."""
    client = await start_router(await start_node("a"))
    requests, go = client.router.core.requests, asyncio.Event()

    async def wait(*_: Any, **__: Any) -> Any:
        await go.wait()
        raise errors.unavailable("LIMITS_UNKNOWN", "as if the store had hung", 1.0)

    monkeypatch.setattr(type(client.router.allowance), "admit", wait)
    call = ask(client)
    asked = EmbeddingRequest("demo", (TextPrompt("one"),), request_id="vectors")
    vectors = asyncio.create_task(client.router.core.embed(asked))
    await until(lambda: len(requests()) == 2)
    async with debugged(client) as stub:
        answer = await stub.FindRequests(pb.FindRequestsRequest(), timeout=5)
        stages = {found.stage: found for found in answer.requests}
        assert set(stages) == {pb.REQUEST_STAGE_ADMITTING, pb.REQUEST_STAGE_EMBEDDING}
        assert stages[pb.REQUEST_STAGE_EMBEDDING].request_id == "vectors"
        (found,) = (await stub.FindRequests(pb.FindRequestsRequest(id="vectors"), timeout=5)).requests
        assert found.model == "demo"
    go.set()
    with pytest.raises(RyzansteinError, match="had hung"):
        await vectors
    await until(lambda: not requests())
    call.cancel()


async def test_stacks_show_the_loop_and_every_task_down_to_what_it_awaits(start_node: Any, start_router: Any) -> None:
    client = await start_router(await start_node("a"))
    at_once = pb.DumpStacksRequest()
    at_once.watched.FromSeconds(0)
    # The scripted node runs in this process. Only between two of its frames it waits for itself.
    async with debugged(client) as stub, asyncio.timeout(10):
        answer = await stub.DumpStacks(at_once)
        while not any("in _speak" in task.stack for task in answer.tasks):
            answer = await stub.DumpStacks(at_once)
    (process,) = answer.processes
    assert process.name == client.router.links.router_id
    assert any("in thread_stacks" in thread.stack for thread in process.threads)
    assert process.threads[0].state
    assert not answer.autopsies


async def test_diagnostics_have_settings_without_secrets(start_node: Any, start_router: Any) -> None:
    client = await start_router(await start_node("a"), otlp_endpoint="")
    async with debugged(client) as stub:
        answer = await stub.GetDiagnostics(pb.GetDiagnosticsRequest(), timeout=5)
    settings = json.loads(answer.settings)
    assert (answer.service, settings["session_store"], settings["redis_url"]) == ("router", "memory", "")
    assert {"python", "ryzanstein", "grpcio"} <= set(answer.versions)
    assert "ryzanstein_router_requests" in answer.metrics


async def test_a_router_that_strangers_reach_does_not_name_requests(start_node: Any, start_router: Any) -> None:
    client = await start_router(await start_node("a"))
    exposed = RouterSettings(grpc_port=0, host="0.0.0.0", insecure=True, session_store="memory", tls="off")
    assert exposed.exposed
    server = grpc_face(client.router, exposed)
    await server.start()
    try:
        async with grpc.aio.insecure_channel(f"127.0.0.1:{server.port}") as channel:
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await DebugServiceStub(channel).FindRequests(pb.FindRequestsRequest(), timeout=5)
        assert caught.value.code() == grpc.StatusCode.UNIMPLEMENTED
    finally:
        await server.stop(0)
