"""A node that sends what is no message: its link ends as a breach of the protocol, and the router goes on."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

import grpc
import pytest

from ryzanstein.v1 import worker_pb2 as worker

GARBAGE = b"\x12\x05ab"
HELLO = worker.ConnectResponse(hello=worker.NodeHello(node_id="mad", incarnation="1")).SerializeToString()


@pytest.mark.parametrize("frames", [(GARBAGE,), (HELLO, GARBAGE), (HELLO, HELLO, GARBAGE)], ids=["hello", "next", "later"])
async def test_a_node_that_sends_garbage_is_linked_again_and_again(
    frames: tuple[bytes, ...],
    start_node: Callable[..., Awaitable[Any]],
    start_router: Callable[..., Awaitable[Any]],
    until: Callable[..., Awaitable[None]],
    capfd: pytest.CaptureFixture[str],
) -> None:
    connected = 0

    async def connect(requests: Any, context: Any) -> AsyncIterator[bytes]:
        nonlocal connected
        connected += 1
        await anext(aiter(requests))
        for frame in frames:
            yield frame

    mad = grpc.aio.server()
    handler = grpc.stream_stream_rpc_method_handler(connect)
    mad.add_generic_rpc_handlers((grpc.method_handlers_generic_handler("ryzanstein.v1.WorkerService", {"Connect": handler}),))
    port = mad.add_insecure_port("127.0.0.1:0")
    await mad.start()
    well = await start_node("well")
    router = await start_router(nodes=f"127.0.0.1:{port},{well.address}", ready_nodes=1)
    await until(lambda: connected >= 2, timeout_s=30)
    assert len(router.router.core.models()) == 1, "the other node serves"
    if len(frames) > 1:
        await until(lambda: router.value("link_losses_total", node_id="mad", cause="protocol") >= 1)
    await mad.stop(0)
    visible = "".join(capfd.readouterr())
    assert "Task exception" not in visible
    assert "AttributeError" not in visible
