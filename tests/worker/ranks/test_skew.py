"""Which rank the others wait for, from the records of real ranks."""

import asyncio
import os
import signal
import sys
from collections import Counter
from pathlib import Path
from statistics import median

import pytest

from ryzanstein.worker.ranks.group import GroupBounds, RankGroup
from ryzanstein.worker.ranks.health.board import Board, RankBoard, board_bytes
from ryzanstein.worker.ranks.health.skew import NUM_SAMPLED, CollectiveSample
from ryzanstein.worker.ranks.messages import RankSpec
from ryzanstein.worker.ranks.starting.forking import ForkServer
from ryzanstein.worker.supervision.group import CollectiveTiming, GroupEvents
from ryzanstein.worker.supervision.watchdog import StallBounds

REDUCING = (sys.executable, str(Path(__file__).with_name("reducing_rank.py")))


class Ranks:
    """Two ranks on a board, each with a clock that the test sets, in milliseconds."""

    def __init__(self) -> None:
        fd = os.memfd_create("test-board")
        os.ftruncate(fd, board_bytes(2))
        self.now = 0.0
        self.view = Board(fd, 2)
        self.boards = [RankBoard(fd, 2, rank, lambda: round(self.now * 1e6)) for rank in range(2)]
        os.close(fd)
        self.sample = CollectiveSample(self.view, 2)

    def meet(self, arrivals: tuple[float, float], left: float, ops: tuple[str, str] = ("all_reduce", "all_reduce")) -> None:
        for board, op, arrived in zip(self.boards, ops, arrivals, strict=True):
            self.now = arrived
            board.begin(op)
        self.now = left
        for board in self.boards:
            board.end()

    def close(self) -> None:
        for each in (self.view, *self.boards):
            each.close()


@pytest.fixture
def ranks():
    ranks = Ranks()
    yield ranks
    ranks.close()


def test_a_collective_is_a_wait_for_the_last_rank_and_a_transfer(ranks):
    ranks.meet((10, 14), 15)
    ranks.meet((20, 18), 24)
    ranks.meet((30, 30), 31)
    assert ranks.sample.take() == [
        CollectiveTiming("all_reduce", 0.004, 0.001, 1),
        CollectiveTiming("all_reduce", 0.002, 0.004, 0),
        CollectiveTiming("all_reduce", 0.0, 0.001, None),
    ]
    assert ranks.sample.take() == [], "each is taken once"


def test_of_many_collectives_the_latest_are_taken(ranks):
    for number in range(1000):
        ranks.meet((number, number + 0.25), number + 0.5, ("all_gather", "all_gather") if number >= 984 else ("broadcast",) * 2)
    assert [timing.op for timing in ranks.sample.take()] == ["all_gather"] * NUM_SAMPLED


def test_a_collective_that_not_all_have_left_is_taken_later(ranks):
    ranks.meet((1, 2), 3)
    ranks.sample.take()
    for board in ranks.boards:
        board.begin("broadcast")
    ranks.boards[0].end()
    assert ranks.sample.take() == []
    ranks.boards[1].end()
    assert [timing.op for timing in ranks.sample.take()] == ["broadcast"]


def test_ranks_that_gave_up_at_different_places_are_compared_again_afterwards(ranks):
    ranks.meet((1, 2), 3)
    ranks.boards[1].begin("all_reduce")  # and never leaves it
    ranks.meet((5, 5), 6, ("rejoin", "rejoin"))
    for board in ranks.boards:
        board.rejoined()
    assert [timing.op for timing in ranks.sample.take()] == ["all_reduce"]
    ranks.meet((8, 9), 10)
    assert ranks.sample.take() == [CollectiveTiming("all_reduce", 0.001, 0.001, 1)]


class Heard:
    """A group of real ranks, and what it says of their collectives."""

    def __init__(self) -> None:
        events = GroupEvents(lambda step: None, lambda trace: None, lambda: False, on_collectives=self._on_collectives)
        self.server = ForkServer(REDUCING, {})
        bounds = GroupBounds(start_s=60, stall=StallBounds(min_s=30))
        self.group = RankGroup(RankSpec("reducing", 2), bounds, events, self.server)
        self.timings: list[CollectiveTiming] = []

    def _on_collectives(self, timings: list[CollectiveTiming]) -> None:
        self.timings += timings

    async def listen(self, number: int) -> list[CollectiveTiming]:
        """Returns so many of the next collectives."""
        self.timings.clear()
        while len(self.timings) < number:
            assert not self.group.lost.done()
            await asyncio.sleep(0.05)
        return list(self.timings)

    async def close(self) -> None:
        await self.group.end(graceful=False)
        await self.server.close()


@pytest.fixture
async def heard():
    heard = Heard()
    yield heard
    await heard.close()


def share_of_last(timings: list[CollectiveTiming], rank: int) -> float:
    last = Counter(timing.last for timing in timings)
    return last[rank] / last.total()


@pytest.mark.distributed
async def test_ranks_that_are_alike_come_last_in_turn_and_a_slow_one_always(heard):
    await heard.group.start()
    even = await heard.listen(150)
    assert 0.3 < share_of_last(even, 1) < 0.7
    os.kill(heard.group.progress()[1].pid, signal.SIGUSR1)
    await heard.listen(NUM_SAMPLED)  # some from before
    late = await heard.listen(60)
    print(f"rank 1 comes last: {share_of_last(even, 1):.2f} of collectives, slowed {share_of_last(late, 1):.2f}")
    assert share_of_last(late, 1) > 0.9
    assert median(timing.skew_s for timing in late) > 2 * median(timing.skew_s for timing in even)
