"""The rings of the board: the last steps and the last collectives of one rank.

A record is a few 8-byte words, the first of which is its number. The rank writes 0 there before the
rest and the number after it, without locks. A reader that finds the same words twice has a whole
record: see `RingView.read`. This relies on x86's total store order, as the shared-memory collectives
do; elsewhere a torn record is possible, which costs one sample.
"""

from __future__ import annotations

from collections.abc import Iterator, MutableSequence, Sequence
from dataclasses import dataclass

from ryzanstein.worker.collectives.meeting import PLACES

NUM_STEPS, STEP_WORDS = 64, 8
NUM_COLLECTIVES, COLLECTIVE_WORDS = 512, 4
OPS = ("other", "all_reduce", "all_gather", "gather_to_root", "broadcast", "rejoin")
OP_CODES = {op: code for code, op in enumerate(OPS)}
OP_BITS = 8
OP_MASK = (1 << OP_BITS) - 1
EPOCH = 1 << 40
"""Collectives count from the next multiple after a step that was given up: more than any group has."""


@dataclass(frozen=True, slots=True)
class StepRecord:
    """A step of one rank. Times are seconds on the monotonic clock; their sum is the step.

    `collective_s` is the time in collectives, `tail_s` the time after the last one, `compute_s` the
    rest. A rank alone has no collectives, and all of its time is in the tail. `longest_s` is the
    longest that it was in one collective: `longest_op`, of the number that the board shows.
    """

    step: int
    begun_s: float
    num_tokens: int
    compute_s: float
    collective_s: float
    tail_s: float
    longest_s: float
    longest_op: str
    longest_number: int


@dataclass(frozen=True, slots=True)
class CollectiveRecord:
    """A collective of one rank. `number` is unique in a group and equal on all ranks; times are in nanoseconds."""

    number: int
    op: str
    size_bytes: int
    arrived_ns: int
    left_ns: int


class RingWriter:
    """A ring as its rank writes it, from the place `at` in `words`."""

    def __init__(self, words: MutableSequence[int] | memoryview, at: int, num_records: int, record_words: int) -> None:
        self._words, self._at, self._num, self._width = words, at, num_records, record_words

    def write(self, number: int, *fields: int) -> None:
        """Overwrites the oldest record. Numbers go up from 1; they may leave some out."""
        words = self._words
        at = begin = self._at + number % self._num * self._width
        words[begin] = 0
        for field in fields:
            at += 1
            words[at] = field
        words[begin] = number


class RingView:
    """A ring as others read it, while its rank writes."""

    def __init__(self, words: Sequence[int] | memoryview, at: int, num_records: int, record_words: int) -> None:
        self._words, self._at, self._num, self._width = words, at, num_records, record_words

    def read(self, first: int, last: int) -> Iterator[Sequence[int]]:
        """Yields the records `first` to `last` that are whole and still there.

        The first reading shows that the record was written before the second one, and the second
        one that it was not overwritten before the end of the first one. So equal words are of it.
        """
        for number in range(max(1, first, last - self._num + 1), last + 1):
            at = self._at + number % self._num * self._width
            record = list(self._words[at : at + self._width])
            if record[0] == number and list(self._words[at : at + self._width]) == record:
                yield record


def step_record(words: Sequence[int]) -> StepRecord:
    step, begun_ns, num_tokens, compute_ns, collective_ns, tail_ns, longest_ns, longest = words
    return StepRecord(
        step,
        begun_ns / 1e9,
        num_tokens,
        compute_ns / 1e9,
        collective_ns / 1e9,
        tail_ns / 1e9,
        longest_ns / 1e9,
        op_name(longest),
        longest >> OP_BITS,
    )


def collective_record(words: Sequence[int]) -> CollectiveRecord:
    number, what, arrived_ns, left_ns = words
    return CollectiveRecord(number, op_name(what), what >> OP_BITS, arrived_ns, left_ns)


def op_name(word: int) -> str:
    """Returns the name in the low bits of a word; a torn word may have none that is known."""
    code = word & OP_MASK
    return OPS[code] if code < len(OPS) else OPS[0]


def place_text(word: int) -> str:
    """Returns what a step in C computes, such as "layer 7, down"; empty: no such step runs. Layers count from 0."""
    above, code = word >> OP_BITS, word & OP_MASK
    name = PLACES[code] if code < len(PLACES) else OPS[0]
    return f"layer {above - 1}, {name}" if above else name
