"""Operators whose calls end before the node has done what they asked for: the node is never in between for good."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import grpc
import pytest

from ryzanstein.rpc.client import open_channel
from ryzanstein.v1 import worker_pb2 as pb
from ryzanstein.v1.worker_pb2_grpc import WorkerServiceStub

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(400), pytest.mark.long]

START_S = 120


async def becomes(stub: Any, wanted: Callable[[pb.Beat], bool]) -> pb.Beat:
    """The node's word of itself as soon as it is what is wanted."""
    beat = pb.Beat()
    try:
        async with asyncio.timeout(START_S):
            while not wanted(beat):
                await asyncio.sleep(0.05)
                beat = (await stub.GetStatus(pb.GetStatusRequest())).beat
    except TimeoutError:
        raise AssertionError(f"the node is {pb.NodeState.Name(beat.state)}: {beat.reason}") from None
    return beat


def serves(name: str) -> Callable[[pb.Beat], bool]:
    return lambda beat: beat.state == pb.NODE_STATE_READY and beat.model == name


def has_no_model(beat: pb.Beat) -> bool:
    return beat.state == pb.NODE_STATE_STARTING and beat.reason == "no model is loaded"


async def leave(call: Any, after_s: float) -> None:
    """The caller goes away after that time. A fast machine may have answered by then: the node owes the same either way."""
    await asyncio.sleep(after_s)
    call.cancel()
    with contextlib.suppress(asyncio.CancelledError, grpc.aio.AioRpcError):
        await call


def load(stub: Any, name: str, path: Path) -> Any:
    return stub.LoadModel(pb.LoadModelRequest(model=name, path=str(path)))


async def test_a_model_whose_loading_has_begun_is_loaded_whoever_waits_for_it(start_node: Any, demo_dir: Path) -> None:
    """The caller leaves while the old ranks end, while the tokenizer is read, and while the new ranks start."""
    node = start_node(tp=1)
    await asyncio.to_thread(node.wait_event, "ranks ready", START_S)
    async with open_channel(node.address) as channel:
        stub = WorkerServiceStub(channel)
        for number, after_s in enumerate((0.02, 0.08)):
            await leave(load(stub, f"model-{number}", demo_dir), after_s)
            await becomes(stub, serves(f"model-{number}"))
        with pytest.raises(grpc.aio.AioRpcError) as late:
            await stub.LoadModel(pb.LoadModelRequest(model="slow", path=str(demo_dir)), timeout=0.05)
        assert late.value.code() is grpc.StatusCode.DEADLINE_EXCEEDED
        await becomes(stub, serves("slow"))
        unloading = stub.UnloadModel(pb.UnloadModelRequest(model="slow"))
        await leave(unloading, 0.01)
        await becomes(stub, has_no_model)
        await load(stub, "again", demo_dir)
        await becomes(stub, serves("again"))


async def test_of_several_models_at_once_the_node_serves_one_and_tells_each_caller_the_truth(
    start_node: Any, demo_dir: Path
) -> None:
    node = start_node(model=None)
    async with open_channel(node.address) as channel:
        stub = WorkerServiceStub(channel)
        calls = [load(stub, name, demo_dir) for name in ("a", "b", "b", "c")]
        await leave(load(stub, "left", demo_dir), 0.05)
        reported = await asyncio.gather(*calls, return_exceptions=True)
        beat = await becomes(stub, lambda beat: beat.state == pb.NODE_STATE_READY)
        for name, answer in zip(("a", "b", "b", "c"), reported, strict=True):
            if isinstance(answer, grpc.aio.AioRpcError):
                assert "unloaded or replaced" in (answer.details() or "")
            else:
                assert isinstance(answer, pb.LoadModelResponse)
                assert beat.model in (name, "left")
        assert await becomes(stub, serves(beat.model))


async def test_a_directory_that_cannot_be_read_leaves_no_node_that_starts_for_ever(start_node: Any, tmp_path: Path) -> None:
    """What the loader did not expect: a directory where a file should be."""
    (tmp_path / "config.json").mkdir()
    (tmp_path / "tokenizer.json").mkdir()
    node = start_node(model=None)
    async with open_channel(node.address) as channel:
        stub = WorkerServiceStub(channel)
        with pytest.raises(grpc.aio.AioRpcError):
            await load(stub, "odd", tmp_path)
        await becomes(stub, lambda beat: beat.state == pb.NODE_STATE_FAILED)


async def test_a_drain_that_nobody_waits_for_is_still_a_drain(start_node: Any, connect: Any, attempt: Any) -> None:
    node = start_node(tp=1)
    await asyncio.to_thread(node.wait_event, "ranks ready", START_S)
    async with open_channel(node.address) as channel, connect(node.address) as link:
        stub = WorkerServiceStub(channel)
        handle = await link.submit(attempt(max_tokens=1900, ignore_eos=True))
        await link.wait(handle, lambda stream: len(stream.tokens()) > 2)
        draining = stub.Drain(pb.DrainRequest())
        await leave(draining, 0.2)
        await becomes(stub, lambda beat: beat.state == pb.NODE_STATE_DRAINING)
        assert (await link.run(attempt())).failed.reason == "DRAINING"
        await stub.Undrain(pb.UndrainRequest())
        await becomes(stub, lambda beat: beat.state == pb.NODE_STATE_READY)
        await link.cancel(handle)
