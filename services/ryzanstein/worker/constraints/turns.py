"""Computes the masks of slow grammars beside the steps, one after the other, so that no step waits for them.

Most masks take less than a millisecond and are computed with their step. An ambiguous grammar may
take fifty times as long for each token of each of its choices: such a choice sits out the steps
until its mask is known. Among groups, the one whose masks have taken least time so far is next
(start-time fair queueing, Goyal et al. 1996), so that many slow choices of one group delay each
other and nobody else's.
"""

from __future__ import annotations

import os
import threading
import time
import weakref
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np

from ryzanstein.worker.constraints.table import Words

QUICK_S = 0.001
"""A mask that takes no longer is computed with its step, however many there are."""
MASKS_S = 0.01
"""So much processor time of each thread the masks of a step may take together, or half of the step's own time."""
_NICENESS = 10


class MaskGroup(Protocol):
    """What the choices of a group have in common: the processor time that their masks have taken."""

    used_s: float


class Slow(Protocol):
    """A choice whose mask is computed ahead."""

    @property
    def group(self) -> MaskGroup: ...

    def compute(self, words: Words) -> None:
        """Writes the mask of the choice's next token."""
        ...


@dataclass(eq=False, slots=True)
class MaskTurn:
    """A mask that is being computed, or waits for that. `words` means nothing before it is `done`."""

    slow: weakref.ref[Slow]
    group: MaskGroup
    words: Words
    done: threading.Event = field(default_factory=threading.Event)


class MaskTurns:
    """The turns of slow choices. `computed_s` is the time that they took, from the start."""

    def __init__(self, num_words: int, num_threads: int) -> None:
        self._num_words, self._num_threads = num_words, num_threads
        self._pool = ThreadPoolExecutor(1, "slow-masks", _yield_to_ranks)
        self._lock = threading.Lock()
        self._waiting: list[MaskTurn] = []
        self._num_pending = 0
        self._least_s = 0.0
        self._share_s = MASKS_S * num_threads
        self.computed_s = 0.0

    @property
    def pending(self) -> bool:
        """Whether a mask is being computed, or waits for that."""
        return self._num_pending > 0

    def share(self, num_rows: int, step_s: float) -> None:
        """Divides the time for masks among the constrained rows of a step."""
        self._share_s = max(QUICK_S, max(MASKS_S, step_s / 2) * self._num_threads / max(1, num_rows))

    def is_slow(self, mask_s: float) -> bool:
        """Returns whether a mask that took so long is computed ahead the next time."""
        return mask_s > self._share_s

    def begin(self, slow: Slow) -> MaskTurn:
        """Puts a choice in the queue. One that ends meanwhile, and is forgotten, costs nothing."""
        turn = MaskTurn(weakref.ref(slow), slow.group, np.empty(self._num_words, np.uint32))
        with self._lock:
            turn.group.used_s = max(turn.group.used_s, self._least_s)
            self._waiting.append(turn)
            self._num_pending += 1
        self._pool.submit(self._next)
        return turn

    def finish(self, turn: MaskTurn) -> Words:
        """Returns the mask. Computes it now if its turn has not come."""
        with self._lock:
            if own := turn in self._waiting:
                self._waiting.remove(turn)
        if own:
            self._compute(turn)
        turn.done.wait()
        return turn.words

    def _next(self) -> None:
        with self._lock:
            if not self._waiting:
                return  # somebody could not wait for it
            turn = min(self._waiting, key=lambda each: each.group.used_s)
            self._waiting.remove(turn)
            self._least_s = turn.group.used_s
        self._compute(turn)

    def _compute(self, turn: MaskTurn) -> None:
        began = time.perf_counter()
        try:
            if (slow := turn.slow()) is not None:
                slow.compute(turn.words)
        finally:
            turn.done.set()
            with self._lock:
                self._num_pending -= 1
                self.computed_s += time.perf_counter() - began


def _yield_to_ranks() -> None:
    with suppress(OSError, AttributeError):  # priorities of single threads are Linux's
        os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), _NICENESS)
