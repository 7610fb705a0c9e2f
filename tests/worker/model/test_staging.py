"""The staging place: when a batch goes on where the last step left it, and that what is read there is what the blocks hold."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from random import Random
from typing import Any

import numpy as np
import pytest

from ryzanstein.worker.cache.staging import BUDGET_BYTES, Staging, staging_slots
from ryzanstein.worker.engine.plan import StepPlan

BLOCK = 4


def table(*rows: list[int]) -> np.ndarray[Any, np.dtype[np.int64]]:
    width = max(map(len, rows))
    return np.array([row + [0] * (width - len(row)) for row in rows], np.int64)


def lengths(*values: int) -> np.ndarray[Any, np.dtype[np.int64]]:
    return np.array(values, np.int64)


@pytest.fixture
def staging() -> Staging:
    staging = Staging(first_slot=1000, num_slots=512, block_size=BLOCK)
    assert staging.place(table([1, 2], [5]), lengths(7, 3)).fresh
    return staging


def test_a_batch_with_one_key_more_each_goes_on(staging: Staging) -> None:
    placement = staging.place(table([1, 2], [5]), lengths(8, 4))
    assert (placement.fresh, placement.first_slot, placement.stride) == (False, 1000, 64)
    assert not staging.place(table([1, 2, 9], [5, 0]), lengths(9, 5)).fresh


@pytest.mark.parametrize(
    ("rows", "keys"),
    [
        (([1, 2], [6]), (8, 4)),  # another sequence
        (([1, 2],), (8,)),  # one has left
        (([1, 2], [5], [7]), (8, 4, 1)),  # one has joined
        (([5], [1, 2]), (4, 8)),  # another order
        (([1, 2], [5]), (7, 3)),  # the step is repeated
        (([1, 2], [5]), (9, 5)),  # a step passed elsewhere
    ],
)
def test_any_other_batch_is_copied_anew(staging: Staging, rows: Any, keys: Any) -> None:
    assert staging.place(table(*rows), lengths(*keys)).fresh


def test_a_batch_that_outgrows_its_stride_is_copied_anew_with_a_longer_one(staging: Staging) -> None:
    blocks = list(range(40))
    strides = []
    for length in range(60, 70):
        placement = staging.place(table(blocks, blocks), lengths(length, length))
        if placement.fresh:
            strides.append(placement.stride)
        assert length <= placement.stride
    assert strides == [64, 128]


def test_what_is_too_large_or_too_uneven_does_not_fit(staging: Staging) -> None:
    assert staging.fits(lengths(60, 60, 60, 60))
    assert not staging.fits(lengths(130, 130, 130))
    assert not staging.fits(lengths(120, 1, 1))


def test_the_place_is_bounded() -> None:
    assert staging_slots(num_layers=4, slot_bytes=1024, num_cache_slots=100) == 100
    assert staging_slots(num_layers=4, slot_bytes=1024, num_cache_slots=10**9) * 4 * 1024 <= BUDGET_BYTES


def test_batches_that_change_at_random_decode_as_without_staging(
    checkpoint: Callable[..., Path], runner: Callable[..., Any]
) -> None:
    """Two runners on one checkpoint, one of them without a staging place, fed the same plans."""
    staged, plain = (runner(checkpoint(seed=20), num_blocks=200, kernels="torch") for _ in range(2))
    (reader,) = plain._inputs.readers
    unstaged = replace(reader, batches=replace(reader.batches, staging=None), view_keys=10**9)
    plain._inputs = replace(plain._inputs, readers=[unstaged], staging=None)
    rng = Random(3)
    live: dict[int, int] = {}  # first block to length
    freshes = 0
    for step in range(160):
        if len(live) < 2 or rng.random() < 0.05:
            first = rng.choice([block for block in range(0, 200, 20) if block not in live])
            live[first] = rng.randrange(10, 40)
            _run(staged, plain, step, tables=[list(range(first, first + 20))], num_new=[live[first]], context=[0])
        if len(live) > 2 and rng.random() < 0.05:
            live.pop(rng.choice(sorted(live)))
        tables = [list(range(first, first + 20)) for first in live]
        freshes += _run(staged, plain, step, tables=tables, num_new=[1] * len(live), context=list(live.values()))
        live = {first: length + 1 for first, length in live.items() if length < 79}
    assert 5 < freshes < 80


def _run(staged: Any, plain: Any, step: int, *, tables: list[list[int]], num_new: list[int], context: list[int]) -> bool:
    """Both give the same logits; whether the batch was copied anew."""
    ids = [(step * 7 + i) % 256 for i in range(sum(num_new))]
    plan = StepPlan(step, ids, num_new, context, tables, list(range(len(tables))))
    before = staged._inputs.staging._stride, staged._inputs.staging._length_S
    difference = (staged.hidden_logits(plan) - plain.hidden_logits(plan)).abs().max()
    assert difference < 1e-4
    after = staged._inputs.staging._length_S
    return len(after) != len(before[1]) or bool((after != before[1] + 1).any())
