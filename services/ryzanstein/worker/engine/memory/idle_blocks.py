"""Idle blocks in the order in which they are evicted: the least recently used first.

A *chain* is a number of blocks that are of use only together with those before them, such as the
pages of a conversation that arrived from another node. It is used as one and is evicted from its
end, so that its beginning lasts longest. Whatever is done to one block takes a constant time.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping


class IdleBlocks:
    """An order of blocks. Chains have positive numbers, given by the caller; a block outside of one is alone."""

    def __init__(self) -> None:
        self._order: OrderedDict[int, OrderedDict[int, None] | None] = OrderedDict()  # by chain; a block alone by ~block
        self._chain_of: dict[int, int] = {}
        self._chains: OrderedDict[int, None] = OrderedDict()
        self._num_in_chains = 0

    def __len__(self) -> int:
        return len(self._chain_of)

    def __contains__(self, block: int) -> bool:
        return block in self._chain_of

    @property
    def num_in_chains(self) -> int:
        return self._num_in_chains

    def add(self, block: int, *, first: bool = False) -> None:
        """Adds a block that is evicted last, or first."""
        self._chain_of[block] = ~block
        self._order[~block] = None
        if first:
            self._order.move_to_end(~block, last=False)

    def join(self, block: int, chain: int) -> None:
        """Makes a block that is here the end of a chain, which is evicted last now."""
        self.remove(block)
        self._chain_of[block] = chain
        blocks = self._order.get(chain)
        if blocks is None:
            blocks = self._order[chain] = OrderedDict()
            self._chains[chain] = None
        blocks[block] = None
        self._num_in_chains += 1
        self.touch(block)

    def remove(self, block: int) -> None:
        """Removes a block that is here."""
        chain = self._chain_of.pop(block)
        blocks = self._order[chain]
        if blocks is not None:
            del blocks[block]
            self._num_in_chains -= 1
        if not blocks:
            del self._order[chain]
            self._chains.pop(chain, None)

    def touch(self, block: int) -> None:
        """Makes a block that is here, and its chain, the last to be evicted."""
        chain = self._chain_of[block]
        self._order.move_to_end(chain)
        if chain > 0:
            self._chains.move_to_end(chain)

    def chain_of(self, block: int) -> int | None:
        """Returns the chain of a block, if it is here and in one."""
        chain = self._chain_of.get(block, -1)
        return chain if chain > 0 else None

    def num_of(self, chain: int) -> int:
        """Returns the number of blocks of a chain that are here."""
        return len(self._order.get(chain) or ())

    def next_evicted(self) -> int:
        """Returns the block that is evicted next."""
        first = next(iter(self._order))
        return ~first if first < 0 else self._end(first)

    def end_of_oldest_chain(self, excluding: int) -> int | None:
        """Returns the last block of the chain that was used least recently, besides one chain."""
        oldest = next((chain for chain in self._chains if chain != excluding), None)
        return None if oldest is None else self._end(oldest)

    def renumber(self, moves: Mapping[int, int]) -> None:
        """Gives blocks other numbers."""
        if self._chain_of.keys().isdisjoint(moves):
            return
        order: OrderedDict[int, OrderedDict[int, None] | None] = OrderedDict()
        for chain, blocks in self._order.items():
            if blocks is None:
                order[~moves.get(~chain, ~chain)] = None
            else:
                order[chain] = OrderedDict((moves.get(block, block), None) for block in blocks)
        self._order = order
        self._chain_of = {}
        for chain, blocks in order.items():
            self._chain_of.update(dict.fromkeys((~chain,) if blocks is None else blocks, chain))

    def _end(self, chain: int) -> int:
        return next(reversed(self._order[chain] or ()))
