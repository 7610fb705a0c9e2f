"""Where the ranks of a vLLM are: a file in which our sampler in each of them counts steps, and which the agent reads.

vLLM calls logits processors before a step and after it, on every rank. One slot of 64 bytes per rank is written by that
rank alone; it also counts the steps whose tokens our sampler failed to decide, so that no such token is passed on. Numbers
are aligned words of 8 bytes, which a reader never sees half written. vLLM gives no sign of what a rank does within a step,
and on GPUs a step counts as done when its work is queued.
"""

from __future__ import annotations

import mmap
import os
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

VARIABLE = "RYZANSTEIN_BOARD"
"""The environment variable of vLLM that names the file."""
MAX_RANKS = 64
_SLOT_BYTES = 64
_PID, _STARTED, _BEGUN, _ENDED, _MOVED_NS, _FAILED = range(6)


class BoardSlot:
    """The slot of this process, one of `size` ranks. Raises OSError if the file cannot be written."""

    def __init__(self, path: str, rank: int, size: int) -> None:
        if not 0 <= rank < size <= MAX_RANKS:
            raise OSError(f"rank {rank} of {size} has no slot: a board has {MAX_RANKS}")
        fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
        try:
            os.ftruncate(fd, size * _SLOT_BYTES)  # nothing stays of more ranks that were there before
            self._map = mmap.mmap(fd, size * _SLOT_BYTES)
        finally:
            os.close(fd)
        self._words = memoryview(self._map).cast("Q")[rank * _SLOT_BYTES // 8 : (rank + 1) * _SLOT_BYTES // 8]
        self._words[_BEGUN] = self._words[_ENDED] = self._words[_FAILED] = 0
        self._words[_STARTED] = _started(os.getpid()) or 0
        self._words[_PID] = os.getpid()

    def begin(self) -> None:
        """Records that a step begins."""
        self._words[_MOVED_NS] = time.monotonic_ns()
        self._words[_BEGUN] += 1

    def end(self) -> None:
        """Records that the tokens of the step are decided."""
        self._words[_MOVED_NS] = time.monotonic_ns()
        self._words[_ENDED] = self._words[_BEGUN]

    def fail(self) -> None:
        """Records that the tokens of a step are not ours. It is seen before the tokens are."""
        self._words[_FAILED] += 1


@dataclass(frozen=True, slots=True)
class RankSteps:
    """A rank: the steps that it has begun, the last one that it has ended, when it moved last in monotonic seconds.

    `stopped`: its process is, by SIGSTOP or a debugger. False if that cannot be told: it may be in another container.
    """

    rank: int
    begun: int
    ended: int
    moved_s: float
    stopped: bool


def failures(path: Path) -> int:
    """Returns the steps in which our sampler failed, of all ranks; 0 without a board. It takes microseconds.

    The file is opened each time: a mapping would break if somebody made it shorter, and outlive it if it was replaced.
    """
    try:
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    except OSError:
        return 0
    try:
        data = os.read(fd, MAX_RANKS * _SLOT_BYTES)
    except OSError:
        return 0
    finally:
        os.close(fd)
    return sum(memoryview(data[: len(data) // 8 * 8]).cast("Q")[_FAILED :: _SLOT_BYTES // 8])


def read_board(path: Path) -> list[RankSteps]:
    """Returns the ranks that have written to a board; none if it is not there."""
    try:
        data = path.read_bytes()
    except OSError:
        return []
    words = memoryview(data[: len(data) // _SLOT_BYTES * _SLOT_BYTES]).cast("Q")
    slots = [words[at : at + _SLOT_BYTES // 8] for at in range(0, len(words), _SLOT_BYTES // 8)]
    return [
        RankSteps(rank, slot[_BEGUN], slot[_ENDED], slot[_MOVED_NS] / 1e9, _is_stopped(slot[_PID], slot[_STARTED]))
        for rank, slot in enumerate(slots[:MAX_RANKS])
        if slot[_PID]
    ]


def behind(ranks: Sequence[RankSteps]) -> RankSteps | None:
    """Returns the rank that holds the others up: with the fewest steps, stopped, still for the longest time."""
    return min(ranks, key=lambda each: (not each.stopped, each.begun, each.ended, each.moved_s), default=None)


def standstill(ranks: Sequence[RankSteps], now: float) -> tuple[int, str]:
    """Returns the rank that holds the others up, and a sentence about where they are; 0 and nothing without ranks."""
    last = behind(ranks)
    if last is None:
        return 0, ""
    what = "is stopped in" if last.stopped else "has ended" if last.ended == last.begun else "is in"
    others = "".join(f", rank {each.rank} is in step {each.begun}" for each in ranks if each is not last)
    return last.rank, f"rank {last.rank} {what} step {last.begun} and moved {now - last.moved_s:.1f} s ago{others}"


def _is_stopped(pid: int, started: int) -> bool:
    return _started(pid) == started and _stat(pid)[0] in "Tt"


def _started(pid: int) -> int | None:
    """Returns when a process was started, in ticks since the machine's; None: there is none of that id."""
    fields = _stat(pid)
    return int(fields[19]) if len(fields) > 19 else None


def _stat(pid: int) -> list[str]:
    """Returns /proc/PID/stat from the state on (proc(5))."""
    with suppress(OSError, ValueError):
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return [""]
