"""Turns the plan of a step into the tensors that layers read.

It checks first that the plan is consistent, before anything is read through its tables.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from ryzanstein.worker.cache.staging import Staging
from ryzanstein.worker.cache.states import StateCache
from ryzanstein.worker.engine.extents import Extents
from ryzanstein.worker.engine.plan import StepPlan
from ryzanstein.worker.model.inputs.decoding import DecodeSteps, check_table
from ryzanstein.worker.model.inputs.layout import CacheLayout, FedTokens, Integers, PageTables
from ryzanstein.worker.model.inputs.states.inputs import StateInputs
from ryzanstein.worker.model.inputs.step import GroupInputs, StepInputs
from ryzanstein.worker.products.adapted import AdapterRows


def check_tables(plan: StepPlan, extents: Extents) -> None:
    """Raises ValueError if lists do not belong together, or tables lack blocks."""
    num_sequences, num_tables = len(plan.num_new), len(plan.block_tables)
    num_expected = num_sequences * len(extents.windows)
    if len(plan.num_context) != num_sequences or num_tables != num_expected or len(plan.first_pages) not in (0, num_tables):
        raise ValueError(f"step {plan.step}: {num_expected} sequences, {num_tables} block tables")
    if sum(plan.num_new) != len(plan.token_ids) or min(plan.num_new, default=1) < 1:
        raise ValueError(f"step {plan.step}: {len(plan.token_ids)} tokens for sequences of {plan.num_new}")
    firsts = plan.first_pages or [0] * num_tables
    for i, (table, first) in enumerate(zip(plan.block_tables, firsts, strict=True)):
        check_table(plan, extents, i, table, first)


def check_hot_pages(plan: StepPlan, extents: Extents) -> None:
    """Raises ValueError if tables of hot pages lack some that are read or written."""
    if not len(plan.hot_tables) == len(plan.hot_first) == len(plan.num_new):
        raise ValueError(f"step {plan.step}: {len(plan.num_new)} sequences, {len(plan.hot_tables)} tables of hot pages")
    for s, (table, first) in enumerate(zip(plan.hot_tables, plan.hot_first, strict=True)):
        context, end = plan.num_context[s], plan.num_context[s] + plan.num_new[s]
        needed = max(0, context + 1 - extents.hot_window) // extents.block_size
        if first > needed or (first + len(table)) * extents.block_size < end:
            raise ValueError(f"step {plan.step}: sequence {s} lacks hot pages for tokens {context} to {end}")


class GroupReader(Protocol):
    """A way in which the layers of a group read their keys."""

    def inputs(self, plan: StepPlan, fed: FedTokens, tables: PageTables) -> GroupInputs:
        """Returns the inputs of the group. `tables` are its own."""
        ...


@dataclass(frozen=True, slots=True)
class InputBuilder:
    """A builder of inputs for one cache, with a reader for each group of layers.

    `staging` is what readers share, if batches are staged. `states` are those of layers that keep one.
    With `decoding` the inputs of decode steps may be those of the last step, updated in place: what `build` returns
    is valid until the next call.
    """

    layout: CacheLayout
    extents: Extents
    readers: Sequence[GroupReader]
    staging: Staging | None = None
    states: StateCache | None = None
    decoding: DecodeSteps | None = None

    def forget(self) -> None:
        """Discards what is known of the last step, because it was not completed."""
        if self.staging is not None:
            self.staging.forget()
        if self.decoding is not None:
            self.decoding.forget()

    def build(self, plan: StepPlan) -> StepInputs:
        """Returns the inputs of a step. Raises ValueError if the plan is inconsistent."""
        if self.decoding is None:
            return self._built(plan)
        found = self.decoding.next(plan)
        if found is None:
            found = self._built(plan)
            self.decoding.remember(plan, found)
        return found

    def _built(self, plan: StepPlan) -> StepInputs:
        check_tables(plan, self.extents)
        if self.extents.hot_tokens is not None:
            check_hot_pages(plan, self.extents)
        fed = FedTokens.of(plan)
        last_R = _wanted(plan, fed)
        adapters = self._adapters(plan)
        return StepInputs(
            ids_T=self.layout.tensor(np.array(plan.token_ids, np.int64)),
            positions_T=self.layout.tensor(fed.position_T),
            last_R=self.layout.tensor(last_R),
            groups=[self._group(plan, fed, group) for group in range(len(self.readers))],
            states=None if self.states is None else StateInputs(plan, fed, self.states, self.layout),
            adapters=adapters,
            last_adapters=None if adapters is None else adapters.part(last_R),
        )

    def _adapters(self, plan: StepPlan) -> AdapterRows | None:
        """Returns the rows that have an adapter. Raises ValueError if they are not those of the step."""
        if not plan.adapters:
            return None
        slots, counts = zip(*plan.adapters, strict=True)
        if sum(counts) != len(plan.token_ids) or min(counts) < 1 or min(slots) < 0:
            raise ValueError(f"step {plan.step}: {len(plan.token_ids)} tokens, adapters of {plan.adapters}")
        return AdapterRows.of(np.repeat(np.array(slots, np.int64), counts), self.layout.device)

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
