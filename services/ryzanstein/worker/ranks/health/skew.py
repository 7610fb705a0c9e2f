"""What collectives are spent on: waiting for the rank that comes last, and moving data once it is there.

Both are on the boards of the ranks, whose clock is one. Where collectives only queue work on a
device, the times are those of queueing: a late process still shows, a late device does not.
"""

from __future__ import annotations

from collections.abc import Sequence

from ryzanstein.worker.ranks.health.board import Board
from ryzanstein.worker.ranks.health.rings import CollectiveRecord, StepRecord
from ryzanstein.worker.supervision.group import CollectiveTiming, RankStep, RankWait

NUM_SAMPLED = 16
"""How many collectives are taken at once. Looks keep no pace with steps, so all places in a step are sampled."""


class CollectiveSample:
    """The latest collectives that all ranks of a group have left: call `take` a few times a second."""

    def __init__(self, board: Board, size: int) -> None:
        self._board, self._size = board, size
        self._taken = 0

    def take(self) -> list[CollectiveTiming]:
        """Returns at most NUM_SAMPLED collectives since the last call."""
        last = self._board.last_collective()
        if self._size < 2 or last <= self._taken:
            return []
        first, self._taken = max(self._taken + 1, last - NUM_SAMPLED + 1), last
        by_number = [
            {record.number: record for record in self._board.collectives(rank, first, last)} for rank in range(self._size)
        ]
        common = set(by_number[0]).intersection(*by_number[1:])
        meetings = ([records[number] for records in by_number] for number in sorted(common))
        return [timing(meeting) for meeting in meetings if len({record.op for record in meeting}) == 1]


def timing(meeting: Sequence[CollectiveRecord]) -> CollectiveTiming:
    """Returns what a collective was spent on, from the records of all its ranks."""
    arrivals = [record.arrived_ns for record in meeting]
    first_ns, last_ns = min(arrivals), max(arrivals)
    left_ns = max(record.left_ns for record in meeting)
    last = arrivals.index(last_ns) if last_ns > first_ns else None
    return CollectiveTiming(meeting[0].op, (last_ns - first_ns) / 1e9, max(0, left_ns - last_ns) / 1e9, last)


def recorded_steps(board: Board, size: int, step: int) -> list[RankStep]:
    """Returns what each rank did in a step; empty until all of them have recorded it, and when one has overwritten it."""
    records = [board.steps(rank, step, step) for rank in range(size)]
    if not all(records):
        return []
    return [_rank_step(board, size, rank, *record) for rank, record in enumerate(records)]


def _rank_step(board: Board, size: int, rank: int, record: StepRecord) -> RankStep:
    times = (record.compute_s, record.collective_s, record.tail_s)
    return RankStep(rank, record.begun_s, record.num_tokens, *times, _longest(board, size, rank, record.longest_number))


def _longest(board: Board, size: int, rank: int, number: int) -> RankWait | None:
    """Returns where a rank waited longest, if its collective is still recorded."""
    if number <= 0 or not (own := board.collectives(rank, number, number)):
        return None
    meeting = [each for other in range(size) for each in board.collectives(other, number, number)]
    last = timing(meeting).last if len(meeting) == size else None
    return RankWait(own[0].op, number, own[0].arrived_ns / 1e9, (own[0].left_ns - own[0].arrived_ns) / 1e9, last)
