"""The pages of running sequences: what each holds in every group of layers, from the pool.

The scheduler decides who runs; here blocks are taken, extended as a sequence advances, let go when
they leave a window, and found again under their keys.

To bring in a page that was computed elsewhere: `pool.allocate` a block, fill it on every rank, then
`pool.publish` it under (key, group) and `pool.free` it. It is idle then, and the next `match` finds
it. `pool.block_of((key, group))` says which block holds a page; a block that is to be read must be
held meanwhile, with `pool.share` and `pool.free`.
"""

from __future__ import annotations

from ryzanstein.worker.engine.blocks import BlockPool
from ryzanstein.worker.engine.plan import Rearrangement
from ryzanstein.worker.engine.prefix import Match, PrefixCache
from ryzanstein.worker.engine.sequence import BlockTable, Sequence
from ryzanstein.worker.engine.settings import EngineSettings


class KVPages:
    """The pages of all sequences in one pool."""

    def __init__(self, settings: EngineSettings) -> None:
        self.extents = settings.extents
        self.pool = BlockPool(settings.num_blocks + settings.borrowable_blocks, settings.num_blocks)
        self._prefix = PrefixCache(self.pool, self.extents)
        self._moves_at_once = max(1, settings.token_budget // settings.block_size) * len(settings.windows)

    @property
    def num_groups(self) -> int:
        return len(self.extents.windows)

    def match(self, sequence: Sequence) -> Match:
        """Returns the longest cached prefix of a sequence. Takes no reference."""
        return self._prefix.match(sequence)

    def num_needed(self, sequence: Sequence, match: Match) -> int:
        """Returns the blocks that `start` takes from those that are available.

        A matched block costs nothing only while another sequence holds it.
        """
        ends = (self._end(sequence, table.first, group) for group, table in enumerate(match.tables))
        num_pages = sum(end - table.first for end, table in zip(ends, match.tables, strict=True))
        return num_pages - sum(map(self.pool.is_held, match.blocks))

    def start(self, sequence: Sequence, match: Match) -> None:
        """Gives a sequence the matched blocks, and new ones for the rest of its tokens.

        In a window group it gets as many as the largest step needs. As it advances, it takes one
        for each that it lets go: a prefill does not stop half-way for lack of blocks.
        """
        for block in match.blocks:
            self.pool.share(block)
        sequence.tables = match.tables
        sequence.num_computed = match.num_pages * self.extents.block_size
        sequence.num_published = match.num_pages
        sequence.num_known = match.num_known
        for group, table in enumerate(sequence.tables):
            self._grow(table, self._end(sequence, table.first, group))

    def num_lacking(self, sequence: Sequence) -> int:
        """Returns the blocks without which no further token of the sequence can be computed."""
        return sum(sequence.num_computed >= table.end * self.extents.block_size for table in sequence.tables)

    def reach(self, sequence: Sequence, num: int) -> int:
        """Returns how many of the next `num` tokens have blocks. Takes blocks for them.

        They are fewer only if the blocks that the sequence let go were another's as well, and none
        are left.
        """
        size = self.extents.block_size
        for table in sequence.tables:
            if sequence.num_computed + num > table.end * size:
                self._grow(table, self.extents.pages(sequence.num_computed + num))
                num = min(num, table.end * size - sequence.num_computed)
        return num

    def advance(self, sequence: Sequence) -> None:
        """Publishes the pages that a step has filled, and lets go what left a window."""
        self._prefix.publish(sequence)
        for group, window in enumerate(self.extents.windows):
            if window is not None:
                table = sequence.tables[group]
                self._let_go(sequence, table, window)
                self._grow(table, self._end(sequence, table.first, group))

    def release(self, sequence: Sequence) -> None:
        """Takes all blocks of a sequence."""
        for table in sequence.tables:
            self.pool.free(table.blocks)
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
                for table in sequence.tables:
                    table.blocks = [moves.get(block, block) for block in table.blocks]
        return Rearrangement(list(moves.items()), self.pool.ceiling)

    def _end(self, sequence: Sequence, first: int, group: int) -> int:
        """Returns the page at which a table ends that begins at `first`."""
        num_pages = self.extents.pages(sequence.num_tokens)
        return min(num_pages, first + self.extents.most(self.extents.windows[group]))

    def _grow(self, table: BlockTable, end: int) -> None:
        """Extends a table up to page `end`, or as far as there are blocks."""
        num = min(end - table.end, self.pool.num_available)
        if num > 0:
            table.blocks += self.pool.allocate(num, table.blocks[-1] if table.blocks else None)

    def _let_go(self, sequence: Sequence, table: BlockTable, window: int) -> None:
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
            keeps = any(begin <= table.first < end for begin, end in zip(begins, ends, strict=True))
            self.pool.free([table.blocks.pop(0)], soon=not keeps)
            table.first += 1
