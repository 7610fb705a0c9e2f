"""Groups that cannot be wired, or are never started, leave no descriptor."""

from __future__ import annotations

import asyncio
import gc
import os
import resource
import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest

from ryzanstein.worker.ranks.group import GroupBounds, RankGroup
from ryzanstein.worker.ranks.messages import RankSpec
from ryzanstein.worker.ranks.starting.forking import ForkFailed, ForkServer
from ryzanstein.worker.ranks.starting.wiring import Wiring
from ryzanstein.worker.supervision.group import GroupEvents, RanksLost

SPEC = RankSpec("echo", 3)
ECHO = (sys.executable, str(Path(__file__).with_name("echo_rank.py")))
EVENTS = GroupEvents(lambda events: None, lambda trace: None, lambda: False)


def descriptors() -> set[str]:
    return set(os.listdir("/proc/self/fd"))


@contextmanager
def room_for(number: int) -> Iterator[None]:
    """Lets this process open so many descriptors more: those that are free below it are taken."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    highest = max(map(int, descriptors()))
    fillers = [os.open("/dev/null", os.O_RDONLY)]
    while fillers[-1] < highest:
        fillers.append(os.open("/dev/null", os.O_RDONLY))
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(fillers[-1], highest) + 1 + number, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
        for filler in fillers:
            os.close(filler)


def test_wiring_that_fails_half_way_leaves_nothing_open() -> None:
    before, failed = descriptors(), 0
    for number in range(20):
        with room_for(number):
            try:
                wiring = Wiring(SPEC)
            except OSError:
                failed += 1
            else:
                wiring.close()
                wiring.close()
        assert descriptors() == before, number
    assert 10 < failed < 20


@pytest.fixture
async def server() -> Iterator[ForkServer]:
    async with ForkServer(ECHO, {}) as server:
        yield server


async def test_a_server_that_cannot_be_watched_is_ended_and_leaves_nothing_open(monkeypatch: pytest.MonkeyPatch) -> None:
    def no_room(pid: int) -> int:
        raise OSError(f"too many open files: {pid}")

    before = descriptors()
    monkeypatch.setattr(os, "pidfd_open", no_room)
    with pytest.raises(OSError, match="too many open files") as failure:
        ForkServer(ECHO, {})
    assert descriptors() == before
    assert str(failure.value).split()[-1] not in os.listdir("/proc")


@pytest.mark.distributed
async def test_a_group_that_is_never_started_leaves_nothing_open(server: ForkServer) -> None:
    before = descriptors()
    group = RankGroup(SPEC, GroupBounds(), EVENTS, server)
    assert len(descriptors()) > len(before)
    await group.end(graceful=False)
    assert descriptors() == before


@pytest.mark.distributed
async def test_a_group_whose_slab_cannot_be_opened_leaves_nothing_open(
    server: ForkServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    def no_room(wiring: Wiring) -> int:
        raise OSError("too many open files")

    before = descriptors()
    monkeypatch.setattr(Wiring, "take_slab", no_room)
    with pytest.raises(OSError, match="too many"):
        RankGroup(SPEC, GroupBounds(), EVENTS, server)
    assert descriptors() == before


@pytest.mark.distributed
async def test_a_group_that_is_given_up_between_two_ranks_leaves_nothing_open(
    server: ForkServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    before, fork = descriptors(), server.fork

    async def one_only(rank: int, fds: tuple[int, ...]):
        if rank:
            raise ForkFailed("no room")
        return await fork(rank, fds)

    monkeypatch.setattr(server, "fork", one_only)
    group = RankGroup(SPEC, GroupBounds(), EVENTS, server)
    with pytest.raises(RanksLost, match="rank 1 could not be forked: no room"):
        await group.start()
    await group.end(graceful=False)
    async with asyncio.timeout(5):
        while descriptors() - before:  # noqa: ASYNC110 - the rank's sign of life is let go by a thread
            await asyncio.sleep(0.02)


@pytest.mark.distributed
@pytest.mark.parametrize("number", [0, 1, 2])
async def test_an_agent_without_descriptors_loses_the_call_and_not_the_server(server: ForkServer, number: int) -> None:
    """There is none for the rank's sign of life, or for its memory, or to watch the rank."""
    wiring = Wiring(RankSpec("echo", 1))
    (wires,) = wiring.ranks
    before, taken = descriptors(), []
    with room_for(number):
        os.kill(server.pid, signal.SIGSTOP)
        call = asyncio.create_task(server.fork(0, wires.fds))
        await asyncio.sleep(0.1)
        with suppress(OSError):
            while True:
                taken.append(os.dup(0))
        os.kill(server.pid, signal.SIGCONT)
        with pytest.raises(ForkFailed):
            await asyncio.wait_for(call, 20)
    for each in taken:
        os.close(each)
    async with asyncio.timeout(5):
        while descriptors() != before:  # a sign of life is let go by the collector
            gc.collect()
            await asyncio.sleep(0.02)
    process = await asyncio.wait_for(server.fork(0, wires.fds), 20)
    wiring.close()
    assert await asyncio.wait_for(process.exited, 20) is not None
