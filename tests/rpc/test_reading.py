"""What is no request gets a typed status in all four kinds of calls, and nothing but JSON is written about it."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

import grpc
import pytest
from google.protobuf.duration_pb2 import Duration
from google.protobuf.timestamp_pb2 import Timestamp
from grpc_health.v1 import health_pb2
from prometheus_client import CollectorRegistry

from ryzanstein.errors import Code, RyzansteinError
from ryzanstein.rpc import status
from ryzanstein.rpc.reading import RequestReading, malformed_requests
from ryzanstein.rpc.server import RpcServer
from ryzanstein.v1 import inference_pb2 as inference
from ryzanstein.v1 import orchestrator_pb2 as orchestrator
from ryzanstein.v1 import worker_pb2 as worker

SERVICE = "test.Kinds"
GOOD = inference.CancelGenerationRequest(generation_id="g").SerializeToString()
BAD = b"\x0a\x05ab"
MANY = b"\x12\x00" * 100_000


async def _unary(request: Any, context: Any) -> Any:
    return inference.Message(content=request.generation_id)


async def _server_stream(request: Any, context: Any) -> AsyncIterator[Any]:
    yield inference.Message(content=request.generation_id)


async def _client_stream(requests: Any, context: Any) -> Any:
    return inference.Message(content="".join([request.generation_id async for request in requests]))


async def _both(requests: Any, context: Any) -> AsyncIterator[Any]:
    async for request in requests:
        yield inference.Message(content=request.generation_id)


HANDLERS: dict[str, tuple[Callable[..., Any], Any]] = {
    "Unary": (grpc.unary_unary_rpc_method_handler, _unary),
    "ServerStream": (grpc.unary_stream_rpc_method_handler, _server_stream),
    "ClientStream": (grpc.stream_unary_rpc_method_handler, _client_stream),
    "Both": (grpc.stream_stream_rpc_method_handler, _both),
}


@pytest.fixture
def registry() -> CollectorRegistry:
    return CollectorRegistry()


@pytest.fixture
async def channel(registry: CollectorRegistry) -> AsyncIterator[grpc.aio.Channel]:
    server = RpcServer("127.0.0.1", 0, [], reading=RequestReading(malformed=malformed_requests("test", registry)))
    handlers = {
        name: make(
            behavior,
            request_deserializer=inference.CancelGenerationRequest.FromString,
            response_serializer=inference.Message.SerializeToString,
        )
        for name, (make, behavior) in HANDLERS.items()
    }
    server.server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(SERVICE, handlers),))
    await server.start()
    async with grpc.aio.insecure_channel(f"127.0.0.1:{server.port}") as channel:
        yield channel
    await server.stop(0)


async def ask(channel: grpc.aio.Channel, name: str, *requests: bytes) -> list[str]:
    """The contents of what came back, in any kind of call."""
    path = f"/{SERVICE}/{name}"
    answers: list[bytes] = []
    match name:
        case "Unary":
            answers.append(await channel.unary_unary(path)(requests[0], timeout=10))
        case "ServerStream":
            answers += [answer async for answer in channel.unary_stream(path)(requests[0], timeout=10)]
        case "ClientStream":
            answers.append(await channel.stream_unary(path)(iter(requests), timeout=10))
        case _:
            answers += [answer async for answer in channel.stream_stream(path)(iter(requests), timeout=10)]
    return [inference.Message.FromString(answer).content for answer in answers]


async def refused(answer: Awaitable[object]) -> RyzansteinError:
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await answer
    return status.error_from_rpc(caught.value)


@pytest.mark.parametrize("name", HANDLERS)
async def test_every_kind_of_call_refuses_what_is_no_message(
    name: str, channel: grpc.aio.Channel, registry: CollectorRegistry, capfd: pytest.CaptureFixture[str]
) -> None:
    assert await ask(channel, name, GOOD) == ["g"]
    error = await refused(ask(channel, name, BAD))
    assert (error.code, error.reason) == (Code.INVALID_ARGUMENT, "MALFORMED_MESSAGE")
    assert error.metadata == {"type": "ryzanstein.v1.CancelGenerationRequest"}
    many = await refused(ask(channel, name, MANY))
    assert (many.code, many.reason) == (Code.INVALID_ARGUMENT, "TOO_MANY_RECORDS")
    assert await ask(channel, name, GOOD) == ["g"], "the server goes on"
    counted = registry.get_sample_value("ryzanstein_test_malformed_requests_total", {"service": SERVICE, "method": name})
    assert counted == 2
    assert "Traceback" not in "".join(capfd.readouterr())


@pytest.mark.parametrize("name", ["ClientStream", "Both"])
async def test_a_stream_ends_where_it_is_torn(name: str, channel: grpc.aio.Channel) -> None:
    async def requests() -> AsyncIterator[bytes]:
        yield GOOD
        yield BAD
        # At once it would race with the end: the library's client reports INTERNAL if that comes while it sends.
        await asyncio.sleep(5)
        yield GOOD

    path = f"/{SERVICE}/{name}"
    if name == "ClientStream":
        error = await refused(channel.stream_unary(path)(requests(), timeout=10))
    else:
        answers = channel.stream_stream(path)(requests(), timeout=10)
        assert inference.Message.FromString(await anext(aiter(answers))).content == "g"
        error = await refused(anext(aiter(answers)))
    assert error.reason == "MALFORMED_MESSAGE"


async def test_probes_are_answered_in_kind(channel: grpc.aio.Channel, capfd: pytest.CaptureFixture[str]) -> None:
    for kind in (channel.unary_unary, channel.unary_stream):
        path = "/grpc.health.v1.Health/" + ("Check" if kind == channel.unary_unary else "Watch")
        call: Any = kind(path)(BAD, timeout=10)
        error = await refused(call if kind == channel.unary_unary else anext(aiter(call)))
        assert error.reason == "MALFORMED_MESSAGE"
    watch = channel.unary_stream("/grpc.health.v1.Health/Watch")(b"", timeout=10)
    assert health_pb2.HealthCheckResponse.FromString(await anext(aiter(watch))).status == 1
    watch.cancel()
    assert "Traceback" not in "".join(capfd.readouterr())


LATE = Timestamp(seconds=10**18)
TIMES = [
    (worker.ConnectRequest(hello={"beat_interval": Duration(seconds=10**18)}), "hello.beat_interval"),
    (worker.ConnectRequest(hello={"beat_interval": Duration(seconds=1, nanos=-5)}), "hello.beat_interval"),
    (worker.ConnectRequest(submit={"deadline": LATE}), "submit.deadline"),
    (worker.ConnectRequest(submit={"deadline": Timestamp(nanos=-1)}), "submit.deadline"),
    (worker.ConnectRequest(submit={"time_left": Duration(nanos=2 * 10**9)}), "submit.time_left"),
    (worker.DrainRequest(grace=Duration(seconds=-(10**18))), "grace"),
    (orchestrator.RegisterNodeRequest(node={"join_time": Timestamp(seconds=-(10**18))}), "node.join_time"),
    (orchestrator.HeartbeatRequest(beat={"time": LATE}), "beat.time"),
]


@pytest.mark.parametrize(("request_", "field"), TIMES, ids=lambda case: case if isinstance(case, str) else "")
def test_a_time_that_is_none_is_refused_by_the_name_of_its_field(request_: Any, field: str) -> None:
    read = RequestReading().deserializer("/s/m", type(request_).FromString)
    assert read is not None
    error = read(request_.SerializeToString()).error
    assert (error.code, error.reason) == (Code.INVALID_ARGUMENT, "INVALID_ARGUMENT")
    assert [violation.field for violation in error.violations] == [field]


@pytest.mark.parametrize(
    "request_",
    [
        worker.DrainRequest(grace=Duration(seconds=-3, nanos=-5)),
        worker.DrainRequest(grace=Duration(seconds=315_576_000_000)),
        worker.ConnectRequest(submit={"deadline": Timestamp(seconds=253_402_300_799, nanos=999_999_999)}),
        worker.ConnectRequest(),
        orchestrator.HeartbeatRequest(beat={"state": 77}),  # type: ignore[arg-type]
    ],
)
def test_odd_times_and_unknown_states_pass(request_: Any) -> None:
    read = RequestReading().deserializer("/s/m", type(request_).FromString)
    assert read is not None
    assert read(request_.SerializeToString()) == request_


async def test_what_a_library_describes_and_does_not_serve_is_unimplemented(
    channel: grpc.aio.Channel, capfd: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await channel.unary_unary("/grpc.health.v1.Health/List")(b"", timeout=10)
    assert caught.value.code() is grpc.StatusCode.UNIMPLEMENTED
    assert "Traceback" not in "".join(capfd.readouterr())
