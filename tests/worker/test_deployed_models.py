"""A node as a process follows its orchestrator: models beside each other, replaced, refused, put to sleep."""

from __future__ import annotations

import asyncio
import json
import shutil
from collections.abc import AsyncIterator, Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from tests.worker.small_orchestrator import SmallOrchestrator

from ryzanstein.cluster import Deployment
from ryzanstein.rpc.client import open_channel
from ryzanstein.v1 import orchestrator_pb2 as orchestrator_pb
from ryzanstein.v1 import worker_pb2 as pb
from ryzanstein.v1.worker_pb2_grpc import WorkerServiceStub

pytestmark = pytest.mark.cluster

COUNTED = "1 2 3 4 5 6 7 8 9"
READY, FAILED = pb.NODE_STATE_READY, pb.NODE_STATE_FAILED


@pytest.fixture
def copy_of_demo(demo_dir: Path, tmp_path: Path) -> Path:
    copy = tmp_path / "copy"
    shutil.copytree(demo_dir, copy, ignore=shutil.ignore_patterns("*.py", "__pycache__"))
    return copy


@pytest.fixture
def broken(copy_of_demo: Path) -> Path:
    """One layer more than there are tensors for: only the ranks find that out."""
    config = json.loads((copy_of_demo / "config.json").read_text())
    (copy_of_demo / "config.json").write_text(json.dumps({**config, "num_hidden_layers": config["num_hidden_layers"] + 1}))
    return copy_of_demo


@pytest.fixture
async def orchestrator() -> AsyncIterator[SmallOrchestrator]:
    servicer = SmallOrchestrator()
    await servicer.serve()
    servicer.instruct()
    yield servicer
    await servicer.server.stop(0)


@pytest.fixture
async def joined(orchestrator: SmallOrchestrator, start_node: Any) -> Callable[..., Any]:
    """Starts a node that serves the demo model in this cluster."""

    async def join(*flags: str, **more: Any) -> Any:
        node = start_node("--orchestrator", orchestrator.address, *flags, tp=1, **more)
        await orchestrator.until(lambda models: not models or all(each.state == READY for each in models.values()))
        return node

    return join


def ready(name: str, revision: int = 0) -> Callable[[dict[str, Any]], bool]:
    """Whether this revision of a model is ready."""
    return lambda models: name in models and (models[name].state, models[name].revision) == (READY, revision)


def of(attempt: Any, model: str) -> Any:
    return replace(attempt, request=replace(attempt.request, model=model))


async def test_models_are_deployed_beside_what_the_node_serves_and_removed_again(
    joined: Any, orchestrator: SmallOrchestrator, connect: Any, attempt: Any, second: Path
) -> None:
    node = await joined()
    async with connect(node.address) as demo:
        running = await demo.submit(attempt("Count from 1 to 200.", max_tokens=1500, ignore_eos=True))
        orchestrator.instruct(Deployment("second", str(second), 1, 1))
        beat = await orchestrator.until(ready("second", 1))
        reports = {report.model: report for report in beat.models}
        assert (reports["demo"].started_with, reports["second"].started_with) == (True, False)
        assert 0 < reports["second"].memory_bytes < beat.memory_bytes
        await demo.until(lambda: list(demo.beats[-1][1].other_models) == ["second"])
        async with connect(node.address, model="second") as link:
            assert link.hello.node_id == "node-t/second"
            assert (await link.run(of(attempt(max_tokens=10), "second"))).indices() == list(range(10))
            last = await link.submit(of(attempt(max_tokens=300, ignore_eos=True), "second"))
            await link.wait(last, lambda stream: len(stream.tokens()) > 2)
            orchestrator.instruct()
            done = await link.wait(last, lambda stream: bool(stream.finished) or stream.failed is not None)
            assert (done.failed, done.indices()) == (None, list(range(300)))
            await link.until_ended()
        await orchestrator.until(lambda models: list(models) == ["demo"])
        await demo.until(lambda: list(demo.beats[-1][1].other_models) == [])
        counted = await demo.wait(running, lambda stream: bool(stream.finished) or stream.failed is not None, 60)
        assert (counted.failed, counted.indices()) == (None, list(range(1500)))


@pytest.mark.long
async def test_a_new_version_is_loaded_beside_the_old_one_which_ends_what_it_began(
    joined: Any, orchestrator: SmallOrchestrator, connect: Any, attempt: Any, copy_of_demo: Path
) -> None:
    node = await joined("--drain-grace-s", "120")
    old = node.rank_pids()
    asked = attempt("Count from 1 to 200.", max_tokens=1900, ignore_eos=True)
    async with connect(node.address) as link:
        before = await link.submit(asked)
        await link.wait(before, lambda stream: len(stream.tokens()) > 5)
        orchestrator.instruct(Deployment("demo", str(copy_of_demo), 1, 1))
        await orchestrator.until(lambda models: models["demo"].next_revision == 1)
        await orchestrator.until(ready("demo", 1), 100)
        after = await link.run(attempt("Count from 1 to 9.", max_tokens=20))
        assert after.text() == COUNTED
        done = await link.wait(before, lambda stream: bool(stream.finished) or stream.failed is not None, 100)
        assert (done.failed, done.indices()) == (None, list(range(1900)))
        assert {beat.state for _, beat in link.beats} == {READY}, "it never stops to serve"
        assert set(node.rank_pids()).isdisjoint(old)
        cancelled = await link.submit(asked)
        await link.wait(cancelled, lambda stream: len(stream.tokens()) > 2)
        await link.cancel(cancelled)
        await link.until(lambda: link.beats[-1][1].load.running + link.beats[-1][1].load.waiting == 0)


@pytest.mark.lab
async def test_who_has_not_seen_a_change_does_not_take_it_back(
    joined: Any, orchestrator: SmallOrchestrator, copy_of_demo: Path, demo_dir: Path
) -> None:
    """A new leader says at first to keep what was reported; meanwhile the change that the one before began ends."""
    node = await joined()
    orchestrator.instruct(Deployment("demo", str(demo_dir), 1, 1))
    await orchestrator.until(ready("demo", 1))
    orchestrator.instruct(Deployment("demo", str(copy_of_demo), 1, 2))
    await orchestrator.until(lambda models: models["demo"].next_revision == 2)
    orchestrator.instruct(Deployment("demo", str(demo_dir), 1, 1))
    await orchestrator.until(ready("demo", 2), 100)
    pids = node.rank_pids()
    orchestrator.instruct(Deployment("demo", str(copy_of_demo), 1, 2))
    await asyncio.sleep(4)
    assert node.rank_pids() == pids
    orchestrator.instruct(Deployment("demo", str(demo_dir), 1, 1))
    await orchestrator.until(ready("demo", 1), 100)


@pytest.mark.long
async def test_what_outlives_the_grace_of_a_replacement_fails_over(
    joined: Any, orchestrator: SmallOrchestrator, connect: Any, attempt: Any, copy_of_demo: Path
) -> None:
    node = await joined("--drain-grace-s", "0.2")
    async with connect(node.address) as link:
        before = await link.submit(attempt("Count from 1 to 200.", max_tokens=1900, ignore_eos=True, n=16))
        await link.wait(before, lambda stream: len(stream.tokens()) > 5)
        orchestrator.instruct(Deployment("demo", str(copy_of_demo), 1, 1))
        done = await link.wait(before, lambda stream: len(stream.finished) == 16 or stream.failed is not None, 60)
        assert (done.failed.reason, done.failed.node_fault) == ("MODEL_UNLOADED", False)
        await orchestrator.until(ready("demo", 1))
        assert (await link.run(attempt("Count from 1 to 9.", max_tokens=20))).text() == COUNTED


@pytest.mark.long
async def test_a_version_that_is_refused_leaves_the_old_one_serving(
    joined: Any, orchestrator: SmallOrchestrator, connect: Any, attempt: Any, broken: Path
) -> None:
    node = await joined()
    old = node.rank_pids()
    orchestrator.instruct(Deployment("demo", str(broken), 1, 1))
    beat = await orchestrator.until(lambda models: models["demo"].next_state == FAILED)
    (report,) = beat.models
    assert (report.state, report.revision, report.next_revision) == (READY, 0, 1)
    assert "layers.4" in report.next_reason
    async with connect(node.address) as link:
        assert (await link.run(attempt("Count from 1 to 9.", max_tokens=20))).text() == COUNTED
    assert node.rank_pids() == old
    orchestrator.instruct()
    await orchestrator.until(lambda models: not models["demo"].next_revision)


@pytest.mark.long
async def test_a_version_that_does_not_fit_beside_the_old_one_is_loaded_after_it(
    joined: Any, orchestrator: SmallOrchestrator, connect: Any, attempt: Any, *, demo_dir: Path, copy_of_demo: Path
) -> None:
    need = await measured(joined, orchestrator, demo_dir)
    node = await joined("--model-memory-bytes", str(need + 2**20))
    old = node.rank_pids()
    orchestrator.instruct(Deployment("demo", str(copy_of_demo), 1, 1))
    await orchestrator.until(ready("demo", 1))
    assert set(node.rank_pids()).isdisjoint(old)
    orchestrator.instruct(Deployment("demo", str(copy_of_demo), 1, 2))
    config = copy_of_demo / "config.json"
    config.write_text(config.read_text().replace('"num_hidden_layers": 4', '"num_hidden_layers": 5'))
    beat = await orchestrator.until(lambda models: models["demo"].next_state == FAILED and models["demo"].revision == 1)
    assert "layers.4" in beat.models[0].next_reason
    config.write_text(config.read_text().replace('"num_hidden_layers": 5', '"num_hidden_layers": 4'))
    orchestrator.instruct(Deployment("demo", str(copy_of_demo), 1, 3))
    await orchestrator.until(ready("demo", 3))
    async with connect(node.address) as link:
        assert (await link.run(attempt("Count from 1 to 9.", max_tokens=20))).text() == COUNTED


@pytest.mark.long
async def test_what_the_node_was_started_with_gives_way_and_returns(
    joined: Any, orchestrator: SmallOrchestrator, connect: Any, attempt: Any, second: Path
) -> None:
    need = await measured(joined, orchestrator, second)
    node = await joined("--model-memory-bytes", str(need + 2**20))
    orchestrator.instruct(Deployment("second", str(second), 1, 1))
    beat = await orchestrator.until(ready("second", 1))
    assert [report.model for report in beat.models] == ["second"]
    async with connect(node.address) as link:
        assert link.hello.beat.model == "second", "a node's first stream is about what it has"
        assert (await link.run(of(attempt(max_tokens=5), "second"))).failed is None
        orchestrator.instruct(Deployment("second", str(second), 1, 1), Deployment("third", str(second), 1, 1))
        beat = await orchestrator.until(lambda models: "third" in models)
        refused = next(report for report in beat.models if report.model == "third")
        assert (refused.state, "are not free" in refused.reason) == (FAILED, True)
        orchestrator.instruct()
        await orchestrator.until(ready("demo"))
        await link.until(lambda: link.beats[-1][1].model == "demo")
        assert (await link.run(attempt("Count from 1 to 9.", max_tokens=20))).text() == COUNTED


async def measured(joined: Any, orchestrator: SmallOrchestrator, folder: Path) -> int:
    """The bytes that a node says the model would take, and its word on a directory that is none."""
    node = await joined(model=None)
    orchestrator.instruct(measure_paths=(str(folder), str(folder / "missing")))
    async with asyncio.timeout(30):
        while len(needs := (await orchestrator.next_beat()).needs) < 2:
            pass
    node.close()
    assert (needs[0].path, needs[0].error, needs[1].bytes) == (str(folder), "", 0)
    assert "missing" in needs[1].error
    orchestrator.instruct()
    return int(needs[0].bytes)


@pytest.mark.long
async def test_an_idle_model_sleeps_and_a_request_wakes_it(
    joined: Any, orchestrator: SmallOrchestrator, connect: Any, attempt: Any, second: Path
) -> None:
    node = await joined()
    orchestrator.instruct(Deployment("second", str(second), 1, 1, idle_unload_s=0.5))
    await orchestrator.until(ready("second", 1))
    assert len(node.rank_pids()) == 2
    beat = await orchestrator.until(lambda models: models["second"].asleep)
    slept = next(report for report in beat.models if report.model == "second")
    assert (slept.state, slept.context_length > 0) == (READY, True)
    async with open_channel(node.address) as channel, connect(node.address, model="second") as link:
        status = await WorkerServiceStub(channel).GetStatus(pb.GetStatusRequest(model="second"))
        assert (status.beat.state, list(status.ranks)) == (READY, [])
        woken = await asyncio.gather(*(link.run(of(attempt(max_tokens=20), "second"), 60) for _ in range(4)))
        assert [(stream.failed, stream.indices()) for stream in woken] == [(None, list(range(20)))] * 4
        assert {beat.state for _, beat in link.beats} == {READY}
    events = [line["event"] for line in node.events]
    assert (events.count("model woken"), events.count("model put to sleep")) >= (1, 1)
    orchestrator.instruct(Deployment("second", str(second), 1, 1))
    await orchestrator.until(lambda models: not models["second"].asleep)
    await asyncio.sleep(1.0)
    assert not (await orchestrator.until(lambda _: True)).models[1].asleep, "it may not sleep any more"


@pytest.mark.long
async def test_models_that_sleep_take_turns_in_the_memory_of_one(
    joined: Any, orchestrator: SmallOrchestrator, connect: Any, attempt: Any, second: Path
) -> None:
    need = await measured(joined, orchestrator, second)
    node = await joined("--model-memory-bytes", str(need + 2**20), model=None)
    deployments = [Deployment(name, str(second), 1, 1, idle_unload_s=3600.0) for name in ("x", "y")]
    orchestrator.instruct(*deployments)
    await orchestrator.until(lambda models: ready("x", 1)(models) and ready("y", 1)(models))
    async with connect(node.address) as first, connect(node.address, model="y") as other:
        links = {first.hello.beat.model: first, "y": other}
        for name in ("x", "y", "x"):
            assert (await links[name].run(of(attempt(max_tokens=5), name), 60)).failed is None
            beat = await orchestrator.until(lambda _: True)
            assert {report.model: report.asleep for report in beat.models} == {"x": name != "x", "y": name != "y"}
        busy = await links["x"].submit(of(attempt(max_tokens=1500, ignore_eos=True), "x"))
        await links["x"].wait(busy, lambda stream: len(stream.tokens()) > 2)
        refused = await links["y"].run(of(attempt(max_tokens=5), "y"))
        assert (refused.failed.reason, refused.failed.node_fault) == ("NO_ROOM_TO_WAKE", False)


@pytest.mark.long
async def test_an_older_orchestrators_deployment_takes_the_place_of_the_first_model(
    joined: Any, orchestrator: SmallOrchestrator, connect: Any, attempt: Any, second: Path
) -> None:
    node = await joined()
    deployment = orchestrator_pb.Deployment(model="second", path=str(second))
    orchestrator.answer = orchestrator_pb.HeartbeatResponse(deployment=deployment)
    await orchestrator.until(ready("second"))
    async with connect(node.address) as link:
        assert (link.hello.beat.model, list(link.hello.beat.other_models)) == ("second", [])
        assert (await link.run(of(attempt(max_tokens=5), "second"))).failed is None
    orchestrator.answer = orchestrator_pb.HeartbeatResponse()
    await orchestrator.until(ready("demo"))
