"""The plan that ranks receive for one step, and what rank 0 returns.

This is the interface between deciding and computing. A plan consists of flat lists, so that it
packs in microseconds and becomes tensors without a loop. Legend: S sequences in the step, T new
tokens of all of them together, G groups of layers (see `extents`), B blocks of one sequence in one
group.

`TokenTally` counts a sequence's tokens while it grows: a step costs its new tokens, not all before them.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain
from typing import Protocol

import msgspec
import numpy as np
import numpy.typing as npt

from ryzanstein.generation.request import SamplingParams

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


StateRun = tuple[int, int, int]
"""So many tokens, the slot with the state before them (-1: there is none), and the slot for the state after them."""


AdapterRun = tuple[int, int]
"""The slot of an adapter, and how many tokens have it."""


class StepPlan(msgspec.Struct, frozen=True, array_like=True):
    """A step for all ranks.

    Sequence s feeds `num_new[s]` tokens whose positions are `num_context[s]`, `num_context[s] + 1`,
    ...: `num_context[s]` of its tokens are already in the KV cache. In group g its table is
    `block_tables[g * S + s]`, which begins with page `first_pages[g * S + s]`: the token at
    position p is stored in block `table[p // block_size - first]` at offset `p % block_size`.
    `first_pages` is empty if all of them are 0. If the group keeps lasting pages, those before
    `first` come before these blocks in the table. If blocks are compressed, new tokens are written to
    the pages of `hot_tables[s]`, which begins with page `hot_first[s]`; a page that is full then is
    compressed into its blocks, before it is read. `sampled` are the
    indices s for which the logits of the last new token are needed; a sequence in the middle of its
    prefill is absent. `full_logits` is set when any sampled row `needs_full_logits`: ranks above 0
    never see the rows, and all of them must take part in the same collective. `scored` are the rows
    of T whose logits say how likely the prompt's next token is: `targets` are these tokens, and the
    `num_top` likeliest ones are wanted beside them. `pooled` are the rows of T whose hidden states are
    wanted. For layers that keep a state, `runs` divide T in order, each sequence's tokens into one or
    more; they are empty where there are none, or where no sequence has context and no state is kept.
    `adapters` divide T in order by the slot of the adapter that the rows have, 0 for none; they are empty if none has one.
    """

    step: int
    token_ids: list[int]  # [T]
    num_new: list[int]  # [S], sum is T
    num_context: list[int]  # [S]
    block_tables: list[list[int]]  # [G x S][B]
    sampled: list[int]  # indices into S, ascending
    full_logits: bool = False
    first_pages: list[int] = []  # [G x S]
    scored: list[int] = []  # rows of T, ascending
    targets: list[int] = []  # parallel to scored
    num_top: int = 0
    hot_tables: list[list[int]] = []  # [S][B]
    hot_first: list[int] = []  # [S]
    pooled: list[int] = []  # rows of T, ascending
    runs: list[StateRun] = []
    adapters: list[AdapterRun] = []


class Rearrangement(msgspec.Struct, frozen=True, array_like=True):
    """A change of the KV cache on all ranks, between two steps.

    First the contents of blocks are copied, for each of `moves` from the first to the second. Then
    the memory of the blocks from number `num_blocks` on is released.
    """

    moves: list[tuple[int, int]]
    num_blocks: int


Placed = tuple[int, int]
"""A place of the slab and a block of the pool, which hold the same page."""


class PageMove(msgspec.Struct, frozen=True, array_like=True):
    """A copy of pages between the pool and the slab that ranks and agent share, between two steps.

    Out: from the blocks into the slab; in: from the slab into the blocks. Each rank moves its heads
    and then says so to the agent, by `number`.
    """

    number: int
    out: bool
    pages: list[Placed]
    hot: list[Placed] = []  # the same of the pool of hot pages


class TokenConstraint(Protocol):
    """What a choice's tokens must satisfy, after its tokens so far. Made by `ranks`; see `constraints`.

    `finished`: nothing may follow. `failure`: why it can no longer be followed, or empty. The
    choice's next token then means nothing. `ready`: what may follow is known, or soon enough;
    until then the choice sits out the steps. `cost_s`: the processor time that its last token took.
    """

    @property
    def ready(self) -> bool: ...

    @property
    def cost_s(self) -> float: ...

    @property
    def finished(self) -> bool: ...

    @property
    def failure(self) -> str: ...

    def accept(self, token_id: int) -> None:
        """Takes the next token of the choice."""
        ...


class Masks(Protocol):
    """Which tokens the rows of this step may draw. They are computed while the model computes."""

    def wait(self) -> npt.NDArray[np.uint32] | None:
        """Returns a bit per row and token, the lowest first, [S, V / 32 rounded up]; None: every row may draw any."""
        ...


class SampleRow(msgspec.Struct):
    """How to sample one sequence's next token; on rank 0 only, passed by reference, never packed.

    `index` is the token's index in its choice; with `sampling.seed` and `choice` it fixes the
    random draw. Penalties use `prompt_ids` (repetition only) and `generated_ids` (all three).
    `banned_ids` get minus infinity: the stop tokens while fewer than min_tokens are generated, and
    what would complete a bad word. With a `constraint` they are a part of its mask, which applies
    before everything else. `allowed_ids` are the only ones that may be drawn; empty: all.
    `seen` counts the tokens of prompt and answer for penalties, `said` those of the answer alone;
    both are made when a penalty first needs them and kept while `generated_ids` grows.
    """

    sampling: SamplingParams
    choice: int
    index: int
    prompt_ids: Sequence[int]
    generated_ids: Sequence[int]
    banned_ids: Sequence[int] = ()
    allowed_ids: Sequence[int] = ()
    seen: TokenTally | None = None
    tally: TokenTally | None = None
    constraint: TokenConstraint | None = None


def needs_full_logits(row: SampleRow) -> bool:
    """Returns whether the row's token is more than the argmax of the model's own logits.

    A step whose rows are all plain greedy exchanges one (value, token id) pair per row and rank
    instead of the vocabulary.
    """
    sampling = row.sampling
    return sampling.temperature != 0 or sampling.logprobs is not None or row.constraint is not None or adjusts_logits(row)


def adjusts_logits(row: SampleRow) -> bool:
    """Returns whether the row has penalties, biases, bans or allowed tokens."""
    sampling = row.sampling
    penalized = sampling.repetition_penalty != 1 or sampling.presence_penalty != 0 or sampling.frequency_penalty != 0
    return penalized or bool(sampling.logit_bias) or bool(row.banned_ids) or bool(row.allowed_ids)


class SampledToken(msgspec.Struct, frozen=True, array_like=True):
    """A sampled token.

    `logprob` and `top` (token id, logprob; likeliest first) are before temperature and penalties;
    they are None and empty unless requested. `hidden` is the hidden state of a pooled row, as numbers
    in single precision; such an entry has no token.
    """

    token_id: int
    logprob: float | None = None
    top: tuple[tuple[int, float], ...] = ()
    hidden: bytes = b""


class SequencesFailed(Exception):
    """Some rows of a step cannot be sampled (their logits are not finite); the ranks are healthy.

    `rows` maps an index into the step's rows to what is wrong with it. Nothing of the step counts:
    the engine fails these rows' groups and runs the others again.
    """

    def __init__(self, rows: dict[int, str]) -> None:
        super().__init__(f"{len(rows)} sequences failed: {next(iter(rows.values()), '')}")
        self.rows = rows


class OutOfMemory(Exception):
    """A rank ran out of memory in the step.

    Nothing of the step counts, and all ranks are in step again: a smaller step may succeed.
    """


class Executor(Protocol):
    """Runs a step on every rank. Implemented by `ranks`; faked in the engine's tests."""

    def execute(self, plan: StepPlan, rows: Sequence[SampleRow]) -> Sequence[SampledToken]:
        """Computes the step; `rows` and the result are parallel to `plan.sampled`.

        The result goes on with one entry for each of `plan.scored`: the target and its logprob.
        Then come those of `plan.pooled`: hidden states.

        Raises SequencesFailed when only some rows are at fault, OutOfMemory when the step is too
        large, anything else when a rank is lost.
        """
        ...

    def rearrange(self, change: Rearrangement) -> None:
        """Changes the KV cache. The next step sees the change."""
        ...

    def move_pages(self, move: PageMove) -> None:
        """Copies pages between cache and slab. The next step sees them."""
        ...
