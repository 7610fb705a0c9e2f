"""Two rows of a rank's Chrome trace: its steps and its collectives, as the board recorded them.

torch's profiler knows neither. Each collective has the number that it has on all ranks, so that the traces
of a group can be laid over each other. The head of the trace names rank, process and size of the group, as `distributedInfo` of
torch's own distributed runs does.
"""

from __future__ import annotations

import os
import re
import time
from collections.abc import Iterator
from typing import Any, BinaryIO

import msgspec

from ryzanstein.worker.ranks.health.board import RankBoard
from ryzanstein.worker.ranks.health.rings import CollectiveRecord, StepRecord

STEPS, COLLECTIVES = 1, 2
"""The threads of the rows. No thread of a process that the profiler sees has such an id."""
_TAIL_BYTES = 4096
_READINGS = 16
_EVENTS = b'"traceEvents": ['
_BASE = re.compile(rb'"baseTimeNanoseconds":\s*(\d+)')


class TraceRows:
    """The rows of one recording."""

    def __init__(self, rank: int, size: int) -> None:
        self._rank, self._size = rank, size
        self._seen = 0, 0
        self._steps: list[StepRecord] = []
        self._collectives: list[CollectiveRecord] = []

    def skip(self, board: RankBoard) -> None:
        """Leaves out what the board has recorded so far."""
        self._seen = board.last_numbers

    def take(self, board: RankBoard) -> None:
        """Takes what the board has recorded since. Call it after each step: the board forgets."""
        steps, collectives = board.recorded(*self._seen)
        self._steps += steps
        self._collectives += collectives
        self._seen = board.last_numbers

    def added_to(self, trace: BinaryIO, max_bytes: int, part_bytes: int) -> Iterator[tuple[bytes, bool]]:
        """Yields the trace with the rows, in parts, and whether more follow. Nothing and no more: it is too large.

        Raises ValueError if it is no trace of torch's profiler.
        """
        size = trace.seek(0, os.SEEK_END)
        if size > max_bytes:
            yield b"", False
            return
        base_ns = _base_ns(trace, size)
        trace.seek(0)
        head, found, rest = trace.read(part_bytes).partition(_EVENTS)
        if not found:
            raise ValueError("the profiler wrote no events")
        rows = msgspec.json.encode(list(self._events(base_ns)))[1:-1]
        about = msgspec.json.encode({"distributedInfo": self._about(), "ryzanstein": {"pid": os.getpid()}})[1:-1]
        part = b"{" + about + b"," + head.lstrip()[1:] + found + rows + (b"" if rest.lstrip()[:1] == b"]" else b",") + rest
        while part:
            following = trace.read(part_bytes)
            yield part, bool(following)
            part = following

    def _about(self) -> dict[str, Any]:
        return {"backend": "ryzanstein", "rank": self._rank, "world_size": self._size}

    def _events(self, base_ns: int) -> Iterator[dict[str, Any]]:
        pid, shift_ns = os.getpid(), _unix_minus_monotonic_ns() - base_ns
        for number, name in ((STEPS, "steps"), (COLLECTIVES, "collectives")):
            about = {"ph": "M", "ts": 0, "pid": pid, "tid": number}
            yield {**about, "name": "thread_name", "args": {"name": name}}
            yield {**about, "name": "thread_sort_index", "args": {"sort_index": number - 10}}
        for step in self._steps:
            took_s = step.compute_s + step.collective_s + step.tail_s
            args: dict[str, Any] = {"tokens": step.num_tokens, "compute_ms": step.compute_s * 1e3}
            args |= {"collective_ms": step.collective_s * 1e3, "tail_ms": step.tail_s * 1e3}
            where = {"ph": "X", "cat": "step", "name": f"step {step.step}", "pid": pid, "tid": STEPS}
            yield {**where, "ts": (step.begun_s * 1e9 + shift_ns) / 1e3, "dur": took_s * 1e6, "args": args}
        for each in self._collectives:
            where = {"ph": "X", "cat": "collective", "name": each.op, "pid": pid, "tid": COLLECTIVES}
            args = {"number": each.number, "bytes": each.size_bytes}
            arrived_us, took_us = (each.arrived_ns + shift_ns) / 1e3, (each.left_ns - each.arrived_ns) / 1e3
            yield {**where, "ts": arrived_us, "dur": took_us, "args": args}


def _unix_minus_monotonic_ns() -> int:
    """Returns the difference of both clocks: of several readings the one in which the least time passed.

    The process may be suspended between two clocks; then the rows of this rank would be late beside those of others.
    """
    readings = []
    for _ in range(_READINGS):
        before, unix, after = time.monotonic_ns(), time.time_ns(), time.monotonic_ns()
        readings.append((after - before, unix - (before + after) // 2))
    return min(readings)[1]


def _base_ns(trace: BinaryIO, size: int) -> int:
    """Returns the Unix time that the trace counts from, in nanoseconds: 0 if it does not say."""
    for at in (max(0, size - _TAIL_BYTES), 0):
        trace.seek(at)
        if (found := _BASE.search(trace.read(_TAIL_BYTES))) is not None:
            return int(found[1])
    return 0
