"""What collectives are spent on: waiting for the rank that comes last, and moving data once it is there.

Both are on the boards of the ranks, whose clock is one. Where collectives only queue work on a
device, the times are those of queueing: a late process still shows, a late device does not.
"""

from __future__ import annotations

from collections.abc import Sequence

from ryzanstein.worker.ranks.health.board import Board
from ryzanstein.worker.ranks.health.rings import CollectiveRecord
from ryzanstein.worker.supervision.group import CollectiveTiming

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
