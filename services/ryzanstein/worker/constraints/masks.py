"""Computes the token masks of a step in a thread, beside the step.

It begins when the tokens of the last step are known, so the ranks compute the step meanwhile; the
sampler computes what is left of it. llguidance releases the interpreter. Masks that take long are
computed ahead: see `turns`.

Legend: S rows of the step, W words of 32 tokens each of the vocabulary.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import numpy.typing as npt

from ryzanstein.worker.constraints.matching import GrammarState
from ryzanstein.worker.constraints.turns import MaskTurns

Bits = npt.NDArray[np.uint32]


class MaskedRow(Protocol):
    """What of a row matters here."""

    @property
    def constraint(self) -> object | None: ...

    @property
    def banned_ids(self) -> Sequence[int]: ...

    @property
    def allowed_ids(self) -> Sequence[int]: ...


@dataclass(frozen=True, slots=True)
class _Constrained:
    """A constrained row, at its place among the step's rows."""

    place: int
    state: GrammarState
    banned: Sequence[int]
    allowed: Sequence[int]


class StepMasks:
    """The masks of one step at a time. `turns` computes the slow ones. `waited_s` and `computed_s` count from the start.

    `computed_s` is what all threads took together, `waited_s` what the sampler took.
    """

    def __init__(self, vocab_size: int, num_threads: int) -> None:
        self._num_words = (vocab_size + 31) // 32
        self._words_SW: Bits = np.empty((0, self._num_words), np.uint32)
        self._num_threads = num_threads
        self.turns = MaskTurns(self._num_words, num_threads)
        self._begun_s = 0.0
        self._pool = ThreadPoolExecutor(num_threads, "masks")
        self._rows: deque[_Constrained] = deque()
        self._helpers: list[Future[float]] = []
        self._num_rows = self._num_constrained = 0
        self.waited_s = 0.0
        self.computed_s = 0.0

    def begin(self, rows: Sequence[MaskedRow]) -> None:
        """Starts to compute the masks of a step's rows. The rows must not change until `wait`."""
        self._drop()
        constrained = [
            _Constrained(s, row.constraint, row.banned_ids, row.allowed_ids)
            for s, row in enumerate(rows)
            if isinstance(row.constraint, GrammarState)
        ]
        if not constrained:
            return
        if len(self._words_SW) < len(rows):
            self._words_SW = np.empty((len(rows), self._num_words), np.uint32)
        words_SW = self._words_SW[: len(rows)]
        words_SW[[s for s, row in enumerate(rows) if not isinstance(row.constraint, GrammarState)]] = ~np.uint32(0)
        self._num_rows, self._num_constrained, self._begun_s = len(rows), len(constrained), time.perf_counter()
        self._rows.extend(constrained)
        self._helpers = [self._pool.submit(self._compute) for _ in range(min(self._num_threads, len(constrained)))]

    def wait(self) -> Bits | None:
        """Returns which tokens each row may draw, a bit each, [S, W]; None: all rows any. Valid until `begin`."""
        if not self._helpers:
            return None
        began = time.perf_counter()
        self.turns.share(self._num_constrained, began - self._begun_s)
        self.computed_s += self._compute()
        self.computed_s += sum(helper.result() for helper in self._helpers)
        self._helpers = []
        self.waited_s += time.perf_counter() - began
        return self._words_SW[: self._num_rows]

    def _drop(self) -> None:
        """Ends what was begun for a step that was given up."""
        self._rows.clear()
        for helper in self._helpers:
            helper.exception()
        self._helpers = []

    def _compute(self) -> float:
        """Computes the rows that nobody computes yet, and returns the time that it took. The time of a row is its own."""
        began = time.perf_counter()
        while self._rows:
            try:
                row = self._rows.popleft()
            except IndexError:
                break  # another thread was faster
            words_W = self._words_SW[row.place]
            row.state.write(words_W)
            row.state.narrow(words_W, row.banned, row.allowed)
        return time.perf_counter() - began
