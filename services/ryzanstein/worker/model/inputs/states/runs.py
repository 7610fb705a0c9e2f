"""The runs of a step's tokens: with which slot each begins, and in which one it leaves its state.

Legend: S sequences, R runs.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from ryzanstein.worker.cache.states import unread_slot, zero_slot
from ryzanstein.worker.engine.plan import StepPlan
from ryzanstein.worker.model.inputs.layout import Integers


@dataclass(frozen=True, slots=True)
class StateRuns:
    """The runs of a step, those of a sequence one after the other; `begin_S` [S + 1] is the first one of each sequence.

    A run is `count_R` rows of the step from `first_R` on. It begins with the state in slot `source_R`
    and leaves its own in `target_R`.
    """

    begin_S: Integers
    first_R: Integers
    count_R: Integers
    source_R: Integers
    target_R: Integers

    @classmethod
    def of(cls, plan: StepPlan, num_slots: int) -> StateRuns:
        """Raises ValueError if the plan's runs do not fit its sequences, or slots are not there."""
        runs = plan.runs
        if not runs and not any(plan.num_context):
            runs = [(count, -1, unread_slot(num_slots)) for count in plan.num_new]
        numbers = np.array(runs, np.int64).reshape(-1, 3)
        count_R, source_R, target_R = np.ascontiguousarray(numbers.T)
        end_R, end_S = np.cumsum(count_R), np.cumsum(plan.num_new)
        begin_S = np.concatenate([[0], 1 + np.searchsorted(end_R, end_S)]).astype(np.int64)
        if (count_R < 1).any() or not np.isin(end_S, end_R).all() or end_R[-1] != end_S[-1]:
            raise ValueError(f"step {plan.step}: runs of {count_R.tolist()} tokens for sequences of {plan.num_new}")
        if ((source_R[begin_S[:-1]] < 0) & (np.array(plan.num_context) > 0)).any():
            raise ValueError(f"step {plan.step}: a sequence has no state to begin with: {plan.runs}")
        read = target_R[target_R != unread_slot(num_slots)]
        if (source_R >= num_slots).any() or (read >= num_slots).any() or (read < 0).any():
            raise ValueError(f"step {plan.step}: there are {num_slots} slots for states: {plan.runs}")
        source_R = np.where(source_R < 0, zero_slot(num_slots), source_R)
        return cls(begin_S, end_R - count_R, count_R, source_R, target_R)
