"""The runs of a step as tensors, and for torch's operators where tokens find those before them.

Legend: T tokens of the step, S sequences, R runs of tokens, L tokens that a convolution sees.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import numpy as np
from torch import Tensor

from ryzanstein.worker.cache.states import StateCache
from ryzanstein.worker.engine.plan import StepPlan
from ryzanstein.worker.kernels.functions.recurrent.slots import SlotRuns
from ryzanstein.worker.model.inputs.layout import CacheLayout, FedTokens, Integers
from ryzanstein.worker.model.inputs.states.runs import StateRuns


@dataclass(frozen=True, slots=True)
class FedAtOnce:
    """Tokens at the same place in their sequences, one of each; `ended` are sequences whose runs end, and their slots."""

    sequence_n: Tensor
    row_n: Tensor
    ended: tuple[Tensor, Tensor] | None


class StateInputs:
    """The runs as tensors, and the slots that they read and write."""

    def __init__(self, plan: StepPlan, fed: FedTokens, cache: StateCache, layout: CacheLayout) -> None:
        self.cache, self._fed, self._layout = cache, fed, layout
        self.runs = runs = StateRuns.of(plan, cache.num_slots)
        columns = (runs.begin_S, runs.first_R, runs.count_R, runs.source_R, runs.target_R)
        self._taps: dict[int, tuple[Tensor, Tensor]] = {}
        self.slot_runs = SlotRuns(*map(layout.tensor, columns))

    @property
    def source_R(self) -> Tensor:
        return self.slot_runs.source_R

    @property
    def target_R(self) -> Tensor:
        return self.slot_runs.target_R

    @cached_property
    def source_S(self) -> Tensor:
        """The slot with which each sequence begins."""
        return self.source_R[self.slot_runs.begin_S[:-1]]

    def taps(self, length: int) -> tuple[Tensor, Tensor]:
        """Returns where a convolution finds its inputs: [L, T], and which of them each run leaves behind: [R, L - 1].

        They are rows of the step's tokens and, behind these, of L - 1 for each sequence, those in the slot
        with which it begins, the farthest first.
        """
        if length not in self._taps:
            self._taps[length] = self._taps_of(length)
        return self._taps[length]

    @cached_property
    def fed(self) -> list[FedAtOnce]:
        """The tokens of the step by their places in their sequences."""
        fed, runs, tensor = self._fed, self.runs, self._layout.tensor
        place_R = runs.first_R + runs.count_R - 1 - fed.first_S[fed.sequence_T[runs.first_R]]
        found = []
        for place in range(int(fed.num_new_S.max())):
            sequence_n, ended_R = np.flatnonzero(fed.num_new_S > place), np.flatnonzero(place_R == place)
            ended = fed.sequence_T[runs.first_R[ended_R]], runs.target_R[ended_R]
            slots = (tensor(ended[0]), tensor(ended[1])) if len(ended_R) else None
            found.append(FedAtOnce(tensor(sequence_n), tensor(fed.first_S[sequence_n] + place), slots))
        return found

    def _taps_of(self, length: int) -> tuple[Tensor, Tensor]:
        fed, runs, back = self._fed, self.runs, length - 1
        num_tokens = len(fed.position_T)

        def rows(row: Integers, sequence: Integers) -> Integers:
            """Returns where a row is that may lie before its sequence's first one."""
            first = fed.first_S[sequence]
            return np.where(row >= first, row, num_tokens + sequence * back + (row - first + back))

        taps_LT = rows(np.arange(num_tokens) - np.arange(back, -1, -1)[:, None], fed.sequence_T)
        end_R1 = (runs.first_R + runs.count_R)[:, None]
        tails_RL = rows(end_R1 - np.arange(back, 0, -1), fed.sequence_T[runs.first_R][:, None])
        return self._layout.tensor(taps_LT), self._layout.tensor(tails_RL)
