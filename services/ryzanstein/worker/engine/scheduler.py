"""Chooses what each step runs: continuous batching with chunked prefill, priorities and pre-emption by recompute.

The engine asks `schedule` for a batch and reports with `advance` what was computed. Knows blocks and order; knows nothing of
sampling, stop tokens, deadlines or ranks.
"""

from __future__ import annotations

from ryzanstein.worker.engine.batch import Batch
from ryzanstein.worker.engine.blocks import BlockPool
from ryzanstein.worker.engine.ordered import OrderedSequences
from ryzanstein.worker.engine.prefix import PrefixCache
from ryzanstein.worker.engine.sequence import Sequence
from ryzanstein.worker.engine.settings import EngineSettings


class Scheduler:
    """Sequences join with `add` and leave with `remove`, between any two steps.

    A running sequence holds the blocks of all its tokens so far from admission on, so a prefill never stops half-way for want
    of room; decoding takes one more block every `block_size` tokens. When none is left, the last in order gives all of its
    blocks back and waits again; its tokens are kept and computed again later, mostly from the prefix cache.
    """

    def __init__(self, settings: EngineSettings) -> None:
        self._settings = settings
        self.pool = BlockPool(settings.num_blocks)
        self._prefix = PrefixCache(self.pool, settings.block_size)
        self.running = OrderedSequences()
        self.waiting = OrderedSequences()
        self.num_preemptions = 0
        self.num_prefix_queries = 0
        self.num_prefix_hits = 0

    def add(self, sequence: Sequence) -> None:
        """Lets a sequence run that fits the pool when it is alone."""
        self.waiting.insert(sequence)

    def remove(self, sequence: Sequence) -> None:
        """Forgets a sequence, wherever it is, and frees its blocks."""
        if sequence in self.running:
            self.running.remove(sequence)
            self._release(sequence)
        elif sequence in self.waiting:
            self.waiting.remove(sequence)

    def schedule(self) -> Batch:
        """The next step. Empty only if there is no sequence at all."""
        self._admit()
        batch = Batch()
        self._take_decodes(batch)
        self._take_prefills(batch)
        return batch

    def advance(self, batch: Batch) -> None:
        """The batch has been computed: its tokens are in the cache. Call before sampled tokens are appended."""
        size = self._settings.block_size
        for sequence, num in batch.members:
            before = sequence.num_computed
            sequence.num_computed = before + num
            if before // size != (before + num) // size:
                self._prefix.publish(sequence)

    def _admit(self) -> None:
        while (sequence := self.waiting.first) is not None and self._has_budget(sequence):
            matched = self._prefix.match(sequence)
            if not self._make_way(sequence, matched):
                return
            self.waiting.remove(sequence)
            self._start(sequence, matched)
            self.running.insert(sequence)

    def _has_budget(self, sequence: Sequence) -> bool:
        """Whether this step could feed a token of it, after all decodes and the prefills that are ahead of it."""
        pending = 0
        for other in self.running:
            pending += other.num_pending if other.order < sequence.order else 1
        return pending < self._settings.token_budget

    def _make_way(self, sequence: Sequence, matched: list[int]) -> bool:
        """Pre-empts sequences of lower priority until this one fits; none if all of them would not be enough."""
        lower = [other for other in self.running if other.group.priority < sequence.group.priority]
        reclaimable = sum(len(other.blocks) for other in lower)
        if not self._fits(sequence, matched, reclaimable, len(self.running) - len(lower)):
            return False
        while not self._fits(sequence, matched, 0, len(self.running)):
            if not lower:
                return False  # they shared blocks, which were counted more than once
            self._preempt(lower.pop())
        return True

    def _fits(self, sequence: Sequence, matched: list[int], reclaimable: int, num_running: int) -> bool:
        """Whether it can join so many others, with a block in hand for each of them: who is admitted is not pre-empted in
        the same step. A matched block costs nothing only while another sequence holds it."""
        needed = self._settings.blocks_for(sequence.num_tokens) - sum(map(self.pool.is_held, matched))
        has_room = self.pool.num_available + reclaimable >= needed + num_running
        return has_room and num_running < self._settings.max_sequences

    def _start(self, sequence: Sequence, matched: list[int]) -> None:
        for block in matched:
            self.pool.share(block)
        num_new = self._settings.blocks_for(sequence.num_tokens) - len(matched)
        sequence.blocks = matched + self.pool.allocate(num_new, matched[-1] if matched else None)
        sequence.num_computed = len(matched) * self._settings.block_size
        sequence.num_published = len(matched)
        if sequence.cached_tokens is None:
            sequence.cached_tokens = min(sequence.num_computed, sequence.group.num_prompt)
            self.num_prefix_queries += sequence.group.num_prompt
            self.num_prefix_hits += sequence.cached_tokens

    def _take_decodes(self, batch: Batch) -> None:
        """Every running sequence that has one token to feed. Those that must give way are at the end of the order."""
        size = self._settings.block_size
        i = 0
        while i < len(self.running):
            sequence = self.running[i]
            i += 1
            if sequence.num_pending > 1:
                continue
            if sequence.num_computed < len(sequence.blocks) * size or self._grow(sequence):
                batch.decode(sequence)

    def _take_prefills(self, batch: Batch) -> None:
        """What the decodes left of the budget, in order."""
        budget = self._settings.token_budget - batch.num_tokens
        for sequence in self.running:
            if budget == 0:
                return
            if sequence.num_pending > 1:
                num = min(sequence.num_pending, budget)
                batch.prefill(sequence, num)
                budget -= num

    def _grow(self, sequence: Sequence) -> bool:
        """Gives a sequence its next block. False if it was itself the last in order and has been pre-empted."""
        while self.pool.num_available == 0:
            victim = self.running.last
            assert victim is not None
            self._preempt(victim)
            if victim is sequence:
                return False
        sequence.blocks += self.pool.allocate(1, sequence.blocks[-1])
        return True

    def _preempt(self, victim: Sequence) -> None:
        self.running.remove(victim)
        self._release(victim)
        self.waiting.insert(victim)
        self.num_preemptions += 1

    def _release(self, sequence: Sequence) -> None:
        self.pool.free(sequence.blocks)
        sequence.blocks = []
        sequence.num_computed = 0
        sequence.num_published = 0
