"""The progress board: what each rank does, in shared memory, visible even when the rank hangs.

It is one memfd (nothing in /dev/shm that could be left behind) with one slot per rank, written only
by that rank, without locks. A slot has what the rank does now, in aligned 8-byte words, which a
reader never sees half written, and two rings of what it did: its last steps and its last
collectives. The phase's name is two words; torn names are possible and harmless.
"""

from __future__ import annotations

import mmap
import os
import time
from collections.abc import Callable
from ctypes import addressof, c_char
from functools import lru_cache

from ryzanstein.worker.ranks.health.rings import (
    COLLECTIVE_WORDS,
    EPOCH,
    NUM_COLLECTIVES,
    NUM_STEPS,
    OP_BITS,
    OP_CODES,
    OP_MASK,
    STEP_WORDS,
    CollectiveRecord,
    RingView,
    RingWriter,
    StepRecord,
    collective_record,
    place_text,
    step_record,
)
from ryzanstein.worker.supervision.group import FORWARD, IDLE, LOAD, PACK, RankProgress

_NOW_BYTES = 256
_STEPS_AT = _NOW_BYTES // 8
_COLLECTIVES_AT = _STEPS_AT + NUM_STEPS * STEP_WORDS
_SLOT_WORDS = _COLLECTIVES_AT + NUM_COLLECTIVES * COLLECTIVE_WORDS
SLOT_BYTES = _SLOT_WORDS * 8
_PID, _STEP, _COLLECTIVE, _PROGRESS_NS, _BEGUN_NS, _TOKENS, _LAST_STEP_NS = range(7)
_PHASE_AT = 7 * 8
_PHASE_BYTES = 16
# The words after the phase.
_COLLECTIVES_NS, _COMPUTE_NS, _ANSWERED, _TAIL_NS, _SCHEDULE_NS, _UPDATE_NS, _IDLE_NS, _RECORDED = range(9, 17)
_LOADED, _TO_LOAD, _PACKED, _TO_PACK, _PLACE = range(17, 22)
# What the rank itself remembers is here as well, because C code reports to the board too (`kernels/meeting.c`): the epoch of
# its collectives, the one that it is in, the longest one of the step, and the phase around it.
_EPOCH, _WHAT, _ARRIVED_NS, _LONGEST_NS, _LONGEST = range(22, 27)
_OUTER_AT = 27 * 8


def board_bytes(size: int) -> int:
    """Returns the size of the board of so many ranks. All zero: no rank has started."""
    return size * SLOT_BYTES


class Board:
    """The agent's view of the board."""

    def __init__(self, fd: int, size: int) -> None:
        self._map = mmap.mmap(fd, board_bytes(size), prot=mmap.PROT_READ)
        self._size = size
        self._words = memoryview(self._map).cast("Q")
        self._steps = [self._ring(rank, _STEPS_AT, NUM_STEPS, STEP_WORDS) for rank in range(size)]
        self._collectives = [self._ring(rank, _COLLECTIVES_AT, NUM_COLLECTIVES, COLLECTIVE_WORDS) for rank in range(size)]

    def _ring(self, rank: int, at: int, num_records: int, record_words: int) -> RingView:
        begin = rank * _SLOT_WORDS + at
        return RingView(self._words, begin, num_records, record_words)

    def read(self) -> list[RankProgress]:
        """Returns every rank's slot; pid 0: the rank has not started."""
        return [self._read(rank) for rank in range(self._size)]

    def _read(self, rank: int) -> RankProgress:
        slot = self._map[rank * SLOT_BYTES : rank * SLOT_BYTES + _NOW_BYTES]
        words = memoryview(slot).cast("Q")
        phase = slot[_PHASE_AT : _PHASE_AT + _PHASE_BYTES].rstrip(b"\0").decode("ascii", "replace")
        return RankProgress(
            rank,
            words[_PID],
            words[_STEP],
            words[_COLLECTIVE],
            phase,
            words[_PROGRESS_NS] / 1e9,
            words[_BEGUN_NS] / 1e9,
            words[_TOKENS],
            words[_LAST_STEP_NS] / 1e9,
            words[_COLLECTIVES_NS] / 1e9,
            words[_COMPUTE_NS] / 1e9,
            words[_ANSWERED],
            words[_TAIL_NS] / 1e9,
            words[_SCHEDULE_NS] / 1e9,
            words[_UPDATE_NS] / 1e9,
            words[_IDLE_NS] / 1e9,
            words[_LOADED],
            words[_TO_LOAD],
            words[_PACKED],
            words[_TO_PACK],
            place_text(words[_PLACE]),
        )

    def steps(self, rank: int, first: int, last: int) -> list[StepRecord]:
        """Returns those of the steps `first` to `last` that the rank has ended and that are still recorded."""
        return [step_record(words) for words in self._steps[rank].read(first, last)]

    def collectives(self, rank: int, first: int, last: int) -> list[CollectiveRecord]:
        """Returns those of the collectives `first` to `last` that are still recorded."""
        return [collective_record(words) for words in self._collectives[rank].read(first, last)]

    def last_collective(self) -> int:
        """Returns the number of the last collective that every rank has left; 0: of none."""
        return min(self._words[rank * _SLOT_WORDS + _RECORDED] for rank in range(self._size))

    def close(self) -> None:
        self._words.release()
        self._map.close()


class RankBoard:
    """A rank's own slot of the board. `clock_ns` is monotonic.

    Collectives report to it: it is the model's `CollectiveProgress`. All time from the first step on is in a step or between
    steps, where rank 0 schedules, updates or is idle, and the other ranks are idle.
    """

    def __init__(
        self, fd: int, size: int, rank: int, clock_ns: Callable[[], int] = time.monotonic_ns, pid: int | None = None
    ) -> None:
        self._clock_ns = clock_ns
        self._map = mmap.mmap(fd, board_bytes(size))
        self._address = addressof(c_char.from_buffer(self._map, rank * SLOT_BYTES))
        slot = memoryview(self._map)[rank * SLOT_BYTES : (rank + 1) * SLOT_BYTES]
        self._phase = slot[_PHASE_AT : _PHASE_AT + _PHASE_BYTES]
        self._outer = slot[_OUTER_AT : _OUTER_AT + _PHASE_BYTES]
        self._words = slot.cast("Q")
        self._steps = RingWriter(self._words, _STEPS_AT, NUM_STEPS, STEP_WORDS)
        self._collectives = RingWriter(self._words, _COLLECTIVES_AT, NUM_COLLECTIVES, COLLECTIVE_WORDS)
        self._words[_PID] = os.getpid() if pid is None else pid
        self._collectives_before_ns = 0
        for word in range(_PLACE, _LONGEST + 1):
            self._words[word] = 0
        self._between = _IDLE_NS
        self._since_ns = 0
        self.enter("start")

    @property
    def address(self) -> int | None:
        """Returns where C code may report, which knows the monotonic clock alone."""
        return self._address if self._clock_ns is time.monotonic_ns else None

    def enter(self, phase: str) -> None:
        """Records that the rank enters another phase, for example "load"."""
        self._outer[:] = self._phase[:] = _phase_bytes(phase)
        self._words[_PROGRESS_NS] = self._clock_ns()

    def begin_step(self, step: int, num_tokens: int) -> None:
        self._collectives_before_ns = self._words[_COLLECTIVES_NS]
        self._words[_LONGEST_NS] = self._words[_LONGEST] = 0
        self._words[_TOKENS] = num_tokens
        self._words[_STEP] = step
        self._words[_BEGUN_NS] = self._spend(self._between)
        self.enter(FORWARD)

    def end_step(self) -> None:
        begun_ns, moved_ns = self._words[_BEGUN_NS], self._words[_PROGRESS_NS]
        in_collectives_ns = self._words[_COLLECTIVES_NS] - self._collectives_before_ns
        compute_ns = max(0, moved_ns - begun_ns - in_collectives_ns)
        self._words[_COMPUTE_NS] += compute_ns
        self._since_ns = moved_ns
        ended_ns = self._spend(_TAIL_NS)
        self._words[_LAST_STEP_NS] = ended_ns - begun_ns
        self._steps.write(
            self._words[_STEP],
            begun_ns,
            self._words[_TOKENS],
            compute_ns,
            in_collectives_ns,
            ended_ns - moved_ns,
            self._words[_LONGEST_NS],
            self._words[_LONGEST],
        )
        self._words[_BEGUN_NS] = self._words[_PLACE] = 0
        self.enter(IDLE)

    def waited(self) -> None:
        """Records that rank 0 has what it waited for, or need not wait: from here on it schedules."""
        self._spend(_IDLE_NS)
        self._between = _SCHEDULE_NS

    def reported(self) -> None:
        """Records that rank 0 has reported what a step produced."""
        self._spend(_UPDATE_NS)

    def _spend(self, word: int) -> int:
        """Adds the time since the last call to one of the sums. Returns the time."""
        now_ns, since_ns = self._clock_ns(), self._since_ns
        self._since_ns = now_ns
        if 0 < since_ns < now_ns:
            self._words[word] += now_ns - since_ns
        return now_ns

    def answer(self, number: int) -> None:
        """Answers a check between two steps."""
        self._words[_ANSWERED] = number
        self._words[_PROGRESS_NS] = self._spend(self._between)

    def move(self) -> None:
        """Records that the rank goes on, within a phase that takes long."""
        self._words[_PROGRESS_NS] = self._clock_ns()

    def load(self, loaded_bytes: int, of_bytes: int) -> None:
        """Records how much of the weights has been read. The rank goes on, within a phase that takes long."""
        self._words[_LOADED], self._words[_TO_LOAD] = loaded_bytes, of_bytes
        if loaded_bytes < of_bytes and self._outer == _phase_bytes(PACK):
            self.enter(LOAD)  # another model, or the same in another format
        self.move()

    def pack(self, packed_bytes: int, of_bytes: int) -> None:
        """Records how much of the weights that were read is packed. When all are read, it is what the rank still does."""
        self._words[_PACKED], self._words[_TO_PACK] = packed_bytes, of_bytes
        is_read = self._words[_LOADED] == self._words[_TO_LOAD] > 0
        if is_read and packed_bytes < of_bytes and self._outer == _phase_bytes(LOAD):
            self.enter(PACK)
        self.move()

    def begin(self, op: str, size_bytes: int = 0) -> None:
        """Records that the rank enters a collective; the name is cut at 16 characters."""
        self._phase[:] = _phase_bytes(op)
        self._words[_COLLECTIVE] += 1
        self._words[_WHAT] = size_bytes << OP_BITS | OP_CODES.get(op, 0)
        self._words[_PROGRESS_NS] = self._words[_ARRIVED_NS] = self._clock_ns()

    def end(self) -> None:
        """Records that the rank has left the collective."""
        self._phase[:] = self._outer
        words, left_ns = self._words, self._clock_ns()
        arrived_ns, what = words[_ARRIVED_NS], words[_WHAT]
        words[_PROGRESS_NS] = left_ns
        spent_ns, count = left_ns - arrived_ns, words[_COLLECTIVE]
        words[_COLLECTIVES_NS] += spent_ns
        if spent_ns > words[_LONGEST_NS]:
            words[_LONGEST_NS], words[_LONGEST] = spent_ns, count << OP_BITS | what & OP_MASK
        number = words[_EPOCH] + count
        self._collectives.write(number, what, arrived_ns, left_ns)
        words[_RECORDED] = number

    def rejoined(self) -> None:
        """Resets the count of collectives, as all ranks do, so that a rank that is behind shows."""
        self._words[_COLLECTIVE] = 0
        self._words[_EPOCH] += EPOCH

    @property
    def last_numbers(self) -> tuple[int, int]:
        """Returns the numbers of the last step and of the last collective that are recorded."""
        return self._words[_STEP], self._words[_RECORDED]

    def recorded(self, step: int, collective: int) -> tuple[list[StepRecord], list[CollectiveRecord]]:
        """Returns what the rank has recorded after this step and this collective, as far as it still has it."""
        last_step, last_collective = self.last_numbers
        steps = RingView(self._words, _STEPS_AT, NUM_STEPS, STEP_WORDS).read(step + 1, last_step)
        collectives = RingView(self._words, _COLLECTIVES_AT, NUM_COLLECTIVES, COLLECTIVE_WORDS)
        return (
            [step_record(words) for words in steps],
            [collective_record(words) for words in collectives.read(collective + 1, last_collective)],
        )

    def close(self) -> None:
        """Closes the slot, for a user that outlives it; a rank's slot ends with the process."""
        self._phase.release()
        self._outer.release()
        self._words.release()
        self._map.close()


@lru_cache(maxsize=64)
def _phase_bytes(phase: str) -> bytes:
    return phase.encode("ascii", "replace")[:_PHASE_BYTES].ljust(_PHASE_BYTES, b"\0")
