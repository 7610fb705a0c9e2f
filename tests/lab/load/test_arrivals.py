"""Times of an open loop, and the rows of a trace."""

from __future__ import annotations

import json
import math
import random
from itertools import islice, pairwise
from pathlib import Path

import pytest

from ryzanstein.lab.load.arrivals import constant, poisson
from ryzanstein.lab.load.mooncake import TraceFileError, read_trace
from ryzanstein.lab.load.workload import Shape, conversations, recorded

ROW = {"timestamp": 0, "input_length": 600, "output_length": 7, "hash_ids": [1, 2]}


def test_constant_times_are_even() -> None:
    assert list(islice(constant(4), 4)) == [0.0, 0.25, 0.5, 0.75]


def test_gaps_of_random_times_are_exponential() -> None:
    """Pearson's chi-square over ten equal bins: 27.9 is exceeded by one seed in a thousand, and this one is fixed."""
    rate, num = 50.0, 20_000
    times = list(islice(poisson(rate, random.Random(7)), num))
    gaps = [after - before for before, after in pairwise(times)]
    bins = [0] * 10
    for gap in gaps:
        bins[min(9, int(10 * (1 - math.exp(-rate * gap))))] += 1
    expected = len(gaps) / 10
    assert sum((found - expected) ** 2 / expected for found in bins) < 27.9
    assert num / times[-1] == pytest.approx(rate, rel=0.02)


def trace(path: Path, *rows: object) -> Path:
    file = path / "trace.jsonl"
    file.write_text("".join(f"{row if isinstance(row, str) else json.dumps(row)}\n" for row in rows))
    return file


def test_a_trace_is_played_from_its_first_row_in_order_of_time(tmp_path: Path) -> None:
    rows = read_trace(trace(tmp_path, {**ROW, "timestamp": 5000}, {**ROW, "timestamp": 2000}), speed=2.0)
    assert [row.at_s for row in rows] == [0.0, 1.5]


@pytest.mark.parametrize(
    ("row", "what"),
    [
        ("{", "line 2 is not JSON"),
        ("[" * 100_000, "line 2 is not JSON"),
        ([], "line 2 is not a JSON object"),
        ({**ROW, "timestamp": -1}, "timestamp"),
        ({**ROW, "input_length": True}, "input_length"),
        ({**ROW, "output_length": 10**9}, "output_length"),
        ({**ROW, "timestamp": float("nan")}, "timestamp"),
        ({**ROW, "hash_ids": ["1"]}, "hash_ids"),
        ({**ROW, "hash_ids": [1] * 5000}, "at most 2048"),
    ],
)
def test_a_row_that_cannot_be_played_is_named(tmp_path: Path, row: object, what: str) -> None:
    with pytest.raises(TraceFileError, match=what):
        read_trace(trace(tmp_path, ROW, row))


def test_an_empty_trace_is_refused(tmp_path: Path) -> None:
    with pytest.raises(TraceFileError, match="no line"):
        read_trace(trace(tmp_path))


def test_prompts_of_a_trace_share_what_their_blocks_share(tmp_path: Path) -> None:
    other = {**ROW, "hash_ids": [1, 3]}
    rows = read_trace(trace(tmp_path, ROW, other, {**ROW, "hash_ids": None}))
    first, second, alone = (question.turns[0].split() for question in recorded(rows, Shape(tokens_per_word=1.0), 0))
    assert len(first) == len(second) == len(alone) == 600
    assert first[:512] == second[:512]
    assert first[512:] != second[512:]
    assert alone[:100] != first[:100]


def test_conversations_come_again_and_a_seed_makes_them_others() -> None:
    several = list(islice(conversations(Shape(num_turns=3), 4, seed=1), 8))
    assert several[:4] == several[4:]
    assert len({question.turns for question in several}) == 4
    assert several[0].in_session
    assert next(conversations(Shape(num_turns=3), 4, seed=2)).turns != several[0].turns
