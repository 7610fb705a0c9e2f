"""The pages of running sequences: what each holds in every group of layers, from the pool.

The scheduler decides who runs; here blocks are taken, extended as a sequence advances, let go when
they leave a window, and found again under their keys.

Where blocks are compressed, the hot pages are a group of their own, `hot_group`, with a pool of its
own: after the last of its pages a sequence can be resumed. How pages that were computed elsewhere
come in: see `travel`.
"""

from __future__ import annotations

from collections.abc import Iterable
from itertools import chain

from ryzanstein.worker.engine.extents import SLACK, EngineSettings
from ryzanstein.worker.engine.memory.blocks import BlockPool
from ryzanstein.worker.engine.memory.prefix import Match, PageGroup, PrefixCache
from ryzanstein.worker.engine.memory.states import StateSlots
from ryzanstein.worker.engine.memory.travel import TravelingPages
from ryzanstein.worker.engine.messages import HotStats, StateStats
from ryzanstein.worker.engine.plan import Rearrangement, StateRun
from ryzanstein.worker.engine.sequence import BlockTable, Sequence


class KVPages:
    """The pages of all sequences."""

    def __init__(self, settings: EngineSettings) -> None:
        self.extents = settings.extents
        self.pool = BlockPool(settings.num_blocks + settings.borrowable_blocks, settings.num_blocks)
        self._groups = [
            PageGroup(number, window, self.pool, lasting) for number, (window, lasting) in enumerate(self.extents.groups)
        ]
        self.hot_group = self._hot_group(settings.hot_pages)
        everything = self._groups if self.hot_group is None else [*self._groups, self.hot_group]
        self._windowed = [(group, group.window) for group in everything if group.window is not None]
        self._everything = everything
        self.states = StateSlots(settings.num_states, self.extents) if settings.num_states else None
        self._prefix = PrefixCache(everything, self.extents, self.states)
        self._moves_at_once = max(1, settings.token_budget // settings.block_size) * len(self._groups)
        self._num_sealed = 0

    @property
    def num_groups(self) -> int:
        return len(self._groups)

    @property
    def hot_stats(self) -> HotStats | None:
        if self.hot_group is None:
            return None
        pool = self.hot_group.pool
        return HotStats(pool.num_held, pool.num_idle, self._num_sealed, pool.num_evicted)

    @property
    def state_stats(self) -> StateStats | None:
        if self.states is None:
            return None
        pool = self.states.pool
        return StateStats(pool.num_held, pool.num_idle, pool.num_evicted)

    def traveling(self) -> TravelingPages:
        """Returns the pages as they leave and arrive."""
        hot = None if self.hot_group is None else self.hot_group.pool
        return TravelingPages(self.pool, len(self._groups), hot, SLACK + self.extents.pages(self.extents.hot_window - 1))

    def match(self, sequence: Sequence) -> Match:
        """Returns the longest cached prefix of a sequence. Takes no reference."""
        return self._prefix.match(sequence)

    def num_held(self, sequence: Sequence) -> int:
        """Returns the number of blocks that a sequence holds."""
        return sum(len(table.blocks) for table in sequence.tables[: len(self._groups)])

    def num_needed(self, sequence: Sequence, match: Match) -> int:
        """Returns the blocks that `start` takes from those that are available.

        A matched block costs nothing only while another sequence holds it.
        """
        pairs = list(zip(self._groups, match.tables, strict=False))
        num_pages = sum(self._end(sequence, table, group) - table.first + table.num_lasting for group, table in pairs)
        return num_pages - sum(map(self.pool.is_held, chain(*(table.blocks for _, table in pairs))))

    def start(self, sequence: Sequence, match: Match) -> None:
        """Gives a sequence the matched blocks, and new ones for the rest of its tokens.

        In a window group it gets as many as the largest step needs. As it advances, it takes one
        for each that it lets go: a prefill does not stop half-way for lack of blocks. Hot pages are
        taken step by step, because there are always enough.
        """
        for group, table in zip(self._everything, match.tables, strict=True):
            for block in table.blocks:
                group.pool.share(block)
        sequence.tables = match.tables
        sequence.num_computed = match.num_pages * self.extents.block_size
        sequence.num_published = match.num_pages
        sequence.num_known = match.num_known
        for group, table in zip(self._groups, sequence.tables, strict=False):
            _grow(table, self._end(sequence, table, group), self.pool)
        if self.states is not None:
            self.states.start(sequence)

    def num_lacking(self, sequence: Sequence) -> int:
        """Returns the blocks without which no further token of the sequence can be computed."""
        size = self.extents.block_size
        return sum(sequence.num_computed >= table.end * size for table in sequence.tables[: len(self._groups)])

    def reach(self, sequence: Sequence, num: int) -> int:
        """Returns how many of the next `num` tokens have blocks. Takes blocks for them.

        They are fewer only if the blocks that the sequence let go were another's as well, and none
        are left.
        """
        size = self.extents.block_size
        for group, table in zip(self._everything, sequence.tables, strict=True):
            if sequence.num_computed + num > table.end * size:
                _grow(table, self.extents.pages(sequence.num_computed + num), group.pool)
                num = min(num, table.end * size - sequence.num_computed)
        return num

    def advance(self, sequence: Sequence) -> None:
        """Publishes the pages that a step has filled, and lets go what left a window."""
        self._num_sealed += sequence.num_computed // self.extents.block_size - sequence.num_published
        self._prefix.publish(sequence)
        for group, window in self._windowed:
            table = sequence.tables[group.number]
            self._let_go(sequence, table, group, window)
            if group is not self.hot_group:
                _grow(table, self._end(sequence, table, group), group.pool)

    def runs(self, members: list[tuple[Sequence, int]]) -> list[StateRun]:
        """Returns the runs of a step's tokens where layers keep a state; else none."""
        if self.states is None:
            return []
        return list(chain.from_iterable(self.states.runs(sequence, num) for sequence, num in members))

    def settle(self, running: Iterable[Sequence]) -> None:
        """Takes back what was given for a step that did not count. Call it before sequences are started."""
        if self.states is not None:
            self.states.settle(running)

    def release(self, sequence: Sequence) -> None:
        """Takes all blocks of a sequence."""
        for group, table in zip(self._everything, sequence.tables, strict=False):
            group.pool.free(table.blocks)
        if self.states is not None:
            self.states.release(sequence)
        sequence.tables = []
        sequence.num_computed = 0
        sequence.num_published = 0

    def gather(self, running: list[Sequence]) -> Rearrangement:
        """Moves some blocks below the limit; returns what the ranks must do before a step.

        One call moves no more tokens than a step may compute, so that a step takes little longer.
        """
        moves = self.pool.gather(self._moves_at_once)
        if moves:
            for sequence in running:
                for table in sequence.tables[: len(self._groups)]:
                    table.blocks = [moves.get(block, block) for block in table.blocks]
        return Rearrangement(list(moves.items()), self.pool.ceiling)

    def _hot_group(self, num_pages: int) -> PageGroup | None:
        return PageGroup(len(self._groups), self.extents.hot_window, BlockPool(num_pages)) if num_pages else None

    def _end(self, sequence: Sequence, table: BlockTable, group: PageGroup) -> int:
        """Returns the page at which a table is to end.

        Blocks for the lasting pages of all of its tokens are taken at once: see `start`.
        """
        pages, num_lasting = self.extents.pages(sequence.num_tokens), self.extents.num_lasting
        later = num_lasting(group.lasting, pages) - num_lasting(group.lasting, table.first)
        return min(pages, table.first + self.extents.most(group.window) + later)

    def _let_go(self, sequence: Sequence, table: BlockTable, group: PageGroup, window: int) -> None:
        """Frees the blocks that no later token reads.

        A long prompt leaves thousands of them. They are evicted first, so that they do not push out
        what other conversations come back to, except where another prompt may resume: at the
        prompt's end, and where it left what an earlier prompt shared with it.
        """
        first = self.extents.first_kept(window, sequence.num_computed)
        size = self.extents.block_size
        ends = sequence.group.num_prompt // size, sequence.num_known
        begins = [self.extents.first_kept(window, end * size) for end in ends]
        while table.first < first:
            if self.extents.lasts(group.lasting, table.first):
                table.num_lasting += 1
            else:
                keeps = any(begin <= table.first < end for begin, end in zip(begins, ends, strict=True))
                group.pool.free([table.blocks.pop(table.num_lasting)], soon=not keeps)
            table.first += 1


def _grow(table: BlockTable, end: int, pool: BlockPool) -> None:
    """Extends a table up to page `end`, or as far as there are blocks."""
    num = min(end - table.end, pool.num_available)
    if num > 0:
        table.blocks += pool.allocate(num, table.blocks[-1] if table.blocks else None)
