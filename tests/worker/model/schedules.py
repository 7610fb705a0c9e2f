"""Random schedules of the same three sequences: whatever the company, a row has the same bits.

A schedule decides which sequences a step has, how many tokens of each (a prompt cut anywhere, a whole one, an answer resumed at
any index), in which blocks they lie, which begin with blocks of another, and how many threads compute.
"""

from __future__ import annotations

import random
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ryzanstein.worker.engine.plan import StepPlan

LENGTHS = (150, 97, 100)

Rows = dict[tuple[int, int], Tensor]
"""Logits by sequence and position."""
Steps = list[tuple[StepPlan, list[tuple[int, int]]]]
"""Plans, and which sequence's position each of their rows is."""


@dataclass(frozen=True)
class Schedules:
    """Schedules of sequences in a cache of `num_blocks` blocks.

    The third sequence has its first `shared` tokens in common with the first: whole blocks, and more than one chunk of keys.
    """

    block_size: int = 4
    num_blocks: int = 120
    shared: int = 68

    @property
    def options(self) -> dict[str, Any]:
        """Those of a runner that can run them."""
        sizes = {"num_blocks": self.num_blocks, "num_states": self.num_blocks, "block_size": self.block_size}
        return {**sizes, "max_tokens_per_step": 400, "max_sequences": 4}

    def sequence_ids(self, seed: int = 7) -> list[list[int]]:
        rng = random.Random(seed)
        ids = [[rng.randrange(3, 251) for _ in range(length)] for length in LENGTHS]
        ids[2][: self.shared] = ids[0][: self.shared]
        return ids

    def alone(self, ids: list[list[int]]) -> Steps:
        """Every position as a step of its own."""
        own = self._tables(random.Random(0), shares=False)
        return [
            (StepPlan(1, [token], [1], [position], [own[s]], [0], True), [(s, position)])
            for s, row in enumerate(ids)
            for position, token in enumerate(row)
        ]

    def company(self, ids: list[list[int]], rng: random.Random) -> Steps:
        """One random schedule."""
        shares = rng.random() < 0.5
        own, fed = self._tables(rng, shares), [0, 0, 0]
        steps: Steps = []
        while any(fed[s] < LENGTHS[s] for s in range(3)):
            open_s = [s for s in range(3) if fed[s] < LENGTHS[s] and not (s == 2 and shares and fed[0] < self.shared)]
            if shares and 2 in open_s and fed[2] == 0:
                fed[2] = self.shared
            chosen = rng.sample(open_s, rng.randint(1, len(open_s)))
            num_new = [_chunk(rng, LENGTHS[s] - fed[s]) for s in chosen]
            tokens = [token for s, count in zip(chosen, num_new, strict=True) for token in ids[s][fed[s] : fed[s] + count]]
            context, step_tables = [fed[s] for s in chosen], [own[s] for s in chosen]
            plan = StepPlan(1, tokens, num_new, context, step_tables, list(range(len(chosen))), True)
            for s, count in zip(chosen, num_new, strict=True):
                fed[s] += count
            steps.append((plan, [(s, fed[s] - 1) for s in chosen]))
        return steps

    def logits(self, runner: Any) -> Tensor:
        """Those of every position alone, one after the other."""
        return torch.stack(list(run(runner, self.alone(self.sequence_ids())).values()))

    def check(self, runner: Any, num_schedules: int = 3) -> None:
        """Asserts that rows have the same bits in company as alone."""
        ids = self.sequence_ids()
        runner.forgets = False
        expected = run(runner, self.alone(ids))
        runner.forgets = True
        assert all(row.isfinite().all() for row in expected.values())
        for seed in range(num_schedules):
            steps = self.company(ids, random.Random(seed))
            wrong = differing(expected, run(runner, steps, num_threads=1 if seed % 2 else 2 + seed // 2 % 2))
            assert not wrong, f"schedule {seed}: {len(wrong)} rows, the first {wrong[0]}"

    def _tables(self, rng: random.Random, shares: bool) -> list[list[int]]:
        blocks = rng.sample(range(self.num_blocks), self.num_blocks)
        needed = [-(-length // self.block_size) for length in LENGTHS]
        found = [[blocks.pop() for _ in range(count)] for count in needed]
        if shares:
            found[2][: self.shared // self.block_size] = found[0][: self.shared // self.block_size]
        return found


def _chunk(rng: random.Random, left: int) -> int:
    most = left if rng.random() < 0.1 else 2
    return min(left, rng.choice([1, 1, 1, 1, rng.randint(1, 6), rng.randint(1, 70), most]))


def rows_of(steps: Steps, answers: Iterable[Tensor]) -> Rows:
    return {key: row for (_, keys), logits in zip(steps, answers, strict=True) for key, row in zip(keys, logits, strict=True)}


def run(runner: Any, steps: Steps, num_threads: int = 1) -> Rows:
    torch.set_num_threads(num_threads)
    try:
        return rows_of(steps, [runner.hidden_logits(plan) for plan, _ in steps])
    finally:
        torch.set_num_threads(1)


def differing(expected: Rows, rows: Rows) -> list[tuple[int, int, float]]:
    """Sequence, position, and the greatest difference, of rows whose bits are not the same."""
    return [
        (s, position, (logits - expected[s, position]).abs().max().item())
        for (s, position), logits in rows.items()
        if not torch.equal(logits.view(torch.int32), expected[s, position].view(torch.int32))
    ]
