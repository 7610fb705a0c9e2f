"""Computes the token masks of a step in a thread, beside the step.

It begins when the tokens of the last step are known, so the ranks compute the step meanwhile; the
sampler waits for what is left of it. llguidance and numpy release the interpreter.

Legend: S rows of the step, R constrained rows, V vocabulary.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import numpy.typing as npt

from ryzanstein.worker.constraints.matching import GrammarState

Flags = npt.NDArray[np.bool_]


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
    """The masks of one step at a time. `waited_s` and `computed_s` count from the start."""

    def __init__(self, vocab_size: int, num_threads: int) -> None:
        self._vocab_size, self._num_threads = vocab_size, num_threads
        self._num_words = (vocab_size + 31) // 32
        self._words = np.empty((0, self._num_words), np.uint32)
        self._pool = ThreadPoolExecutor(1, "masks")
        self._helpers = ThreadPoolExecutor(max(1, num_threads - 1), "masks")
        self._job: Future[Flags] | None = None
        self.waited_s = 0.0
        self.computed_s = 0.0

    def begin(self, rows: Sequence[MaskedRow]) -> None:
        """Starts to compute the masks of a step's rows. The rows must not change until `wait`."""
        if self._job is not None:
            self._job.exception()  # of a step that was given up
            self._job = None
        constrained = [
            _Constrained(s, row.constraint, row.banned_ids, row.allowed_ids)
            for s, row in enumerate(rows)
            if isinstance(row.constraint, GrammarState)
        ]
        if constrained:
            self._job = self._pool.submit(self._compute, constrained, len(rows))

    def wait(self) -> Flags | None:
        """Returns which tokens each row may draw, [S, V]; None: all rows any. Valid until `begin`."""
        if self._job is None:
            return None
        began = time.perf_counter()
        flags_SV, self._job = self._job.result(), None
        self.waited_s += time.perf_counter() - began
        return flags_SV

    def _compute(self, constrained: Sequence[_Constrained], num_rows: int) -> Flags:
        began = time.perf_counter()
        words_RW = self._room(len(constrained))
        self._fill([row.state for row in constrained], words_RW)
        for words_W, row in zip(words_RW, constrained, strict=True):
            row.state.narrow(words_W, row.banned, row.allowed)
        flags_RV = np.unpackbits(words_RW.view(np.uint8), axis=1, bitorder="little", count=self._vocab_size).view(np.bool_)
        if len(constrained) < num_rows:
            flags_SV = np.ones((num_rows, self._vocab_size), np.bool_)
            flags_SV[[row.place for row in constrained]] = flags_RV
            flags_RV = flags_SV
        self.computed_s += time.perf_counter() - began
        return flags_RV

    def _fill(self, states: Sequence[GrammarState], words_RW: npt.NDArray[np.uint32]) -> None:
        """Divides the rows among the threads. Each row by itself: its time is its own."""
        num = min(self._num_threads, len(states))
        helped = [self._helpers.submit(_computed, states[i::num], words_RW[i::num]) for i in range(1, num)]
        _computed(states[::num], words_RW[::num])
        for each in helped:
            each.result()

    def _room(self, num_rows: int) -> npt.NDArray[np.uint32]:
        if len(self._words) < num_rows:
            self._words = np.empty((num_rows, self._num_words), np.uint32)
        return self._words[:num_rows]


def _computed(states: Sequence[GrammarState], words_RW: npt.NDArray[np.uint32]) -> None:
    for state, words_W in zip(states, words_RW, strict=True):
        state.compute(words_W)
