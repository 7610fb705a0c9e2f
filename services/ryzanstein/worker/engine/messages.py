"""Messages to the engine, and the events of a step.

They are plain values that pack with msgpack, because the agent is another process. A *sequence
group* is one attempt of a generation; the agent numbers groups. Each of its choices is a sequence.

An embedding is one vector of a prompt's hidden states, as they are computed: the last one, or their
mean. A mean adds its rows one after the other, in double precision. So it does not depend on the steps
into which a prompt was divided, and with them on what else was computed.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import msgspec
import numpy as np
import numpy.typing as npt

from ryzanstein.generation.request import SamplingParams

Pooling = Literal["mean", "last"]


class Pool:
    """The hidden states of one prompt so far. That of token `first` is the next to be added."""

    def __init__(self, pooling: Pooling, num_prompt: int) -> None:
        self.first = 0 if pooling == "mean" else num_prompt - 1
        self._sum: npt.NDArray[np.float64] | None = None
        self._num = 0

    def add(self, rows: Sequence[bytes]) -> None:
        """Adds hidden states, each as numbers in single precision."""
        for row in rows:
            numbers = np.frombuffer(row, np.float32).astype(np.float64)
            self._sum = numbers if self._sum is None else np.add(self._sum, numbers, out=self._sum)
            self._num += 1
            self.first += 1

    def vector(self) -> bytes:
        """Returns the mean of what was added, as numbers in single precision."""
        if self._sum is None:
            raise ValueError("nothing was added")
        return (self._sum / self._num).astype(np.float32).tobytes()


class SubmitGroup(msgspec.Struct, tag=True, frozen=True):
    """A request to run `sampling.n` choices of one prompt.

    `generated[choice]` is what earlier attempts generated; `finished[choice]` is true for choices
    that must not run. `stop_token_ids` includes the model's own unless they are to be ignored.
    `max_tokens` is resolved: prompt + max_tokens fits the context. `deadline` is seconds on the
    monotonic clock, which all processes of a machine share and which is never set.
    """

    group: int
    prompt_ids: list[int]
    sampling: SamplingParams
    max_tokens: int
    stop_token_ids: list[int]
    generated: list[list[int]]
    finished: list[bool]
    deadline: float | None = None
    priority: int = 0
    tenant: str = ""
    accepted_before: bool = False  # by an earlier node, so it is not refused for coming late
    traceparent: str = ""
    reports_pages: bool = False  # its full pages are events: they are to be sent elsewhere
    parks: bool = False  # they are also in a tier, from which it comes back after it was paused
    grammar_bytes: int = 0  # what the compiled grammar of its constraint takes, about
    bad_sequences: list[list[int]] = []  # token ids that the answer must not contain in a row
    cache_root: bytes = b""  # with which the keys of its pages begin, see `prefix.scope_root`
    pooling: Pooling | None = None  # a vector is wanted of the prompt, and no token
    adapter: int = 0  # the slot of its adapter, which ranks have mapped and `cache_root` tells from others; 0: none


class SetTokens(msgspec.Struct, tag=True, frozen=True):
    """What the model's tokens stand for, packed (`constraints.table.TokenTable`).

    Sent to new ranks before their first group with a constraint.
    """

    table: bytes


class MapAdapter(msgspec.Struct, tag=True, frozen=True):
    """A request to keep an adapter in a slot, a number from 1 on, before the next step. No group may use the slot yet.

    `path` is a file that `adapters.packing` has written, and that stays until the slot is dropped.
    """

    slot: int
    path: str


class DropAdapter(msgspec.Struct, tag=True, frozen=True):
    """A request to forget the adapter in a slot before the next step. No group may use it any more."""

    slot: int


class CancelGroup(msgspec.Struct, tag=True, frozen=True):
    """A request to free the group's blocks before the next step.

    No event follows. Unknown groups are ignored.
    """

    group: int


class FinishChoice(msgspec.Struct, tag=True, frozen=True):
    """A request to end a choice because the agent found a stop string.

    The agent drops tokens that are still in flight.
    """

    group: int
    choice: int


class SetBlockLimit(msgspec.Struct, tag=True, frozen=True):
    """A request to use only so many blocks from the next step on.

    More take effect at once. For fewer the engine gives back cached blocks, then those of the
    sequences that yield first. `EngineStats.block_limit` says when that is done.
    """

    num_blocks: int


class FindPages(msgspec.Struct, tag=True, frozen=True):
    """A request for the places in `names` (see `travel`) of pages that are not cached. The others are kept longest."""

    number: int
    names: list[bytes]


class ExportPages(msgspec.Struct, tag=True, frozen=True):
    """A request to copy pages into the slab: that of `names[i]` to place i.

    The answer has the places of those that are cached.
    """

    number: int
    names: list[bytes]


class ImportPages(msgspec.Struct, tag=True, frozen=True):
    """A request to take the page of `names[i]` from place i of the slab.

    The names are a piece of one chain after the page `parent`. The answer has the places of those
    that were taken: the others were cached already, or there is no room.
    """

    number: int
    names: list[bytes]
    parent: bytes = b""


class ReturnChoice(msgspec.Struct, tag=True, frozen=True):
    """A request to run a paused choice on: its pages have come back from a tier, as far as that is worth it."""

    group: int
    choice: int


class ChoiceEnd(msgspec.Struct, frozen=True, array_like=True):
    """The end of a choice in this step.

    `reason` is a FinishReason; `cached_tokens` of its prompt were in the prefix cache.
    """

    group: int
    choice: int
    reason: int
    cached_tokens: int


class GroupFailed(msgspec.Struct, frozen=True, array_like=True):
    """A group that ended with an error of this code and reason (see `ryzanstein.errors`)."""

    group: int
    code: int
    reason: str
    message: str
    metadata: dict[str, str] = {}
    retry_after_s: float | None = None


class ClassStats(msgspec.Struct, frozen=True, array_like=True):
    """One priority class: waiting sequences, and tokens computed so far."""

    waiting: int = 0
    prefill_tokens: int = 0
    decode_tokens: int = 0


class HotStats(msgspec.Struct, frozen=True, array_like=True):
    """Pages in full precision beside compressed blocks. `sealed` pages were compressed so far."""

    held: int = 0
    cached: int = 0
    sealed: int = 0
    evicted: int = 0


class StateStats(msgspec.Struct, frozen=True, array_like=True):
    """Slots for what some layers keep instead of keys and values. Cached ones are snapshots to resume from."""

    held: int = 0
    cached: int = 0
    evicted: int = 0


class ConstraintStats(msgspec.Struct, frozen=True, array_like=True):
    """Constraints since the start of the ranks: compiled grammars, and the masks of steps.

    `wait_s` is the part of the masks' time that steps waited for.
    """

    grammar_hits: int = 0
    grammar_misses: int = 0
    grammar_evictions: int = 0
    mask_s: float = 0.0
    wait_s: float = 0.0


class EngineStats(msgspec.Struct, frozen=True, array_like=True):
    """The engine's load after a step.

    `blocks_held` are referenced by sequences; cached blocks that could be evicted do not count.
    Fields that are not a load count from the engine's start.
    """

    running: int
    waiting: int
    blocks_held: int
    blocks_cached: int
    preemptions: int  # sequences paused, for any cause
    prefix_queries: int  # prompt tokens looked up in the prefix cache so far
    prefix_hits: int  # ... and found
    prefill_tokens: int
    decode_tokens: int
    memory_retries: int = 0  # steps that ran out of memory and were done in smaller parts
    expected_wait_s: float = 0.0  # of a sequence that would join the queue now
    paused: dict[str, int] = {}  # by cause
    resumed: int = 0
    shed: dict[str, int] = {}  # by cause
    classes: dict[int, ClassStats] = {}  # by priority
    block_limit: int = 0  # blocks that have memory: the limit, or more while blocks are given back; 0: unknown
    blocks_wanted: int = 0  # that waiting sequences lack, about
    takebacks: int = 0  # how often blocks in use had to be given back
    constraints: ConstraintStats = ConstraintStats()
    blocks_evicted: int = 0  # of the prefix cache, for others
    hot: HotStats | None = None  # None: blocks are not compressed
    states: StateStats | None = None  # None: no layer keeps a state
    without_state: int = 0  # prompt tokens of which keys and values were found, but no state after them


class StepEvents(msgspec.Struct, tag=True, frozen=True):
    """The events of one step.

    Columns are parallel; `logprobs` maps a row to (logprob, [(token id, logprob), ...]). `accepted`
    are the groups that began to run or have waited for some time: with few exceptions a refusal
    comes before that. `scores` are parts of prompts: group, first token, and for each token its
    (logprob, [(token id, logprob), ...]). `paused` are the choices (group, choice) that ran and wait
    again. `sealed` are groups that report their pages, with the names of those that became full or
    were found. `returning` are paused choices (group, choice) for which there is room, with the keys of
    their pages: they wait for a ReturnChoice, a second at most. `vectors` are the groups that wanted one
    and ended with it, as numbers in single precision. `prefilled` are the groups of whose prompt a part
    was computed, with the number of tokens that are. `taken`
    counts the agent's messages taken so far; each message is followed by a step's events, with or
    without work.
    """

    step: int
    groups: list[int]
    choices: list[int]
    token_ids: list[int]
    logprobs: dict[int, tuple[float, list[tuple[int, float]]]]
    ended: list[ChoiceEnd]
    failed: list[GroupFailed]
    stats: EngineStats
    step_s: float
    accepted: list[int] = []
    taken: int = 0
    paused: list[tuple[int, int]] = []
    sealed: list[tuple[int, list[bytes]]] = []
    scores: list[tuple[int, int, list[tuple[float, list[tuple[int, float]]]]]] = []
    returning: list[tuple[int, int, list[bytes]]] = []
    vectors: list[tuple[int, bytes]] = []
    prefilled: list[tuple[int, int]] = []
