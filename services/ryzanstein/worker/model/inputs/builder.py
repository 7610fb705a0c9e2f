"""Turns the plan of a step into the tensors that layers read."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from ryzanstein.worker.cache.staging import Staging
from ryzanstein.worker.engine.extents import Extents
from ryzanstein.worker.engine.plan import StepPlan
from ryzanstein.worker.model.inputs.checks import check_hot_pages, check_tables
from ryzanstein.worker.model.inputs.fed import FedTokens, PageTables
from ryzanstein.worker.model.inputs.layout import CacheLayout, Integers
from ryzanstein.worker.model.inputs.step import GroupInputs, StepInputs


class GroupReader(Protocol):
    """A way in which the layers of a group read their keys."""

    def inputs(self, plan: StepPlan, fed: FedTokens, tables: PageTables) -> GroupInputs:
        """Returns the inputs of the group. `tables` are its own."""
        ...


@dataclass(frozen=True, slots=True)
class InputBuilder:
    """A builder of inputs for one cache, with a reader for each group of layers.

    `staging` is what readers share, if batches are staged.
    """

    layout: CacheLayout
    extents: Extents
    readers: Sequence[GroupReader]
    staging: Staging | None = None

    def forget(self) -> None:
        """Discards what is known of the last step, because it was not completed."""
        if self.staging is not None:
            self.staging.forget()

    def build(self, plan: StepPlan) -> StepInputs:
        """Returns the inputs of a step. Raises ValueError if the plan is inconsistent."""
        check_tables(plan, self.extents)
        if self.extents.hot_tokens is not None:
            check_hot_pages(plan, self.extents)
        fed = FedTokens.of(plan)
        return StepInputs(
            ids_T=self.layout.tensor(np.array(plan.token_ids, np.int64)),
            positions_T=self.layout.tensor(fed.position_T),
            last_R=self.layout.tensor(_wanted(plan, fed)),
            groups=[self._group(plan, fed, group) for group in range(len(self.readers))],
        )

    def _group(self, plan: StepPlan, fed: FedTokens, group: int) -> GroupInputs:
        num_sequences = len(plan.num_new)
        own = slice(group * num_sequences, (group + 1) * num_sequences)
        tables = PageTables.of(plan.block_tables[own], plan.first_pages[own])
        return self.readers[group].inputs(plan, fed, tables)


def _wanted(plan: StepPlan, fed: FedTokens) -> Integers:
    """Returns the rows of T whose logits or hidden states are needed."""
    sampled = fed.last_S[np.array(plan.sampled, np.int64)]
    if not plan.scored and not plan.pooled:
        return sampled
    return np.concatenate([sampled, np.array(plan.scored, np.int64), np.array(plan.pooled, np.int64)])
