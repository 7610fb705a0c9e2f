"""A node of several models, as a process: each model has ranks, streams, load and state of its own."""

from __future__ import annotations

import asyncio
import os
import re
import signal
import urllib.request
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import grpc
import pytest

from ryzanstein.rpc.client import open_channel
from ryzanstein.rpc.status import error_from_rpc
from ryzanstein.v1 import worker_pb2 as pb
from ryzanstein.v1.worker_pb2_grpc import WorkerServiceStub

pytestmark = [pytest.mark.cluster, pytest.mark.long]


@pytest.fixture(scope="module")
def two(node_process: Any, second: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    """A node of the demo model and the second one, which each test leaves ready."""
    node = node_process(tmp_path_factory.mktemp("two") / "node.log", "--more-models", str(second), tp=1)
    try:
        node.wait_event("ranks ready")
        yield node
    finally:
        node.close()


@pytest.fixture
async def node_stub(two: Any) -> Any:
    async with open_channel(two.address) as channel:
        yield WorkerServiceStub(channel)


async def ready(stub: Any, model: str, eventually: Callable[..., Any]) -> pb.GetStatusResponse:
    """The status of a model, when it is ready."""

    async def status() -> pb.GetStatusResponse | None:
        answer = await stub.GetStatus(pb.GetStatusRequest(model=model))
        return answer if answer.beat.state == pb.NODE_STATE_READY else None

    answer: pb.GetStatusResponse = await eventually(status)
    return answer


def of(attempt: Any, model: str) -> Any:
    return replace(attempt, request=replace(attempt.request, model=model))


async def test_each_model_is_asked_on_a_stream_of_its_own(
    two: Any, node_stub: Any, connect: Any, attempt: Any, eventually: Any
) -> None:
    first, other = await ready(node_stub, "", eventually), await ready(node_stub, "second", eventually)
    assert (first.beat.model, list(first.beat.other_models), first.node_id) == ("demo", ["second"], "node-t")
    assert (other.beat.model, list(other.beat.other_models), other.node_id) == ("second", [], "node-t/second")
    assert {rank.pid for rank in first.ranks}.isdisjoint(rank.pid for rank in other.ranks)
    async with connect(two.address) as demo, connect(two.address, model="second") as link:
        assert (demo.hello.model, link.hello.model, link.hello.beat.model) == ("", "second", "second")
        counted = await demo.run(attempt("Count from 1 to 9.", max_tokens=20))
        assert counted.text() == "1 2 3 4 5 6 7 8 9"
        alone = await link.run(of(attempt(max_tokens=30), "second"))
        assert (alone.failed, alone.indices()) == (None, list(range(30)))
        wrong = await link.run(of(attempt(), "demo"))
        assert wrong.failed.reason == "MODEL_NOT_SERVED"
        refused = await demo.run(of(attempt(), "second"))
        assert refused.failed.reason == "MODEL_NOT_SERVED"
    count = await node_stub.CountPromptTokens(pb.CountPromptTokensRequest(model="second", text="hello"))
    assert count.tokens > 0


async def test_a_stream_for_a_model_that_the_node_does_not_have_is_refused(two: Any) -> None:
    async with open_channel(two.address, retries=False) as channel:
        call = WorkerServiceStub(channel).Connect()
        await call.write(pb.ConnectRequest(hello=pb.RouterHello(router_id="r", model="third" * 100)))
        with pytest.raises(grpc.aio.AioRpcError) as refused:
            await call.read()
        error = error_from_rpc(refused.value)
        assert (error.code.name, error.reason) == ("UNAVAILABLE", "MODEL_NOT_SERVED")
        assert len(error.message) < 300


async def test_one_models_crash_leaves_the_others_answers_alone(
    two: Any, node_stub: Any, connect: Any, attempt: Any, *, eventually: Any, health: Any
) -> None:
    lost, before = await ready(node_stub, "second", eventually), await ready(node_stub, "", eventually)
    async with connect(two.address) as demo, connect(two.address, model="second") as link:
        running = await demo.submit(attempt("Count from 1 to 200.", max_tokens=400, ignore_eos=True))
        doomed = await link.submit(of(attempt(max_tokens=1500, ignore_eos=True), "second"))
        await demo.wait(running, lambda stream: len(stream.tokens()) > 20)
        await link.wait(doomed, lambda stream: len(stream.tokens()) > 5)
        os.kill(lost.ranks[0].pid, signal.SIGKILL)
        failed = await link.wait(doomed, lambda stream: stream.failed is not None)
        assert (failed.failed.reason, failed.failed.node_fault) == ("RANK_LOST", True)
        done = await demo.wait(running, lambda stream: bool(stream.finished) or stream.failed is not None)
        assert (done.failed, done.indices()) == (None, list(range(400)))
        assert await health(two.address, "") == "SERVING"
        again = await ready(node_stub, "second", eventually)
        assert again.rank_restarts == lost.rank_restarts + 1
        assert (await ready(node_stub, "", eventually)).rank_restarts == before.rank_restarts
        assert (await link.run(of(attempt(max_tokens=10), "second"))).failed is None


async def test_a_drain_is_one_of_all_models(two: Any, node_stub: Any, connect: Any, attempt: Any, eventually: Any) -> None:
    await ready(node_stub, "second", eventually)
    async with connect(two.address) as demo, connect(two.address, model="second") as link:
        long = await link.submit(of(attempt(max_tokens=1500, ignore_eos=True), "second"))
        await link.wait(long, lambda stream: len(stream.tokens()) > 5)
        request = pb.DrainRequest()
        request.grace.FromMilliseconds(1)
        assert (await node_stub.Drain(request)).unfinished == 1
        for stream, model in ((demo, "demo"), (link, "second")):
            assert (await stream.run(of(attempt(), model))).failed.reason == "DRAINING"
        await node_stub.Undrain(pb.UndrainRequest())
        for stream, model in ((demo, "demo"), (link, "second")):
            assert (await stream.run(of(attempt(max_tokens=5), model))).failed is None


async def test_a_model_is_replaced_by_name_and_its_metrics_have_its_name(
    two: Any, node_stub: Any, connect: Any, attempt: Any, *, eventually: Any, demo_dir: Path, second: Path
) -> None:
    await ready(node_stub, "second", eventually)
    async with connect(two.address) as demo:
        running = await demo.submit(attempt("Count from 1 to 200.", max_tokens=600, ignore_eos=True))
        await demo.wait(running, lambda stream: len(stream.tokens()) > 5)
        await node_stub.LoadModel(pb.LoadModelRequest(model="second", path=str(demo_dir)))
        async with connect(two.address, model="second") as link:
            counted = await link.run(of(attempt("Count from 1 to 9.", max_tokens=20), "second"))
            assert counted.text() == "1 2 3 4 5 6 7 8 9"
        done = await demo.wait(running, lambda stream: bool(stream.finished) or stream.failed is not None)
        assert (done.failed, done.indices()) == (None, list(range(600)))

    async def counted_tokens() -> bool:
        page = await asyncio.to_thread(_page, two.metrics_port)
        assert page.count("# TYPE ryzanstein_worker_running gauge") == 1
        computed = dict(re.findall(r'ryzanstein_worker_tokens_total{kind="decode",model="(\w+)"} ([0-9.]+)', page))
        return float(computed["demo"]) > float(computed["second"]) > 0

    await eventually(counted_tokens)
    await node_stub.LoadModel(pb.LoadModelRequest(model="second", path=str(second)))


def _page(port: int) -> str:
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=5) as response:
        return str(response.read().decode())


async def test_pinned_ranks_of_different_models_have_cores_of_their_own(
    start_node: Callable[..., Any], second: Path, eventually: Any
) -> None:
    node = start_node("--more-models", str(second), "--pin", tp=1)
    node.wait_event("ranks ready")
    async with open_channel(node.address) as channel:
        stub = WorkerServiceStub(channel)
        pids = [(await ready(stub, model, eventually)).ranks[0].pid for model in ("", "second")]
    cores = [os.sched_getaffinity(pid) for pid in pids]
    assert [len(each) for each in cores] == [1, 1]
    assert len(os.sched_getaffinity(0)) == 1 or cores[0] != cores[1]


@pytest.mark.parametrize(
    ("models", "wording"),
    [
        ("demo=/elsewhere", "more than one model 'demo'"),
        ("/a/x,/b/x", "more than one model 'x'"),
        (",".join(f"/m{number}" for number in range(32)), "more than 31"),
        ("x" * 300 + "=/a", "1 to 128 characters, got 300"),
    ],
)
def test_models_that_cannot_be_told_apart_are_refused(start_node: Callable[..., Any], models: str, wording: str) -> None:
    node = start_node("--more-models", models, tp=1)
    assert node.process.wait(30) == 2
    assert wording in node.log_path.read_text()


def test_a_second_model_that_cannot_be_read_ends_the_start_with_the_reason(
    start_node: Callable[..., Any], tmp_path: Path
) -> None:
    node = start_node("--more-models", str(tmp_path / "nothing"), tp=1)
    assert node.process.wait(60) == 1
    assert "nothing" in node.log_path.read_text()
