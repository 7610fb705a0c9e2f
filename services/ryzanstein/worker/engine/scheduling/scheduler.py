"""Chooses what each step runs.

Implements continuous batching with chunked prefill, priorities, fair shares, and pausing by
recompute. The engine requests a batch with `schedule` and reports with `advance` what was computed.
The scheduler knows blocks and order; it knows nothing of sampling, stop tokens, deadlines or ranks.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable

from ryzanstein.worker.engine.extents import EngineSettings
from ryzanstein.worker.engine.memory.blocks import BlockPool
from ryzanstein.worker.engine.memory.kv_pages import KVPages
from ryzanstein.worker.engine.memory.parking import Parking
from ryzanstein.worker.engine.memory.prefix import Match
from ryzanstein.worker.engine.plan import Rearrangement
from ryzanstein.worker.engine.scheduling.batch import Batch
from ryzanstein.worker.engine.scheduling.pace import Allowance, PromptCost
from ryzanstein.worker.engine.scheduling.queue import OrderedSequences, WaitingLine, first_to_yield
from ryzanstein.worker.engine.sequence import PREFILL_WEIGHT, Sequence


class Scheduler:
    """A scheduler that sequences join with `add` and leave with `remove`, between any two steps.

    From its admission on, a running sequence holds the blocks that its tokens so far need, so a
    prefill does not stop half-way for lack of blocks. Decoding takes one more block in each group
    of layers every `block_size` tokens. When no block is left, or a sequence of higher priority needs the place, a
    sequence is paused: it gives all of its blocks back and waits again. Its tokens are kept and
    computed again later, mostly from the prefix cache, or its pages come back from a tier.
    """

    def __init__(self, settings: EngineSettings, cost: PromptCost, clock: Callable[[], float] = time.monotonic) -> None:
        self._settings = settings
        self._cost = cost
        self._allowance: Allowance | None = None
        self._pages = KVPages(settings)
        self.parking = Parking(settings.block_size, clock)
        """The paused sequences that may come back from a tier."""
        self.running = OrderedSequences("rank")
        self.waiting = WaitingLine(settings.max_idle_tenants)
        self.num_places = settings.max_sequences
        """How many sequences have a place: fewer than the setting allows when blocks run short."""
        self._num_admitted = 0
        self._limit = settings.token_budget
        self.num_paused: Counter[str] = Counter()
        """Sequences paused, by cause: "memory", "priority" or "takeback"."""
        self._paused: list[Sequence] = []
        self._returning = False
        self._lacks_blocks = False
        self._aside: dict[Sequence, int] = {}  # that wait for pages in this step, and how many blocks they need
        self.num_takebacks = 0
        """How often the limit was set below the blocks in use."""
        self.num_resumed = 0
        self.num_prefilled: Counter[int] = Counter()
        """Prompt tokens computed, by priority."""
        self.num_prefix_queries = 0
        self.num_prefix_hits = 0
        self.num_without_state = 0
        """Prompt tokens of which keys and values were found, but no state."""

    @property
    def pages(self) -> KVPages:
        """The pages of all sequences."""
        return self._pages

    @property
    def pool(self) -> BlockPool:
        """The blocks of all sequences and of the prefix cache."""
        return self._pages.pool

    def add(self, sequence: Sequence) -> None:
        """Adds a sequence. It must fit the pool when it is alone."""
        self.waiting.insert(sequence)

    def remove(self, sequence: Sequence) -> None:
        """Removes a sequence, running or waiting, and frees its blocks."""
        if self.parking.parked:
            self.parking.forget(sequence)
        if sequence in self.running:
            self.running.remove(sequence)
            # Charged in advance and not computed.
            sequence.group.account.counter -= PREFILL_WEIGHT * max(0, sequence.num_charged - sequence.num_computed)
            self._pages.release(sequence)
        elif sequence in self.waiting:
            self.waiting.remove(sequence)

    def schedule(self, max_prefill: int) -> Batch:
        """Returns the next step's batch, with at most `max_prefill` prompt tokens.

        It is empty only if there is no sequence at all, if the first one does not fit the blocks
        that are left to the engine, or if all wait for their constraints.
        """
        self._limit = self._step_limit(max_prefill)
        self._pages.settle(self.running)
        self._admit()
        batch = Batch(self._pages.num_groups)
        self._take_decodes(batch)
        self._take_prefills(batch)
        return batch

    def advance(self, batch: Batch) -> None:
        """Records that the batch has been computed: its tokens are in the cache.

        Call it before the sampled tokens are appended.
        """
        size = self._settings.block_size
        for sequence, num in batch.members:
            before = sequence.num_computed
            sequence.num_computed = before + num
            if before // size != (before + num) // size:
                self._pages.advance(sequence)
            if self._pages.states is not None:
                self._pages.states.advance(sequence)
        for sequence, num in batch.members[batch.num_decodes :]:
            self.num_prefilled[sequence.group.priority] += num

    def limit_blocks(self, num_blocks: int) -> None:
        """Limits the blocks that sequences and the prefix cache use.

        Call `give_back` before each step while `gives_back`.
        """
        num_blocks = min(max(1, num_blocks), self.pool.num_blocks)
        if num_blocks < self.pool.num_held + self.pool.num_idle and num_blocks < self.pool.limit:
            self.num_takebacks += 1
        self._returning = self._returning or num_blocks < self.pool.limit
        self.pool.set_limit(num_blocks)

    @property
    def gives_back(self) -> bool:
        """Returns whether blocks above the limit are still to be given back."""
        return self._returning

    def give_back(self) -> Rearrangement:
        """Gives back some blocks above the limit; returns what the ranks must do before a step."""
        self._yield_blocks()
        change = self._pages.gather(list(self.running))
        self._returning = self.pool.ceiling > self.pool.limit
        return change

    @property
    def num_wanted(self) -> int:
        """Returns about how many blocks the waiting sequences lack that would have places."""
        num_waiting = len(self.waiting)
        if not self._lacks_blocks or not num_waiting:
            return 0
        num_placed = min(num_waiting, max(1, self._settings.max_sequences - len(self.running)))
        each = self._pages.extents.blocks_for(self.waiting.num_tokens // num_waiting) + self._pages.num_groups
        reserved = len(self.running) * self._pages.num_groups
        return max(1, each * num_placed + reserved - max(0, self.pool.num_available))

    def num_uncached(self, sequence: Sequence) -> int:
        """Returns the tokens that a waiting sequence must compute before its first new token.

        The value reflects the prefix cache at the first call.
        """
        if sequence.num_uncached is None:
            sequence.num_uncached = sequence.num_tokens - self._pages.match(sequence).num_pages * self._settings.block_size
        return sequence.num_uncached

    def take_paused(self) -> list[Sequence]:
        """Returns the sequences that were paused since the last call."""
        paused, self._paused = self._paused, []
        return paused

    @property
    def prefill_room(self) -> int:
        """Returns the prompt tokens that the last step had room for; at least 1."""
        return max(1, self._limit - len(self.running))

    @property
    def mean_uncached(self) -> float:
        """Returns the mean number of uncached prompt tokens of the sequences admitted so far."""
        return (self.num_prefix_queries - self.num_prefix_hits) / max(1, self._num_admitted)

    def _step_limit(self, max_prefill: int) -> int:
        """Returns the token limit of the next step.

        It is lowered when memory is short, and, while sequences decode, to meet the objective for
        the time per token.
        """
        budget, objective_s = self._settings.token_budget, self._settings.queue.tpot_objective_s
        self._allowance = None
        if not objective_s and max_prefill >= budget:
            return budget
        num_decodes = sum(sequence.num_pending == 1 for sequence in self.running)
        if objective_s and num_decodes:
            self._allowance = self._cost.allowance(objective_s)
            first = next((sequence for sequence in self.running if sequence.num_pending > 1), None)
            max_prefill = min(max_prefill, self._allowance.room(first.num_computed if first else 0))
        return min(budget, num_decodes + max_prefill)

    def _admit(self) -> None:
        self.num_places = self._settings.max_sequences
        self._lacks_blocks = False
        self._aside.clear()
        while (sequence := self._next()) is not None and self._has_budget(sequence):
            match = self._pages.match(sequence)
            fits = self._fits(sequence, match, 0, len(self.running))
            if fits and self.parking.parked and self.parking.awaits(sequence, match):
                self._aside[sequence] = self._pages.num_needed(sequence, match) + self._pages.num_groups
                continue
            if not self._make_way(sequence, match):
                self.num_places = max(1, len(self.running))
                self._lacks_blocks = len(self.running) < self._settings.max_sequences
                return
            self.waiting.remove(sequence)
            self._start(sequence, match)
            self.running.insert(sequence)

    def _next(self) -> Sequence | None:
        """Returns the next sequence of the queue, without those for whose pages this step waits."""
        if not self._aside:
            return self.waiting.first
        return next((sequence for sequence in self.waiting.in_turn(0.0) if sequence not in self._aside), None)

    def _has_budget(self, sequence: Sequence) -> bool:
        """Returns whether this step could feed a token of the sequence.

        All decodes, and the prefills that are ahead of it, come first. Those behind it wait for it.
        """
        ahead = (other for other in self.running if other.num_pending == 1 or other.rank < sequence.rank)
        return sum(min(other.num_pending, other.most_at_once) for other in ahead) < self._limit

    def _make_way(self, sequence: Sequence, match: Match) -> bool:
        """Pauses sequences of lower priority until this one fits; returns whether it does.

        Pauses none if pausing all of them would not be enough.
        """
        lower = [other for other in self.running if other.group.priority < sequence.group.priority]
        reclaimable = sum(map(self._pages.num_held, lower))
        if not self._fits(sequence, match, reclaimable, len(self.running) - len(lower)):
            return False
        while not self._fits(sequence, match, 0, len(self.running)):
            if not self.running or (victim := first_to_yield(self.running)).group.priority >= sequence.group.priority:
                return False  # they shared blocks, which were counted more than once
            self._pause(victim, "priority")
        return True

    def _fits(self, sequence: Sequence, match: Match, reclaimable: int, num_running: int) -> bool:
        """Returns whether the sequence can join so many running ones.

        One block in each group is reserved for each of them, so that an admitted sequence is not
        paused in the same step. Those that wait for their pages keep their places and their room.
        """
        needed = self._pages.num_needed(sequence, match) + num_running * self._pages.num_groups + sum(self._aside.values())
        num_places = self._settings.max_sequences - len(self._aside)
        return self.pool.num_available + reclaimable >= needed and num_running < num_places

    def _start(self, sequence: Sequence, match: Match) -> None:
        self._pages.start(sequence, match)
        self.num_without_state += match.num_without_state * self._settings.block_size
        if self.parking.parked:
            self.parking.forget(sequence)
        if sequence.cached_tokens is not None:
            self.num_resumed += 1
            return
        self._start_first(sequence)

    def _start_first(self, sequence: Sequence) -> None:
        """Starts a sequence for the first time, and charges its prompt now.

        So the next place already goes to another tenant.
        """
        group = sequence.group
        group.fresh = False
        sequence.rank = (-group.priority, self._num_admitted)
        self._num_admitted += 1
        sequence.num_charged = sequence.num_tokens
        group.account.counter += PREFILL_WEIGHT * (sequence.num_tokens - sequence.num_computed)
        sequence.cached_tokens = min(sequence.num_computed, group.num_prompt)
        self.num_prefix_queries += group.num_prompt
        self.num_prefix_hits += sequence.cached_tokens

    def _take_decodes(self, batch: Batch) -> None:
        """Adds every running sequence that has one token to feed, except those that must yield, or wait for a constraint."""
        self._make_room()
        for sequence in self.running:
            if sequence.num_pending == 1 and sequence.ready:
                self._pages.reach(sequence, 1)
                batch.decode(sequence)

    def _yield_blocks(self) -> None:
        """Pauses sequences until the others hold no more blocks than the limit allows."""
        while self.pool.num_available < 0:
            self._pause(first_to_yield(self.running), "takeback")

    def _make_room(self) -> None:
        """Pauses sequences until there are blocks for all decodes and for the first prefill."""
        while self._num_lacking() > self.pool.num_available:
            self._pause(first_to_yield(self.running), "memory")

    def _num_lacking(self) -> int:
        first = next((sequence for sequence in self.running if sequence.num_pending > 1), None)
        needy = (sequence for sequence in self.running if sequence.num_pending == 1 or sequence is first)
        return sum(map(self._pages.num_lacking, needy))

    def _take_prefills(self, batch: Batch) -> None:
        """Adds prefills, in order, up to the budget that the decodes left."""
        budget = self._limit - batch.num_tokens
        for sequence in self.running:
            if sequence.num_pending > 1:
                room = self._room(sequence, budget)
                if room == 0:
                    return
                num = self._pages.reach(sequence, min(sequence.num_pending, room, sequence.most_at_once))
                if num > 0:
                    self._take(batch, sequence, num)
                    budget -= num

    def _room(self, sequence: Sequence, budget: int) -> int:
        return min(budget, self._allowance.room(sequence.num_computed)) if self._allowance else budget

    def _take(self, batch: Batch, sequence: Sequence, num: int) -> None:
        if self._allowance:
            self._allowance.take(num, sequence.num_computed)
        batch.prefill(sequence, num)

    def _pause(self, victim: Sequence, cause: str) -> None:
        self.running.remove(victim)
        self._pages.release(victim)
        victim.num_charged = 0
        self.waiting.insert(victim)
        self.parking.park(victim)
        self.num_paused[cause] += 1
        self._paused.append(victim)
