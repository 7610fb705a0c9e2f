"""What the kernel knows of the threads of processes that cannot be asked, and of our own."""

from __future__ import annotations

import asyncio
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from ryzanstein.observe.stacks import task_stacks
from ryzanstein.worker.engines.child.group import ChildEngines, ChildSpec
from ryzanstein.worker.engines.remote.bounds import RemoteBounds
from ryzanstein.worker.engines.remote.group import RemoteSpec
from ryzanstein.worker.engines.remote.http.address import EngineAddress
from ryzanstein.worker.engines.remote.http.client import EngineClient
from ryzanstein.worker.settings.rank_settings import QueueSettings
from ryzanstein.worker.supervision.autopsy import missing
from ryzanstein.worker.supervision.group import EngineModel, GroupEvents, RankProgress
from ryzanstein.worker.supervision.stacks import kernel_stacks

SLEEPS, SPINS = "import time; time.sleep(60)", "while True: pass"


@pytest.fixture
def started() -> Iterator[tuple[int, ...]]:
    """A process that sleeps, one that spins, and one that has ended."""
    processes = [subprocess.Popen([sys.executable, "-S", "-c", program]) for program in (SLEEPS, SPINS, "")]
    processes[2].wait()
    yield tuple(process.pid for process in processes)
    for process in processes:
        process.kill()
        process.wait()


async def test_a_process_that_spins_is_told_from_one_that_sleeps_and_one_that_is_gone(started: tuple[int, ...]) -> None:
    async with asyncio.timeout(20):
        while True:
            asleep, busy, none = await kernel_stacks([*zip("abc", started, strict=True)], 0.2)
            if asleep.threads[0].state == "S" and busy.threads[0].cpu_s > 0:
                break
    assert (asleep.threads[0].cpu_s, none.threads) == (0.0, [])
    assert (busy.name, busy.threads[0].stack) == ("b", "")


async def test_a_server_of_ours_shows_the_threads_of_its_processes(tmp_path: Path) -> None:
    spec = ChildSpec(
        command=lambda model, folder: [sys.executable, "-S", "-c", SLEEPS],
        environment=lambda folder: {},
        remote=lambda folder: RemoteSpec(
            address="http://127.0.0.1:1",
            new_client=lambda: EngineClient(EngineAddress.parse("http://127.0.0.1:1"), connect_s=1.0),
            dialect="auto",
            sampler="auto",
            max_sequences=4,
            prefill_room=512,
            queue=QueueSettings(),
            bounds=RemoteBounds(),
        ),
    )
    events = GroupEvents(lambda step: None, lambda trace: None, lambda: False)
    group = ChildEngines(spec, EngineModel(str(tmp_path), 16, 16), events).make()
    starting = asyncio.create_task(group.start())
    try:
        async with asyncio.timeout(20):
            while not (found := await group.stacks(0.0)):  # noqa: ASYNC110 - it starts
                await asyncio.sleep(0.02)
        assert found[0].threads[0].stack == ""
        assert found[0].threads[0].state in "RSD"
    finally:
        starting.cancel()
        await asyncio.gather(starting, return_exceptions=True)
        await group.end(graceful=False)


def progress(rank: int, step: int, collective: int, *, begun_s: float = 1.0) -> RankProgress:
    return RankProgress(rank, 7, step, collective, "forward", 0.0, begun_s, 1, 0.0)


@pytest.mark.parametrize(("ranks", "expected"), [
    ([progress(0, 4, 7), progress(1, 4, 6)], (1,)),
    ([progress(0, 4, 7), progress(1, 3, 9)], (1,)),
    ([progress(0, 4, 7), progress(1, 4, 7)], ()),
    ([progress(0, 4, 0, begun_s=0), progress(1, 4, 0, begun_s=0)], ()),
    ([progress(0, 4, 7), progress(1, 3, 9, begun_s=0)], (1,)),
])  # fmt: skip
def test_who_is_behind_is_missing(ranks: list[RankProgress], expected: tuple[int, ...]) -> None:
    assert missing(ranks) == expected


async def test_a_task_is_shown_down_to_what_it_awaits_through_generators() -> None:
    async def numbers():
        await asyncio.sleep(60)
        yield 1

    async def reads() -> None:
        async for _ in numbers():
            pass

    task = asyncio.create_task(reads(), name="the-reader")
    await asyncio.sleep(0)
    (found,) = (each for each in task_stacks() if each.name == "the-reader")
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
    assert [line.rpartition(" ")[2] for line in found.stack.splitlines()] == ["sleep", "numbers", "reads"]
