"""A step's plan as tensors: token ids, positions, cache slots, and the keys that each token sees.

The tensors are built once per step and used by every layer of a group.

In a group with a window a table begins with the first page that is still kept. Everything that is
read through a table counts positions from there: `begin_S`, `length_S`. Only a bias depends on a
key's true position.

Legend: T new tokens, S sequences, B blocks of the longest table, L keys of a sequence, P keys of
the longest, n new tokens of one sequence, R sampled rows.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from ryzanstein.worker.engine.extents import AllLasting, Extents
from ryzanstein.worker.engine.plan import StepPlan
from ryzanstein.worker.model.alibi import AlibiBias
from ryzanstein.worker.model.attention import AttentionBatch, Paged, Segment, Span, Staged
from ryzanstein.worker.model.cold_layout import ColdLayout
from ryzanstein.worker.model.kernels.functions.attention import AttentionFunctions
from ryzanstein.worker.model.kernels.functions.paged_keys import ColdKeys, PagedKeys, SparseKeys
from ryzanstein.worker.model.kernels.native import NativeKernels
from ryzanstein.worker.model.kv_cache import bound_blocks
from ryzanstein.worker.model.staging import StagedSequence, Staging
from ryzanstein.worker.model.zones import Zones
from ryzanstein.worker.sparse import SparseRule

# Size of one sequence's keys and values from which a view is faster for a single new token than a
# padded batch: a view costs a call of its own, a batch costs a copy. Threads share the copy but not
# the calls.
_VIEW_BYTES = 96 * 2**10
_VIEW_BYTES_THREADS = 384 * 2**10

Integers = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class Sealing:
    """Hot pages that are full, and the blocks into which a group's layers compress them."""

    kernels: AttentionFunctions
    layout: ColdLayout
    hot_M: Tensor
    cold_M: Tensor

    def run(self, slots_NC: Tensor, cold_BX: Tensor) -> None:
        """Compresses the pages of one layer."""
        self.kernels.seal(slots_NC, self.hot_M, cold_BX, self.cold_M, self.layout)


@dataclass(frozen=True, slots=True)
class Bounding:
    """Blocks that are full now, and of which the least and the greatest keys are kept: see `KVCache`."""

    blocks_M: Tensor
    block_size: int

    def run(self, slots_NC: Tensor, bounds_B2Y: Tensor) -> None:
        """Finds them in one layer."""
        bound_blocks(slots_NC, bounds_B2Y, self.blocks_M, self.block_size)


@dataclass(frozen=True, slots=True)
class GroupInputs:
    """What the layers of a group read: where new keys and values go, and which ones are seen.

    `sealing` and `bounding` are what is to be compressed, or bounded, in between, if anything.
    """

    slots_T: Tensor
    segments: Sequence[Segment]
    sealing: Sealing | None = None
    bounding: Bounding | None = None


@dataclass(frozen=True, slots=True)
class StepInputs:
    """The tensors that the layers read.

    `groups` are those of the layers. `last_R` are the rows of T whose logits are needed: those of
    sampled sequences, then those that score prompts. The last ones are those whose hidden states are
    wanted themselves.
    """

    ids_T: Tensor
    positions_T: Tensor
    last_R: Tensor
    groups: Sequence[GroupInputs]


@dataclass(frozen=True, slots=True)
class _Fed:
    """The new tokens of a step: those of sequence s are rows from `first_S` on."""

    num_new_S: Integers
    context_S: Integers
    first_S: Integers
    sequence_T: Integers
    position_T: Integers


@dataclass(frozen=True, slots=True)
class _Keys:
    """The keys that a group reads: positions `begin_S` to `length_S` of each sequence.

    They are counted from `origin_S`.
    """

    window: int | None
    table_SB: Integers
    origin_S: Integers
    first_S: Integers  # row of T
    num_new_S: Integers
    begin_S: Integers
    length_S: Integers
    adjacent_S: npt.NDArray[np.bool_]


def view_keys(slot_bytes: int, num_threads: int) -> int:
    """Returns the fastest `view_keys` for a cache with `slot_bytes` per token and layer."""
    return (_VIEW_BYTES if num_threads == 1 else _VIEW_BYTES_THREADS) // slot_bytes


@dataclass(frozen=True, slots=True)
class InputBuilder:
    """A builder that turns plans into inputs for one cache geometry, device and dtype.

    Masks are added to scores of that dtype. `view_keys`: a single new token with at least that many
    keys in adjacent slots is not batched, unless the batch can be staged. `kernels` read keys in
    their blocks; with them nothing is batched, staged or masked. `knows_causal`: scores have no
    cap, so that a whole prompt needs no mask. `windows` are the extents of the groups of layers.
    `zones`: blocks are compressed. `bias` is added to the scores of every layer. `rules` and
    `lasting`: sparse attention, see `LayerGroups`.
    """

    num_blocks: int
    block_size: int
    device: torch.device
    dtype: torch.dtype
    view_keys: int
    windows: tuple[int | None, ...] = (None,)
    bias: AlibiBias | None = None
    staging: Staging | None = None
    kernels: NativeKernels | None = None
    knows_causal: bool = False
    zones: Zones | None = None
    rules: tuple[SparseRule | None, ...] = ()
    lasting: AllLasting = ()

    @property
    def extents(self) -> Extents:
        """The extents of the groups, as far as tables depend on them."""
        return Extents(self.windows, self.block_size, lasting=self.lasting)

    def forget(self) -> None:
        """Discards what is known of the last step, because it was not completed."""
        if self.staging is not None:
            self.staging.forget()

    def build(self, plan: StepPlan) -> StepInputs:
        """Returns the inputs of a step. Raises ValueError if the plan is inconsistent."""
        num_new_S, context_S = np.array(plan.num_new, np.int64), np.array(plan.num_context, np.int64)
        _check(plan, num_new_S, context_S, self)
        if self.zones is not None:
            _check_hot(plan, num_new_S, context_S, self.block_size, max(1, self.zones.hot_tokens))
        first_S = np.cumsum(num_new_S) - num_new_S
        sequence_T = np.repeat(np.arange(len(num_new_S)), num_new_S)
        position_T = np.arange(len(plan.token_ids)) - (first_S - context_S)[sequence_T]
        fed = _Fed(num_new_S, context_S, first_S, sequence_T, position_T)
        return StepInputs(
            ids_T=self._tensor(np.array(plan.token_ids, np.int64)),
            positions_T=self._tensor(position_T),
            last_R=self._tensor(_wanted(plan, first_S + num_new_S - 1)),
            groups=[self._group(plan, fed, group) for group in range(len(self.windows))],
        )

    def _slots(self, table_SB: Integers, sequence: Integers, position: Integers) -> Integers:
        """Returns the slots of positions in sequences. The arguments broadcast."""
        return np.asarray(table_SB[sequence, position // self.block_size] * self.block_size + position % self.block_size)

    def _group(self, plan: StepPlan, fed: _Fed, group: int) -> GroupInputs:
        num_sequences = len(fed.num_new_S)
        own = slice(group * num_sequences, (group + 1) * num_sequences)
        table_SB, first_S = _table(plan.block_tables[own]), _firsts(plan.first_pages[own], num_sequences)
        if self.zones is not None:
            return self._zoned(plan, fed, (table_SB, first_S), self.windows[group])
        origin_S = first_S * self.block_size
        rule = self.rules[group] if self.rules else None
        if rule is not None:
            return self._sparse(fed, rule, group, (table_SB, origin_S))
        keys = self._keys(table_SB, origin_S, self.windows[group], fed)
        slots_T = self._slots(keys.table_SB, fed.sequence_T, fed.position_T - origin_S[fed.sequence_T])
        return GroupInputs(self._tensor(slots_T), self._segments(keys))

    def _sparse(self, fed: _Fed, rule: SparseRule, group: int, pages: tuple[Integers, Integers]) -> GroupInputs:
        """Returns the inputs of a group with a rule: tables begin with lasting pages."""
        assert self.kernels is not None, "only our own kernels read sparsely"
        table_SB, origin_S = pages
        extents, size = self.extents, self.block_size
        lasting = self.lasting[group] if self.lasting else None
        num_S = np.array([extents.num_lasting(lasting, first // size) for first in origin_S.tolist()], np.int64)
        offset_S = (num_S * size - origin_S)[fed.sequence_T]
        slots_T = self._slots(table_SB, fed.sequence_T, fed.position_T + offset_S)
        keys = self._keys(table_SB, origin_S, rule.window, fed)
        sparse = None if keys.window is None else SparseKeys(extents.pages(rule.sinks), rule.stride, rule.quest)
        full_T = fed.position_T % size == size - 1
        blocks_M = slots_T[full_T] // size
        bounding = Bounding(self._tensor(blocks_M), size) if rule.quest and len(blocks_M) else None
        return GroupInputs(self._tensor(slots_T), [self._paged(keys, self.kernels, sparse=sparse)], bounding=bounding)

    def _zoned(self, plan: StepPlan, fed: _Fed, cold: tuple[Integers, Integers], window: int | None) -> GroupInputs:
        """Returns the inputs of a group whose blocks are compressed: new tokens go to hot pages."""
        assert self.zones is not None
        assert self.kernels is not None, "only our own kernels read compressed blocks"
        cold_SB, cold_first_S = cold
        origin_S = _firsts(plan.hot_first, len(fed.num_new_S)) * self.block_size
        keys = self._keys(_table(plan.hot_tables), origin_S, window, fed)
        slots_T = self._slots(keys.table_SB, fed.sequence_T, fed.position_T - origin_S[fed.sequence_T])
        layout, hot_tokens = self.zones.layout, self.zones.hot_tokens
        zone = ColdKeys(self._tensor(cold_SB), layout, hot_tokens, self._tensor(cold_first_S))
        full_T = fed.position_T % self.block_size == self.block_size - 1
        sequence_M, page_M = fed.sequence_T[full_T], fed.position_T[full_T] // self.block_size
        hot_M = keys.table_SB[sequence_M, page_M - origin_S[sequence_M] // self.block_size]
        cold_M = cold_SB[sequence_M, page_M - cold_first_S[sequence_M]]
        sealing = Sealing(self.kernels.attention, layout, self._tensor(hot_M), self._tensor(cold_M)) if len(hot_M) else None
        return GroupInputs(self._tensor(slots_T), [self._paged(keys, self.kernels, zone)], sealing)

    def _keys(self, table_SB: Integers, origin_S: Integers, window: int | None, fed: _Fed) -> _Keys:
        whole_S = fed.context_S + fed.num_new_S
        narrow = window if window is not None and window < whole_S.max() else None
        begin_S = np.zeros_like(origin_S) if narrow is None else np.maximum(0, fed.context_S + 1 - narrow) - origin_S
        length_S = whole_S - origin_S
        adjacent_S = _adjacent(table_SB, begin_S // self.block_size, -(-length_S // self.block_size))
        return _Keys(narrow, table_SB, origin_S, fed.first_S, fed.num_new_S, begin_S, length_S, adjacent_S)

    def _segments(self, keys: _Keys) -> list[Segment]:
        if self.kernels is not None:
            return [self._paged(keys, self.kernels)]
        single_S = keys.num_new_S == 1
        staging = self._staging_for(keys, single_S)
        viewed_S = keys.adjacent_S & (keys.length_S - keys.begin_S >= self.view_keys)
        together_S = single_S if staging is not None else single_S & ~viewed_S
        together = np.flatnonzero(together_S)
        alone_S = ~together_S if len(together) > 1 else np.ones_like(together_S)
        spans = self._spans(keys, np.flatnonzero(alone_S))
        return [*spans, self._batch(keys, together, staging)] if len(together) > 1 else spans

    def _spans(self, keys: _Keys, alone: Integers) -> list[Segment]:
        return [self._span(keys, s) for s in alone.tolist()]

    def _span(self, keys: _Keys, s: int) -> Span:
        first, num_new = int(keys.first_S[s]), int(keys.num_new_S[s])
        is_whole = num_new > 1 and num_new == keys.length_S[s] and keys.window is None and self.bias is None
        causal = is_whole and self.knows_causal
        return Span(first, num_new, self._slots_of(keys, s), None if causal else self._mask(keys, s), causal)

    def _paged(
        self, keys: _Keys, kernels: NativeKernels, cold: ColdKeys | None = None, sparse: SparseKeys | None = None
    ) -> Paged:
        length_S = keys.length_S + keys.origin_S
        found = (keys.first_S, keys.num_new_S, keys.table_SB, length_S, keys.origin_S // self.block_size)
        rows_S, num_new_S, tables_SB, lengths_S, first_S = map(self._tensor, found)
        bias_HP = None if self.bias is None else self.bias.up_to(int(length_S.max()))
        numbers = (self.block_size, keys.window, bias_HP)
        found_keys = PagedKeys(rows_S, num_new_S, tables_SB, lengths_S, *numbers, first_S=first_S, cold=cold, sparse=sparse)
        return Paged(kernels.attention, found_keys)

    def _staging_for(self, keys: _Keys, single_S: npt.NDArray[np.bool_]) -> Staging | None:
        """Returns the staging area if there is one and the step's single tokens can use it."""
        if self.staging is None or self.windows != (None,) or single_S.sum() < 2:
            return None
        return self.staging if self.staging.fits(keys.length_S[single_S]) else None

    def _slots_of(self, keys: _Keys, s: int) -> slice | Tensor:
        begin, end = int(keys.begin_S[s]), int(keys.length_S[s])
        if keys.adjacent_S[s]:
            block = begin // self.block_size
            first_slot = (int(keys.table_SB[s, block]) - block) * self.block_size
            return slice(first_slot + begin, first_slot + end)
        return self._tensor(self._slots(keys.table_SB, np.array(s), np.arange(begin, end)))

    def _mask(self, keys: _Keys, s: int) -> Tensor | None:
        causal_nL = self._causal(keys, s) if keys.num_new_S[s] > 1 else None
        if self.bias is None:
            return causal_nL
        positions_L = int(keys.origin_S[s]) + torch.arange(int(keys.begin_S[s]), int(keys.length_S[s]), device=self.device)
        bias_KGL = self.bias.at(positions_L)
        return bias_KGL[None] if causal_nL is None else bias_KGL.transpose(0, 1).unsqueeze(2) + causal_nL

    def _causal(self, keys: _Keys, s: int) -> Tensor:
        """Returns the causal mask of a sequence's new tokens.

        Row i is the i-th of them: it sees itself and the tokens before it, within the window.
        """
        begin, length, num_new = int(keys.begin_S[s]), int(keys.length_S[s]), int(keys.num_new_S[s])
        own = length - num_new - begin  # the column of row 0's own key
        hidden_nL = torch.full((num_new, length - begin), -torch.inf, dtype=self.dtype, device=self.device)
        if keys.window is None:
            return hidden_nL.triu_(own + 1)
        return hidden_nL.triu(own + 1).add_(hidden_nL.tril_(own - keys.window))

    def _batch(self, keys: _Keys, together: Integers, staging: Staging | None) -> AttentionBatch:
        length_S1, begin_S1 = keys.length_S[together, None], keys.begin_S[together, None]
        position_SP = begin_S1 + np.arange((length_S1 - begin_S1).max())
        absent_SP = position_SP >= length_S1
        mask_S11P = torch.zeros(absent_SP.shape, dtype=self.dtype, device=self.device)
        mask_S11P = mask_S11P.masked_fill_(self._tensor(absent_SP), -torch.inf)[:, None, None]
        true_SP = position_SP + keys.origin_S[together, None]
        whole_step = len(together) == len(keys.table_SB)
        slots_N, staged = self._to_read(keys, together, position_SP, staging)
        return AttentionBatch(
            rows_S=None if whole_step else self._tensor(keys.first_S[together]),
            num_sequences=len(together),
            slots_N=self._tensor(slots_N),
            mask=mask_S11P if self.bias is None else mask_S11P + self.bias.at(self._tensor(true_SP)),
            staged=staged,
        )

    def _to_read(
        self, keys: _Keys, together: Integers, position_SP: Integers, staging: Staging | None
    ) -> tuple[Integers, Staged | None]:
        """Returns the slots of a batch's keys, flat: all, or those that are not staged yet."""
        if staging is None:
            return self._padded_slots(keys, together, position_SP), None
        length_S = keys.length_S[together]
        place = staging.place(keys.table_SB[together], length_S)
        if place.fresh:
            position_1P = np.arange(place.stride)[None]
            to_N = place.first_slot + np.arange(len(together) * place.stride)
            return self._padded_slots(keys, together, position_1P), self._staged(place, to_N)
        to_S = place.first_slot + np.arange(len(together)) * place.stride + length_S - 1
        return self._slots(keys.table_SB, together, length_S - 1), self._staged(place, to_S)

    def _staged(self, place: StagedSequence, to_N: Integers) -> Staged:
        return Staged(place.first_slot, place.stride, self._tensor(to_N))

    def _padded_slots(self, keys: _Keys, together: Integers, position_SP: Integers) -> Integers:
        """Returns the slots of positions, flat. Positions beyond a sequence's end are padding."""
        absent_SP = position_SP >= keys.length_S[together, None]
        present_SP = np.where(absent_SP, 0, position_SP)
        slots_SP = self._slots(keys.table_SB, together[:, None], present_SP)
        return np.where(absent_SP, self.num_blocks * self.block_size, slots_SP).reshape(-1)

    def _tensor(self, array: npt.NDArray[np.generic]) -> Tensor:
        return torch.from_numpy(array).to(self.device)


def _check(plan: StepPlan, num_new_S: Integers, context_S: Integers, builder: InputBuilder) -> None:
    num_sequences, num_tables = len(plan.num_new), len(plan.block_tables)
    num_expected = num_sequences * len(builder.windows)
    if len(plan.num_context) != num_sequences or num_tables != num_expected or len(plan.first_pages) not in (0, num_tables):
        raise ValueError(f"step {plan.step}: {num_expected} sequences, {num_tables} block tables")
    if num_new_S.sum() != len(plan.token_ids) or (num_new_S < 1).any():
        raise ValueError(f"step {plan.step}: {len(plan.token_ids)} tokens for sequences of {plan.num_new}")
    firsts, extents = plan.first_pages or [0] * num_tables, builder.extents
    for i, (table, first) in enumerate(zip(plan.block_tables, firsts, strict=True)):
        group, s = divmod(i, num_sequences)
        lasting = builder.lasting[group] if builder.lasting else None
        num_keys, num_blocks = plan.num_new[s] + plan.num_context[s], first + len(table) - extents.num_lasting(lasting, first)
        if num_blocks * builder.block_size < num_keys:
            raise ValueError(f"step {plan.step}: sequence {s} has {num_blocks} blocks for {num_keys} tokens")
        if first and first * builder.block_size > plan.num_context[s] + 1 - (builder.windows[group] or sys.maxsize):
            raise ValueError(f"step {plan.step}: sequence {s} lacks the blocks before {first} in group {group}")


def _check_hot(plan: StepPlan, num_new_S: Integers, context_S: Integers, block_size: int, window: int) -> None:
    if not len(plan.hot_tables) == len(plan.hot_first) == len(plan.num_new):
        raise ValueError(f"step {plan.step}: {len(plan.num_new)} sequences, {len(plan.hot_tables)} tables of hot pages")
    ends_S = context_S + num_new_S
    for s, (table, first) in enumerate(zip(plan.hot_tables, plan.hot_first, strict=True)):
        needed = max(0, int(context_S[s]) + 1 - window) // block_size
        if first > needed or (first + len(table)) * block_size < ends_S[s]:
            raise ValueError(f"step {plan.step}: sequence {s} lacks hot pages for tokens {context_S[s]} to {ends_S[s]}")


def _firsts(first_pages: list[int], num_sequences: int) -> Integers:
    return np.array(first_pages or [0] * num_sequences, np.int64)


def _wanted(plan: StepPlan, last_S: Integers) -> Integers:
    sampled = last_S[np.array(plan.sampled, np.int64)]
    if not plan.scored and not plan.pooled:
        return sampled
    return np.concatenate([sampled, np.array(plan.scored, np.int64), np.array(plan.pooled, np.int64)])


def _table(block_tables: list[list[int]]) -> Integers:
    """Returns the block tables padded with block 0. Nothing is read through the padding."""
    width = max(map(len, block_tables))
    return np.array([table + [0] * (width - len(table)) for table in block_tables], np.int64)


def _adjacent(table_SB: Integers, first_S: Integers, end_S: Integers) -> npt.NDArray[np.bool_]:
    """Returns, for each sequence, whether its blocks in use are adjacent."""
    follows_SB = table_SB[:, 1:] == table_SB[:, :-1] + 1
    block_B = np.arange(1, table_SB.shape[1])
    unused_SB = (block_B <= first_S[:, None]) | (block_B >= end_S[:, None])
    return np.asarray((follows_SB | unused_SB).all(axis=1))
