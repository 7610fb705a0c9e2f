"""Inputs of decode steps, updated instead of built anew.

Most steps give the same sequences one more token each: their tokens, positions, slots and lengths change, and of the tables of
pages at most a few rows. What is updated equals what would be built, in every number.

Legend: S sequences, B blocks of the longest table.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from ryzanstein.worker.engine.extents import Extents
from ryzanstein.worker.engine.plan import StepPlan
from ryzanstein.worker.model.attention import Paged
from ryzanstein.worker.model.inputs.layout import Integers
from ryzanstein.worker.model.inputs.paged import PagedReader
from ryzanstein.worker.model.inputs.step import GroupInputs, StepInputs


def check_table(plan: StepPlan, extents: Extents, i: int, table: Sequence[int], first: int) -> None:
    """Raises ValueError if table number `i`, which begins with page `first`, lacks blocks."""
    group, s = divmod(i, len(plan.num_new))
    window, lasting = extents.groups[group]
    num_keys, num_blocks = plan.num_new[s] + plan.num_context[s], first + len(table) - extents.num_lasting(lasting, first)
    if num_blocks * extents.block_size < num_keys:
        raise ValueError(f"step {plan.step}: sequence {s} has {num_blocks} blocks for {num_keys} tokens")
    if first and first * extents.block_size > plan.num_context[s] + 1 - (window or sys.maxsize):
        raise ValueError(f"step {plan.step}: sequence {s} lacks the blocks before {first} in group {group}")


@dataclass(frozen=True, slots=True)
class _Group:
    """The memory of a group's inputs, as arrays."""

    slots_S: Integers
    length_S: Integers
    table_SB: Integers
    first_S: Integers

    @classmethod
    def of(cls, group: GroupInputs) -> _Group:
        (segment,) = group.segments
        assert isinstance(segment, Paged)
        keys, first_S = segment.keys, segment.keys.first_S
        assert first_S is not None
        return cls(group.slots_T.numpy(), keys.length_S.numpy(), keys.tables_SB.numpy(), first_S.numpy())


class DecodeSteps:
    """The inputs of the last step, if each sequence had one new token.

    They are tensors on the CPU, made by a `PagedReader` for each group, without a bias.
    """

    def __init__(self, extents: Extents) -> None:
        self._extents, self._size = extents, extents.block_size
        self._inputs: StepInputs | None = None

    def forget(self) -> None:
        self._inputs = None

    def remember(self, plan: StepPlan, inputs: StepInputs) -> None:
        """Keeps the inputs of a step, if others can follow it. Tables are copied: a plan's are changed later."""
        self._inputs = None
        if plan.scored or plan.pooled or max(plan.num_new) > 1:
            return
        self._inputs, self._groups = inputs, [_Group.of(group) for group in inputs.groups]
        self._num_new, self._sampled, self._context = plan.num_new[:], plan.sampled[:], plan.num_context[:]
        self._adapters = plan.adapters[:]
        self._tables, self._firsts = [table[:] for table in plan.block_tables], plan.first_pages[:]
        self._ids_S, position_S = inputs.ids_T.numpy(), inputs.positions_T.numpy()
        self._growing = [position_S, *(array for group in self._groups for array in (group.slots_S, group.length_S))]
        longest, self._one_S = max(self._context) + 1, np.ones(len(position_S), np.int64)  # an array is added faster than 1
        self._until = min((window for window in self._extents.windows if window and window >= longest), default=sys.maxsize)

    def next(self, plan: StepPlan) -> StepInputs | None:
        """Returns the inputs of a step that follows the last one, which are no longer valid, or None: they must be built.

        Raises ValueError if the plan is inconsistent.
        """
        inputs, self._inputs = self._inputs, None
        if inputs is None or not self._follows(plan):
            return None
        same = plan.block_tables == self._tables and plan.first_pages == self._firsts
        turned = [s for s, context in enumerate(plan.num_context) if context % self._size == 0]
        if not same and not self._same_widths(plan):
            return None
        for array in self._growing:
            np.add(array, self._one_S, array)
        self._ids_S[:] = plan.token_ids
        self._context = plan.num_context
        if turned or not same:
            self._turn(plan, turned)
        self._inputs = inputs
        return inputs

    def _follows(self, plan: StepPlan) -> bool:
        """Returns whether the same sequences have one more token each, and read their keys as before."""
        if plan.scored or plan.pooled or len(plan.token_ids) != len(self._num_new) or plan.num_new != self._num_new:
            return False
        if (
            plan.sampled != self._sampled
            or plan.adapters != self._adapters
            or plan.num_context != [number + 1 for number in self._context]
        ):
            return False
        return max(plan.num_context) < self._until and len(plan.block_tables) == len(self._tables)

    def _same_widths(self, plan: StepPlan) -> bool:
        """Returns whether the longest table of each group is as long as before, and whether firsts are given as before."""
        if len(plan.first_pages) != len(self._firsts):
            return False
        count = len(self._num_new)
        own = (plan.block_tables[group * count : (group + 1) * count] for group in range(len(self._groups)))
        return all(max(map(len, tables)) == group.table_SB.shape[1] for tables, group in zip(own, self._groups, strict=True))

    def _turn(self, plan: StepPlan, turned: Sequence[int]) -> None:
        """Renews what changes where a token begins a page or a table has changed."""
        count, firsts = len(self._num_new), plan.first_pages or [0] * len(plan.block_tables)
        for i, (table, first, old, old_first) in enumerate(
            zip(plan.block_tables, firsts, self._tables, self._firsts or firsts, strict=True)
        ):
            s = i % count
            changed = table != old or first != old_first
            if not changed and s not in turned:
                continue
            check_table(plan, self._extents, i, table, first)
            group, context = self._groups[i // count], plan.num_context[s]
            group.slots_S[s] = table[context // self._size - first] * self._size + context % self._size
            if changed:
                group.table_SB[s, : len(table)], group.table_SB[s, len(table) :], group.first_S[s] = table, 0, first
                self._tables[i] = table[:]
        self._firsts = plan.first_pages[:]


def decode_steps(readers: Sequence[object], extents: Extents) -> DecodeSteps | None:
    """Returns what updates the inputs of these readers; None: others are built for every step."""
    plain = (isinstance(reader, PagedReader) and reader.segments.bias is None for reader in readers)
    return DecodeSteps(extents) if all(plain) else None
