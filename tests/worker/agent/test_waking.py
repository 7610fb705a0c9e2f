"""Attempts that wait for a model that sleeps, and what their router sends after them."""

from __future__ import annotations

import asyncio
import random
import threading
from collections.abc import AsyncIterator, Callable
from functools import partial

import pytest

from ryzanstein.cluster import Beat
from ryzanstein.demo import MODEL_DIR
from ryzanstein.generation.prompts import TextPrompt
from ryzanstein.generation.request import Attempt, ChoiceProgress, GenerationRequest, SamplingParams
from ryzanstein.lab.simulation.ranks.ranks import RankProfile, SimulatedRanks, StartFault
from ryzanstein.observe.tracing import Tracing
from ryzanstein.v1 import worker_pb2 as pb
from ryzanstein.wire.attempts import submit_now
from ryzanstein.worker.agent.faces import stream
from ryzanstein.worker.agent.faces.stream import ReadAhead, RouterStream
from ryzanstein.worker.agent.memory.node_memory import ModelMemory, SharedRoom
from ryzanstein.worker.agent.model_host import ModelChoice
from ryzanstein.worker.agent.node import NodeAgent
from ryzanstein.worker.agent.routers import RouterLink
from ryzanstein.worker.config import WorkerSettings
from ryzanstein.worker.engine_choice import engines_of
from ryzanstein.worker.supervision.group import EngineFactory, EngineModel, GroupEvents, NewEngines
from ryzanstein.worker.telemetry import WorkerTelemetry
from ryzanstein.worker.text.templates.renderer import LocalRenderer
from ryzanstein.worker.text.tokenizer import TextModel

SETTINGS = WorkerSettings(_env_file=None)  # type: ignore[call-arg]


def attempt(number: int, text: str = "hello") -> Attempt:
    request = GenerationRequest("", TextPrompt(text), SamplingParams(max_tokens=2, seed=number))
    return Attempt(f"g{number}", 1, request, (ChoiceProgress(),))


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(20):
        while not condition():  # noqa: ASYNC110 - a frame tells nobody that it was handled
            await asyncio.sleep(0.002)


class SleepingNode:
    """A node whose model sleeps, and one router's stream."""

    def __init__(self) -> None:
        self.ranks = SimulatedRanks(random.Random(1), RankProfile(server_s=0.01, start_s=0.01, step_s=0.001))
        self.closed: list[tuple[int, bool]] = []
        """Which factory was closed, and whether to be used again."""
        self.num_factories = 0
        new = engines_of(SETTINGS, new_server=self.ranks.new_server)
        engines = partial(self._recorded, new)
        self.node = NodeAgent(SETTINGS, WorkerTelemetry(), Tracing("worker"), LocalRenderer(), new_engines=engines)
        self.ahead = ReadAhead()

    def _recorded(self, new: NewEngines, model: EngineModel, events: GroupEvents) -> EngineFactory:
        factory, number = new(model, events), self.num_factories
        self.num_factories, close = number + 1, factory.close

        async def closing(*, sleeps: bool = False) -> None:
            self.closed.append((number, sleeps))
            await close(sleeps=sleeps)

        factory.close = closing  # type: ignore[method-assign]
        return factory

    async def start(self) -> None:
        choice = ModelChoice.at(str(MODEL_DIR))
        await self.node.host.load(choice)
        await self.node.host.settled(choice)
        await self.node.idleness.sleep()
        assert self.node.host.asleep
        self.connect()

    def connect(self) -> RouterLink:
        self.link = self.node.links.open("router-t")
        self.stream = RouterStream(self.node, self.link)
        self.taker = self.node.background.once("link_taker", self.stream.take_all(self.ahead))
        return self.link

    async def send(self, *frames: pb.ConnectRequest) -> None:
        for frame in frames:
            await self.ahead.put(frame)

    def disconnect(self) -> None:
        self.taker.cancel()
        self.stream.close()
        self.node.links.close(self.link)

    async def outputs(self, num_ended: int) -> tuple[list[int], list[int]]:
        """The handles that finished and those that failed, once there are so many."""
        finished: list[int] = []
        failed: list[int] = []
        async with asyncio.timeout(20):
            async for frame in self.link.frames():
                finished += [row.handle for row in frame.output.finished]
                failed += [row.handle for row in frame.output.failed]
                if len(finished) + len(failed) >= num_ended:
                    break
        return finished, failed

    @property
    def waiting(self) -> set[int]:
        return set(self.stream._waiting)


def submit(number: int, text: str = "hello") -> pb.ConnectRequest:
    return pb.ConnectRequest(submit=submit_now(attempt(number, text), number))


def cancel(number: int) -> pb.ConnectRequest:
    return pb.ConnectRequest(cancel=pb.Cancel(handle=number))


@pytest.fixture
async def sleeping() -> AsyncIterator[SleepingNode]:
    node = SleepingNode()
    await node.start()
    yield node
    node.disconnect()
    await node.node.versions.unload()
    await node.node.background.close()


async def test_a_cancel_is_handled_while_its_attempt_waits_for_the_model(sleeping: SleepingNode) -> None:
    sleeping.ranks.fail_next_start(StartFault(extra_s=3600))
    await sleeping.send(submit(1), submit(2), cancel(1), submit(3, ""))
    assert await sleeping.outputs(1) == ([], [3])
    await until(lambda: sleeping.waiting == {2})
    assert sleeping.node.host.asleep


async def test_attempts_that_waited_are_answered_when_the_model_is_loaded(sleeping: SleepingNode) -> None:
    await sleeping.send(submit(1), submit(2), submit(3), cancel(2))
    finished, failed = await sleeping.outputs(2)
    assert (sorted(finished), failed) == ([1, 3], [])
    assert not sleeping.waiting
    assert sleeping.stream._waiting_bytes == 0


async def test_the_engines_of_a_model_that_sleeps_stay_until_it_is_unloaded(sleeping: SleepingNode) -> None:
    await sleeping.send(submit(1))
    assert await sleeping.outputs(1) == ([1], [])
    await until(lambda: sleeping.node.num_running == 0)
    await sleeping.node.idleness.sleep()
    assert (sleeping.num_factories, sleeping.closed) == (1, [(0, True), (0, True)])
    await sleeping.node.versions.unload()
    assert sleeping.closed[2:] == [(0, False)]
    await sleeping.node.host.load(ModelChoice.at(str(MODEL_DIR)))
    assert sleeping.num_factories == 2


async def test_a_handle_that_waits_is_in_use(sleeping: SleepingNode) -> None:
    sleeping.ranks.fail_next_start(StartFault(extra_s=3600))
    await sleeping.send(submit(1))
    await until(lambda: sleeping.waiting == {1})
    assert not sleeping.link.closed
    await sleeping.send(submit(1))
    await until(lambda: sleeping.link.closed)


async def test_the_attempts_of_a_router_that_leaves_are_not_started(sleeping: SleepingNode) -> None:
    await sleeping.send(submit(1), submit(2))
    await until(lambda: sleeping.waiting == {1, 2})
    sleeping.disconnect()
    await until(lambda: not sleeping.node.host.asleep)
    assert sleeping.node.num_running == 0
    sleeping.connect()
    await sleeping.send(submit(3))
    assert await sleeping.outputs(1) == ([3], [])


async def test_a_wake_that_nobody_waits_for_any_more_gives_other_models_their_turn(sleeping: SleepingNode) -> None:
    """The model that must sleep for it is put to sleep to the end, and gives back its memory."""
    other = SleepingNode()
    await other.start()
    memory = ModelMemory(100)
    awake = [other.node]
    sleeping.node.idleness.room = SharedRoom(
        memory, "one", lambda: [node.idleness for node in awake if not node.host.asleep], "one", 100
    )
    other.node.idleness.room = SharedRoom(memory, "two", list, "two", 100)
    await other.send(submit(1))
    await other.outputs(1)
    await until(lambda: other.node.num_running == 0)
    assert memory.taken("two") == 100
    await sleeping.send(submit(1))
    await until(lambda: other.node.host.asleep)
    await sleeping.send(cancel(1))
    await until(lambda: sleeping.node.host.serving is not None)
    assert (memory.taken("one"), memory.taken("two")) == (100, 0)
    assert sleeping.node.num_running == 0
    other.disconnect()
    await other.node.versions.unload()
    await other.node.background.close()


async def test_a_model_that_falls_asleep_while_pages_are_fetched_is_woken_again(
    sleeping: SleepingNode, monkeypatch: pytest.MonkeyPatch
) -> None:
    times = 0

    async def restore(*_: object) -> None:
        nonlocal times
        times += 1
        if times == 1:
            await sleeping.node.idleness.sleep()

    monkeypatch.setattr(sleeping.node.version.pages, "restore", restore)
    await sleeping.send(submit(1))
    assert await sleeping.outputs(1) == ([1], [])
    assert times == 2


LONG = "word " * 2000


@pytest.fixture
def held_text(monkeypatch: pytest.MonkeyPatch) -> threading.Event:
    """Long texts are tokenized once this is set."""
    release, encode = threading.Event(), TextModel.encode

    def held(model: TextModel, text: str) -> list[int]:
        if len(text) > len(LONG) // 2:
            assert release.wait(20)
            text = text[:100]
        return encode(model, text)

    monkeypatch.setattr(TextModel, "encode", held)
    return release


async def test_a_long_text_holds_up_nobody_and_can_be_cancelled(sleeping: SleepingNode, held_text: threading.Event) -> None:
    try:
        await sleeping.send(submit(1, LONG), submit(2, LONG), submit(3, LONG), submit(4), cancel(2))
        assert await sleeping.outputs(1) == ([4], [])
        await until(lambda: sleeping.waiting == {1, 3})
    finally:
        held_text.set()
    finished, failed = await sleeping.outputs(2)
    assert (sorted(finished), failed) == ([1, 3], [])


async def test_more_bytes_of_prompts_than_may_wait_are_refused(
    sleeping: SleepingNode, held_text: threading.Event, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nothing behind them waits for room: not the router's beats, without which it would be taken for dead."""
    monkeypatch.setattr(stream, "MAX_BYTES", 3 * len(LONG))
    failed: list[pb.Failed] = []
    try:
        await sleeping.send(*(submit(number, LONG) for number in range(1, 7)))
        async with asyncio.timeout(20):
            async for frame in sleeping.link.frames():
                failed += frame.output.failed
                if len(failed) == 3:
                    break
    finally:
        held_text.set()
    assert [(each.handle, each.reason, each.node_fault) for each in failed] == [
        (number, "QUEUE_FULL", False) for number in (4, 5, 6)
    ]
    assert {"waiting_bytes", "bound_bytes"} <= failed[0].metadata.keys()
    assert sorted((await sleeping.outputs(3))[0]) == [1, 2, 3]


async def test_an_attempt_is_never_forgotten_from_its_arrival_to_its_acceptance(
    sleeping: SleepingNode, held_text: threading.Event
) -> None:
    sleeping.link.beat(Beat())
    reading = sleeping.node.background.once("link_reader", sleeping.stream.read(_frames(submit(7, LONG)), None, sleeping.ahead))
    async with asyncio.timeout(20):
        async for frame in sleeping.link.frames():
            if frame.beat.preparing:
                break
            await asyncio.sleep(0.1)
            sleeping.link.beat(Beat())
    assert list(frame.beat.preparing) == [7]
    held_text.set()
    assert await sleeping.outputs(1) == ([7], [])
    assert not sleeping.link._preparing
    reading.cancel()


async def _frames(*frames: pb.ConnectRequest) -> AsyncIterator[pb.ConnectRequest]:
    for frame in frames:
        yield frame
    await asyncio.sleep(3600)
