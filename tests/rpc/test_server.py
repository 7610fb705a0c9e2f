"""A real server over loopback: errors as statuses, health by name, reflection, pings that do not kill the channel."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import re
import sys
import time
from collections.abc import AsyncIterator, Collection
from typing import Any

import grpc
import pytest
import structlog
from google.protobuf import descriptor_pool, message_factory
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc
from prometheus_client import CollectorRegistry

from ryzanstein import errors
from ryzanstein.rpc import server as rpc_server
from ryzanstein.rpc import status
from ryzanstein.rpc.client import open_channel
from ryzanstein.rpc.interceptors import RpcMetrics
from ryzanstein.rpc.server import READINESS, STARTUP, RpcServer
from ryzanstein.v1 import inference_pb2 as inference
from ryzanstein.v1 import inference_pb2_grpc as inference_grpc

SERVICE = "ryzanstein.v1.InferenceService"


class Failing(inference_grpc.InferenceServiceServicer):
    """Fails in every way that a servicer can."""

    async def Chat(self, request: inference.ChatRequest, context: object) -> inference.ChatResponse:
        if request.model == "bug":
            raise ZeroDivisionError("secret in a stack")
        raise errors.invalid("messages", "must have at least one message")

    async def ListModels(self, request: inference.ListModelsRequest, context: object) -> inference.ListModelsResponse:
        return inference.ListModelsResponse()

    async def StreamChat(
        self, request: inference.StreamChatRequest, context: object
    ) -> AsyncIterator[inference.StreamChatResponse]:
        yield inference.StreamChatResponse()
        raise errors.no_nodes("demo", "the last one died")


@pytest.fixture
def registry() -> CollectorRegistry:
    return CollectorRegistry()


@pytest.fixture(params=[True, False], ids=["builtin", "grpcio"])
async def server(registry: CollectorRegistry, request: pytest.FixtureRequest) -> AsyncIterator[RpcServer]:
    server = RpcServer("127.0.0.1", 0, [SERVICE], metrics=RpcMetrics("test", registry), builtin=request.param)
    inference_grpc.add_InferenceServiceServicer_to_server(Failing(), server.server)
    await server.start()
    yield server
    await server.stop(0)


@pytest.fixture
async def channel(server: RpcServer) -> AsyncIterator[grpc.aio.Channel]:
    async with open_channel(f"127.0.0.1:{server.port}") as channel:
        yield channel


async def test_a_domain_error_reaches_the_client_with_its_details(channel: grpc.aio.Channel) -> None:
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await inference_grpc.InferenceServiceStub(channel).Chat(inference.ChatRequest(), timeout=5)
    error = status.error_from_rpc(caught.value)
    assert error.code is errors.Code.INVALID_ARGUMENT
    assert error.violations == (errors.FieldViolation("messages", "must have at least one message"),)


async def test_a_bug_becomes_internal_with_the_request_id_and_without_the_stack(channel: grpc.aio.Channel) -> None:
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await inference_grpc.InferenceServiceStub(channel).Chat(
            inference.ChatRequest(model="bug"), timeout=5, metadata=(("x-request-id", "request-7"),)
        )
    assert caught.value.code() is grpc.StatusCode.INTERNAL
    assert "request-7" in str(caught.value.details())
    assert "secret" not in str(caught.value.details())


@pytest.mark.parametrize("streams", [False, True])
async def test_a_call_that_failed_is_freed_without_a_collection(channel: grpc.aio.Channel, streams: bool) -> None:
    """A router collects seldom: a thousand refused prompts would stay in memory."""

    def num_kept() -> int:
        return sum(type(each).__name__ in ("_ServicerContext", "ServerCall") for each in gc.get_objects())

    stub = inference_grpc.InferenceServiceStub(channel)
    gc.collect()
    gc.disable()
    try:
        for _ in range(10):
            with contextlib.suppress(grpc.aio.AioRpcError):
                if not streams:
                    await stub.Chat(inference.ChatRequest(), timeout=5)
                async for _ in stub.StreamChat(inference.StreamChatRequest(), timeout=5):
                    pass
        await asyncio.sleep(0.1)
        assert num_kept() <= 1
    finally:
        gc.enable()


@pytest.mark.parametrize("given", ["x" * 129, "two words", "x" * 4000])
async def test_a_request_id_that_is_none_is_replaced(given: str, channel: grpc.aio.Channel) -> None:
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await inference_grpc.InferenceServiceStub(channel).Chat(
            inference.ChatRequest(model="bug"), timeout=5, metadata=(("x-request-id", given),)
        )
    assert re.fullmatch("internal error, request [0-9a-f]{32}", str(caught.value.details()))


async def test_an_error_in_a_begun_stream_comes_after_its_messages(channel: grpc.aio.Channel) -> None:
    call = inference_grpc.InferenceServiceStub(channel).StreamChat(inference.StreamChatRequest(), timeout=5)
    received = [await call.read()]
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        received.append(await call.read())
    assert received == [inference.StreamChatResponse()]
    assert status.error_from_rpc(caught.value).reason == "NO_NODES"


async def test_an_unknown_method_is_unimplemented(channel: grpc.aio.Channel) -> None:
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await channel.unary_unary(f"/{SERVICE}/Unknown")(b"", timeout=5)
    assert caught.value.code() is grpc.StatusCode.UNIMPLEMENTED


async def test_health_tells_life_readiness_and_startup_apart(server: RpcServer, channel: grpc.aio.Channel) -> None:
    stub = health_pb2_grpc.HealthStub(channel)

    async def serving(name: str) -> bool:
        reply = await stub.Check(health_pb2.HealthCheckRequest(service=name), timeout=5)
        return bool(reply.status == health_pb2.HealthCheckResponse.SERVING)

    assert [await serving(name) for name in ("", READINESS, STARTUP)] == [True, False, False]
    await server.set_ready(True)
    await server.set_started()
    assert [await serving(name) for name in ("", READINESS, STARTUP)] == [True, True, True]


async def test_reflection_lists_the_service(channel: grpc.aio.Channel) -> None:
    stub = reflection_pb2_grpc.ServerReflectionStub(channel)
    call = stub.ServerReflectionInfo(iter([reflection_pb2.ServerReflectionRequest(list_services="")]), timeout=5)
    reply = await call.read()
    assert {SERVICE, "grpc.health.v1.Health"} <= {entry.name for entry in reply.list_services_response.service}


@pytest.mark.parametrize("version", ["v1", "v1alpha"])
async def test_reflection_of_both_versions_describes_all_services(channel: grpc.aio.Channel, version: str) -> None:
    """The messages of v1 are generated from what the server says of itself, and then used."""
    request, response = reflection_pb2.ServerReflectionRequest, reflection_pb2.ServerReflectionResponse
    ask = channel.stream_stream(
        f"/grpc.reflection.{version}.ServerReflection/ServerReflectionInfo",
        request_serializer=request.SerializeToString,
        response_deserializer=response.FromString,
    )
    service = f"grpc.reflection.{version}.ServerReflection"
    call = ask(
        iter([request(list_services=""), request(file_containing_symbol=service), request(file_by_filename="x")]), timeout=5
    )
    listed = {entry.name for entry in (await call.read()).list_services_response.service}
    assert {SERVICE, "grpc.health.v1.Health", service} <= listed
    (file,) = (await call.read()).file_descriptor_response.file_descriptor_proto
    pool = descriptor_pool.DescriptorPool()
    pool.AddSerializedFile(file)
    described = pool.FindServiceByName(service).methods_by_name["ServerReflectionInfo"]
    made = message_factory.GetMessageClass(described.input_type)(list_services="*")
    assert request.FromString(made.SerializeToString()).list_services == "*"
    assert (await call.read()).error_response.error_code == grpc.StatusCode.NOT_FOUND.value[0]


async def test_a_taken_port_is_an_os_error(server: RpcServer) -> None:
    second = RpcServer("127.0.0.1", server.port, [])
    with pytest.raises(OSError, match="cannot listen"):
        await second.start()


PROGRAM = """
import asyncio, sys
from ryzanstein.rpc.server import RpcServer

async def main():
    try:
        await RpcServer("127.0.0.1", int(sys.argv[1]), []).start()
    except OSError as error:
        print(error)

asyncio.run(main())
"""


async def test_a_process_whose_port_is_taken_ends_without_a_stray_traceback(server: RpcServer) -> None:
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-c", PROGRAM, str(server.port), stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.PIPE
    )
    out, err = await asyncio.wait_for(process.communicate(), 30)
    assert out.decode().startswith("cannot listen on 127.0.0.1:")
    assert "Traceback" not in err.decode()
    assert process.returncode == 0


async def test_calls_are_measured_by_method_and_how_they_ended(channel: grpc.aio.Channel, registry: CollectorRegistry) -> None:
    stub = inference_grpc.InferenceServiceStub(channel)
    await stub.ListModels(inference.ListModelsRequest(), timeout=5)
    for model in ("", "bug"):
        with pytest.raises(grpc.aio.AioRpcError):
            await stub.Chat(inference.ChatRequest(model=model), timeout=5)
    for _ in range(2):
        with pytest.raises(grpc.aio.AioRpcError):
            _ = [_ async for _ in stub.StreamChat(inference.StreamChatRequest(), timeout=5)]
    with pytest.raises(grpc.aio.AioRpcError):
        await stub.CancelGeneration(inference.CancelGenerationRequest(), timeout=5)
    ended = {
        (sample.labels["method"], sample.labels["code"]): sample.value
        for family in registry.collect()
        for sample in family.samples
        if sample.name == "ryzanstein_test_rpc_seconds_count"
    }
    assert ended == {
        ("InferenceService/Chat", "INVALID_ARGUMENT"): 1,
        ("InferenceService/Chat", "INTERNAL"): 1,
        ("InferenceService/StreamChat", "UNAVAILABLE"): 2,
        ("InferenceService/ListModels", "OK"): 1,
        ("InferenceService/CancelGeneration", "UNIMPLEMENTED"): 1,
    }
    running = [s.value for family in registry.collect() for s in family.samples if s.name == "ryzanstein_test_rpcs_running"]
    assert running == [0, 0, 0, 0]


async def test_polls_that_succeed_are_logged_at_debug(channel: grpc.aio.Channel) -> None:
    """Their lines would hide those of requests."""
    with structlog.testing.capture_logs() as lines:
        await inference_grpc.InferenceServiceStub(channel).ListModels(inference.ListModelsRequest(), timeout=5)
        with pytest.raises(grpc.aio.AioRpcError):
            await inference_grpc.InferenceServiceStub(channel).Chat(inference.ChatRequest(), timeout=5)
    calls = {line["method"].rpartition("/")[2]: line["log_level"] for line in lines if line["event"] == "call"}
    assert calls == {"ListModels": "debug", "Chat": "info"}


class Slow(inference_grpc.InferenceServiceServicer):
    """Holds up the whole event loop with each call, so that the next ones wait to be read."""

    async def ListModels(self, request: inference.ListModelsRequest, context: object) -> inference.ListModelsResponse:
        time.sleep(0.4)  # noqa: ASYNC251 (that is the fault)
        return inference.ListModelsResponse()


@pytest.mark.long
@pytest.mark.parametrize(("unread_s", "codes"), [(1, {"OK", "CANCELLED"}), (None, {"OK"})])
async def test_a_call_that_waits_to_be_read_waits_for_its_own_deadline(
    monkeypatch: pytest.MonkeyPatch, unread_s: int | None, codes: set[str]
) -> None:
    if unread_s is not None:
        monkeypatch.setattr(rpc_server, "_UNREAD_CALL_S", unread_s)
    server = RpcServer("127.0.0.1", 0, [SERVICE], builtin=False)
    inference_grpc.add_InferenceServiceServicer_to_server(Slow(), server.server)
    await server.start()

    def asked() -> set[str]:
        with grpc.insecure_channel(f"127.0.0.1:{server.port}") as channel:
            stub = inference_grpc.InferenceServiceStub(channel)
            calls = [stub.ListModels.future(inference.ListModelsRequest(), timeout=30) for _ in range(10)]
            return {call.code().name for call in calls}

    assert await asyncio.to_thread(asked) == codes
    await server.stop(0)


class Late(inference_grpc.InferenceServiceServicer):
    """Holds up the event loop with its first call, while the others arrive."""

    def __init__(self) -> None:
        self._held_s = 2.0

    async def ListModels(self, request: inference.ListModelsRequest, context: object) -> inference.ListModelsResponse:
        held_s, self._held_s = self._held_s, 0.0
        time.sleep(held_s)  # noqa: ASYNC251 (that is the fault)
        return inference.ListModelsResponse()


@pytest.mark.long
@pytest.mark.parametrize(("unread", "codes"), [(100, {"OK", "CANCELLED"}), (None, {"OK"})])
async def test_of_many_calls_that_wait_to_be_read_none_is_cancelled_by_chance(
    monkeypatch: pytest.MonkeyPatch, unread: int | None, codes: set[str]
) -> None:
    if unread is not None:
        monkeypatch.setattr(rpc_server, "_UNREAD_CALLS", unread)
    server = RpcServer("127.0.0.1", 0, [SERVICE], builtin=False)
    inference_grpc.add_InferenceServiceServicer_to_server(Late(), server.server)
    await server.start()

    def asked() -> set[str]:
        with grpc.insecure_channel(f"127.0.0.1:{server.port}") as channel:
            stub = inference_grpc.InferenceServiceStub(channel)
            calls = [stub.ListModels.future(inference.ListModelsRequest(), timeout=60) for _ in range(1500)]
            return {call.code().name for call in calls}

    assert await asyncio.to_thread(asked) == codes
    await server.stop(0)


@pytest.mark.parametrize("server", [False], indirect=True)
async def test_a_call_costs_one_wait_however_many_methods_there_are(server: RpcServer, monkeypatch: pytest.MonkeyPatch) -> None:
    """gRPC waits for the next call of each registered method apart: the cost of a call grew with the number of methods."""
    waits: list[int] = []
    wait = asyncio.wait

    def counted(futures: Collection[asyncio.Future[object]], **more: Any) -> Any:
        waits.append(len(futures))
        return wait(futures, **more)

    monkeypatch.setattr(asyncio, "wait", counted)
    async with open_channel(f"127.0.0.1:{server.port}") as channel:
        for _ in range(3):
            await inference_grpc.InferenceServiceStub(channel).ListModels(inference.ListModelsRequest())
    assert waits, "gRPC waits in another way now: measure a call again"
    assert max(waits) == 1
