"""An agent that was stopped blames nobody for what it did not hear meanwhile."""

from __future__ import annotations

import asyncio
import json
import os
import signal
from contextlib import suppress

import grpc
import pytest
from grpc.aio import insecure_channel

from ryzanstein.v1 import worker_pb2 as pb
from ryzanstein.v1.worker_pb2_grpc import WorkerServiceStub

pytestmark = pytest.mark.long

BEAT_S = 0.1
SILENCE_S = 1.0
STOP_S = 3.0


async def keep_beating(call, sequence: int = 1) -> None:
    while True:
        await call.write(pb.ConnectRequest(beat=pb.RouterBeat(sequence=sequence)))
        await asyncio.sleep(BEAT_S)
        sequence += 1


async def test_a_router_that_spoke_while_the_agent_was_stopped_is_not_silent(start_node):
    node = await asyncio.to_thread(start_node, "--tuning", json.dumps({"router_silence_s": SILENCE_S}), tp=1)
    async with insecure_channel(node.address) as channel:
        call = WorkerServiceStub(channel).Connect()
        hello = pb.RouterHello(router_id="router-t")
        hello.beat_interval.FromMilliseconds(int(BEAT_S * 1000))
        await call.write(pb.ConnectRequest(hello=hello))
        beating = asyncio.create_task(keep_beating(call))
        try:
            for _ in range(3):
                os.kill(node.process.pid, signal.SIGSTOP)
                await asyncio.sleep(STOP_S)
                os.kill(node.process.pid, signal.SIGCONT)
                await silent_before(call, 2 * SILENCE_S)
        finally:
            beating.cancel()
            with suppress(asyncio.CancelledError, grpc.aio.AioRpcError):
                await beating
            call.cancel()
    message = [line["event"] for line in node.events]
    assert message.count("router connected") == 1
    assert message.count("event loop stalled") >= 3


async def silent_before(call, seconds: float) -> None:
    """The stream goes on for so long, and the agent answers."""
    until = asyncio.get_running_loop().time() + seconds
    acks = 0
    while asyncio.get_running_loop().time() < until:
        async with asyncio.timeout(20):
            frame = await call.read()
        assert frame is not grpc.aio.EOF
        acks += frame.HasField("ack")
    assert acks
