"""Counts a sequence's tokens while it grows: a step costs its new tokens, not all before them."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain

import numpy as np
import numpy.typing as npt

Integers = npt.NDArray[np.int64]


class TokenTally:
    """A count of the tokens of `before` and of `growing`, to which others append.

    Ids outside the vocabulary are ignored.
    """

    __slots__ = ("_counts", "_growing", "_ids", "_num", "_place", "_taken", "_vocab_size")

    def __init__(self, before: Sequence[int], growing: Sequence[int], vocab_size: int) -> None:
        self._growing = growing
        self._vocab_size = vocab_size
        self._taken = len(growing)
        all_ids = np.fromiter(chain(before, growing), np.int64)
        known = all_ids[(all_ids >= 0) & (all_ids < vocab_size)]
        self._ids, self._counts = np.unique(known, return_counts=True)
        self._num = len(self._ids)
        self._place = dict(zip(self._ids.tolist(), range(self._num), strict=True))

    def now(self) -> tuple[Integers, Integers]:
        """Returns the distinct ids, in no order, and how often each occurs.

        The arrays are views, valid until the next call.
        """
        for token_id in self._growing[self._taken :]:
            if 0 <= token_id < self._vocab_size:
                self._add(token_id)
        self._taken = len(self._growing)
        return self._ids[: self._num], self._counts[: self._num]

    def _add(self, token_id: int) -> None:
        place = self._place.setdefault(token_id, self._num)
        if place == self._num:
            self._make_room()
            self._ids[place] = token_id
            self._num += 1
        self._counts[place] += 1

    def _make_room(self) -> None:
        """Doubles the arrays when they are full, so that the mean cost per token is constant."""
        if self._num == len(self._ids):
            room = np.zeros(max(64, self._num), np.int64)
            self._ids = np.concatenate((self._ids, room))
            self._counts = np.concatenate((self._counts, room))
