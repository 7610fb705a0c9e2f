"""Records of ranks as others read them, whatever the rank writes meanwhile."""

import mmap
import os
import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ryzanstein.worker.ranks.health.board import Board, RankBoard, board_bytes
from ryzanstein.worker.ranks.health.rings import EPOCH, NUM_COLLECTIVES, NUM_STEPS, RingView, RingWriter

NUM, WIDTH, AT = 4, 4, 8
WORDS = AT + NUM * WIDTH


class Stores(list[int]):
    """Memory that keeps every value that a word had: `history[word]` are the values with their times."""

    def __init__(self) -> None:
        super().__init__([0] * WORDS)
        self.now = 0
        self.history: list[list[tuple[int, int]]] = [[(0, 0)] for _ in range(WORDS)]

    def __setitem__(self, word, value) -> None:
        self.now += 1
        self.history[word].append((self.now, value))

    def at(self, word: int, time: int) -> int:
        return next(value for stored, value in reversed(self.history[word]) if stored <= time)


class Loads:
    """Memory as a reader sees it that loads word by word: each load at a later moment, the words of a copy in any order."""

    def __init__(self, stores: Stores, delays: list[int], order: list[int]) -> None:
        self._stores, self._delays, self._order = stores, iter(delays), order
        self._time = 0

    def __getitem__(self, words: slice) -> list[int]:
        copy = [0] * WIDTH
        for word in self._order:
            self._time += next(self._delays, 0)
            copy[word] = self._stores.at(words.start + word, self._time)
        return copy


def fields(number: int) -> tuple[int, int, int]:
    return number * 3, number * 5, number * 7


@given(
    numbers=st.lists(st.integers(1, 3), min_size=1, max_size=14),
    delays=st.lists(st.integers(0, 12), max_size=60),
    order=st.permutations(range(WIDTH)),
    first=st.integers(0, 12),
)
def test_what_is_read_was_written_as_a_whole(numbers, delays, order, first):
    stores = Stores()
    writer, number = RingWriter(stores, AT, NUM, WIDTH), 0
    for gap in numbers:
        number += gap
        writer.write(number, *fields(number))
    for record in RingView(Loads(stores, delays, order), AT, NUM, WIDTH).read(first, first + 9):
        assert tuple(record[1:]) == fields(record[0])


@given(count=st.integers(0, 3 * NUM), first=st.integers(0, 3 * NUM), length=st.integers(0, 3 * NUM))
def test_a_ring_has_the_latest_records(count, first, length):
    words = [0] * WORDS
    writer, view = RingWriter(words, AT, NUM, WIDTH), RingView(words, AT, NUM, WIDTH)
    for number in range(1, count + 1):
        writer.write(number, *fields(number))
    read = [record[0] for record in view.read(first, first + length)]
    there = range(max(1, count - NUM + 1), count + 1)
    assert read == [number for number in there if number > first + length - NUM and first <= number <= first + length]
    assert not any(words[:AT]), "only its own words"


@pytest.fixture
def boards():
    """The agent's view, two ranks' slots, and a clock that goes on by a second at each look."""
    fd = os.memfd_create("test-board")
    os.ftruncate(fd, board_bytes(2))
    ticks = iter(range(1, 1_000_000))
    board, ranks = Board(fd, 2), [RankBoard(fd, 2, rank, lambda: next(ticks) * 10**9) for rank in range(2)]
    os.close(fd)
    yield board, ranks
    for each in (board, *ranks):
        each.close()


def test_a_step_is_recorded_with_its_parts_and_its_longest_collective(boards):
    board, (rank, other) = boards
    rank.begin_step(7, 33)
    for op, slow in (("all_reduce", False), ("all_gather", True), ("broadcast", False)):
        rank.begin(op, 64)
        if slow:
            other.move()
        rank.end()
    rank.end_step()
    (step,) = board.steps(0, 1, 9)
    assert (step.step, step.num_tokens) == (7, 33)
    assert (step.longest_s, step.longest_op, step.longest_number) == (2.0, "all_gather", 2)
    assert step.collective_s == 4.0
    assert step.compute_s + step.collective_s + step.tail_s == board.read()[0].last_step_s
    assert board.steps(1, 0, 9) == []


def test_the_latest_steps_stay(boards):
    board, (rank, _) = boards
    for step in range(1, NUM_STEPS + 10):
        rank.begin_step(step, 1)
        rank.end_step()
    assert [step.step for step in board.steps(0, 1, 1000)] == []
    assert [step.step for step in board.steps(0, 1, NUM_STEPS + 9)] == list(range(10, NUM_STEPS + 10))


def test_a_collective_is_recorded_when_it_is_left(boards):
    board, (rank, other) = boards
    rank.begin("all_reduce", 4096)
    assert board.collectives(0, 1, 1) == []
    rank.end()
    (record,) = board.collectives(0, 1, 1)
    assert (record.number, record.op, record.size_bytes, record.left_ns - record.arrived_ns) == (1, "all_reduce", 4096, 10**9)
    assert board.last_collective() == 0, "the other rank has left none"
    other.begin("an unknown one")
    other.end()
    assert board.last_collective() == 1
    assert board.collectives(1, 1, 1)[0].op == "other"


def test_collectives_after_a_step_that_was_given_up_are_others(boards):
    board, ranks = boards
    for rank in ranks:
        rank.begin("all_reduce")
        rank.end()
        rank.rejoined()
        rank.begin("all_gather")
        rank.end()
    assert board.last_collective() == EPOCH + 1
    assert [record.op for record in board.collectives(0, EPOCH, EPOCH + 1)] == ["all_gather"]
    assert board.collectives(0, 1, 1) == [], "its place was taken"
    assert board.read()[0].collective == 1


def test_a_process_that_writes_as_fast_as_it_can_is_read_without_a_torn_record():
    with mmap.mmap(-1, NUM_COLLECTIVES * 32) as memory, memoryview(memory).cast("Q") as words:
        child = os.fork()
        if child == 0:
            try:
                writer, number, end = RingWriter(words, 0, NUM, WIDTH), 0, time.monotonic() + 0.5
                while time.monotonic() < end:
                    for _ in range(1000):
                        number += 1
                        writer.write(number, *fields(number))
            finally:
                os._exit(0)
        view, last, seen = RingView(words, 0, NUM, WIDTH), 0, 0
        while os.waitpid(child, os.WNOHANG) == (0, 0):
            last = max(words[place * WIDTH] for place in range(NUM))
            for record in view.read(last - NUM, last + NUM):
                seen += 1
                assert tuple(record[1:]) == fields(record[0])
        assert seen > 0
        assert last > NUM
