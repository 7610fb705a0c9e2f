"""The pool of KV-cache blocks: which are held, which hold cached prefixes, which are free.

The scheduler allocates and frees here; the ranks see only block numbers. The pool knows nothing of
tokens, sequences or tensors.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Sequence

from ryzanstein.worker.engine.memory.idle_blocks import IdleBlocks


class BlockPool:
    """A pool of reference-counted blocks.

    A block is *free*, *held* (referenced) or *idle*: unreferenced, but its contents can still be
    found under a key. Idle blocks count as available; the least recently used is evicted first.

    Every `allocate` and `share` is paired with one `free`.

    Only the first `limit` blocks are given out, so that those after them need no memory. *Strays*
    are blocks in use that a lower limit has excluded: `gather` moves them below it.
    """

    def __init__(self, num_blocks: int, limit: int | None = None) -> None:
        self.num_blocks = num_blocks
        self.limit = num_blocks if limit is None else limit
        self.ceiling = self.limit
        """No block from this number on is in use: the limit, or more while there are strays."""
        self._strays: set[int] = set()
        self._references = [0] * num_blocks
        self._keys: list[Hashable | None] = [None] * num_blocks
        self._by_key: dict[Hashable, int] = {}
        self._idle = IdleBlocks()
        # One byte per block, 0 is free: bytearray.find finds a run of free blocks at the speed of
        # memory.
        self._taken = bytearray(num_blocks)
        self._taken[self.limit :] = b"\x01" * (num_blocks - self.limit)
        self._num_free = self.limit
        self.num_evicted = 0
        """Idle blocks whose contents were given up so far."""

    @property
    def num_available(self) -> int:
        """Returns the number of blocks that `allocate` can give: free and idle ones.

        Strays need places too. It is negative while more blocks are held than the limit allows.
        """
        return self._num_free + len(self._idle) - len(self._strays)

    @property
    def num_idle(self) -> int:
        return len(self._idle)

    @property
    def num_held(self) -> int:
        return self.limit - self.num_available

    def references(self, block: int) -> int:
        return self._references[block]

    def is_held(self, block: int) -> bool:
        return self._references[block] > 0

    def allocate(self, num: int, after: int | None = None) -> list[int]:
        """Returns `num` blocks with one reference each, evicting idle ones if needed.

        `num` must be at most `num_available`. Prefers the run right after block `after`, then the
        middle of one of the longest runs. Attention reads contiguous blocks as a view instead of
        gathering them, and this way both neighbours have room to grow, also in a conversation's
        next turns.
        """
        self._evict(num)
        blocks = list(self._places(num, after))
        for block in blocks:
            self._references[block] = 1
            self._taken[block] = 1
        self._num_free -= num
        return blocks

    def share(self, block: int) -> None:
        """Adds a reference to a held or idle block."""
        if self._references[block] == 0:
            self._idle.remove(block)
        self._references[block] += 1

    def free(self, blocks: Sequence[int], *, soon: bool = False) -> None:
        """Releases one reference to each block.

        The last block becomes idle first, so that a prefix outlives its tails. `soon`: they are
        evicted before all that is idle now.
        """
        for block in blocks if soon else reversed(blocks):
            self._references[block] -= 1
            if self._references[block] == 0:
                self._release(block, soon=soon)

    def publish(self, block: int, key: Hashable) -> None:
        """Makes a held block's contents findable.

        An idle block under the same key is freed: the newer one is used later again. A held one
        stays, and the newer one remains private.
        """
        if self._keys[block] is not None:
            return
        older = self._by_key.get(key)
        if older is not None and self._references[older]:
            return
        if older is not None:
            self._idle.remove(older)
            self._keys[older] = None
            self._release(older)
        self._by_key[key] = block
        self._keys[block] = key

    def __contains__(self, key: Hashable) -> bool:
        """Returns whether a block's contents can be found under the key."""
        return key in self._by_key

    def block_of(self, key: Hashable) -> int | None:
        """Returns the block under the key. Takes no reference."""
        return self._by_key.get(key)

    def find(self, keys: Iterable[Hashable]) -> list[int]:
        """Returns the blocks under the keys, up to the first missing key. Takes no reference."""
        found = []
        for key in keys:
            block = self._by_key.get(key)
            if block is None:
                break
            found.append(block)
        return found

    def is_idle(self, key: Hashable) -> bool:
        """Returns whether the key's block is idle."""
        block = self._by_key.get(key)
        return block is not None and block in self._idle

    def touch(self, keys: Iterable[Hashable]) -> None:
        """Makes the idle ones of these blocks the last to be evicted, in this order; a chain as one."""
        for key in keys:
            block = self._by_key.get(key)
            if block is not None and block in self._idle:
                self._idle.touch(block)

    def supersede(self, key: Hashable) -> None:
        """Makes the key's block the next to be evicted, if it is idle."""
        block = self._by_key.get(key)
        if block is not None and block in self._idle:
            self._idle.remove(block)
            self._idle.add(block, first=True)

    def join(self, block: int, chain: int) -> None:
        """Makes an idle block the end of a chain, see `IdleBlocks`."""
        self._idle.join(block, chain)

    def chain_of(self, key: Hashable) -> int | None:
        """Returns the chain of the key's block, if it is idle and in one."""
        block = self._by_key.get(key)
        return None if block is None else self._idle.chain_of(block)

    def num_idle_of(self, chain: int) -> int:
        """Returns how many blocks of a chain are idle."""
        return self._idle.num_of(chain)

    @property
    def num_in_chains(self) -> int:
        """The number of idle blocks that are in chains."""
        return self._idle.num_in_chains

    def drop_oldest_end(self, excluding: int) -> bool:
        """Evicts the last block of the least recently used chain, besides one; returns whether there is another."""
        block = self._idle.end_of_oldest_chain(excluding)
        if block is not None:
            self._evict_one(block)
        return block is not None

    def set_limit(self, limit: int) -> None:
        """Changes the limit. A higher one takes effect at once, for a lower one see `gather`."""
        low, high = sorted((self.limit, limit))
        between = range(low, high)
        if limit > self.limit:
            for block in between:
                self._taken[block] = self._is_used(block)
            self._strays.difference_update(between)
            self._num_free += self._taken.count(0, low, high)
        else:
            self._num_free -= self._taken.count(0, low, high)
            self._strays.update(block for block in between if self._taken[block])
            self._taken[low:high] = b"\x01" * (high - low)
        self.limit = limit
        self.ceiling = max(self.ceiling, limit)

    def gather(self, max_moves: int) -> dict[int, int]:
        """Moves the last strays, at most so many; returns their old and new numbers.

        Idle blocks are evicted until the rest can stay. `num_available` must not be negative.
        """
        while self.num_available < len(self._idle):
            self._evict_one(self._idle.next_evicted())
        old = sorted(self._strays)[-max_moves:]
        moves = dict(zip(old, self._places(len(old)), strict=True)) if old else {}
        for block, place in moves.items():
            self._references[place], self._references[block] = self._references[block], 0
            self._taken[place] = 1
            self._keys[place], self._keys[block] = self._keys[block], None
            if (key := self._keys[place]) is not None:
                self._by_key[key] = place
        self._num_free -= len(moves)
        self._strays.difference_update(moves)
        self._idle.renumber(moves)
        self.ceiling = max(self._strays, default=self.limit - 1) + 1
        return moves

    def _is_used(self, block: int) -> bool:
        return self._references[block] > 0 or block in self._idle

    def _release(self, block: int, *, soon: bool = False) -> None:
        if self._keys[block] is not None:
            self._idle.add(block, first=soon)
        elif block < self.limit:
            self._taken[block] = 0
            self._num_free += 1
        else:
            self._strays.remove(block)

    def _evict(self, num: int) -> None:
        """Evicts idle blocks until so many are free."""
        while self._num_free < num:
            self._evict_one(self._idle.next_evicted())

    def _evict_one(self, block: int) -> None:
        self._idle.remove(block)
        self.num_evicted += 1
        key = self._keys[block]
        assert key is not None, "an idle block has a key"
        del self._by_key[key]
        self._keys[block] = None
        self._release(block)

    def _places(self, num: int, after: int | None = None) -> Sequence[int]:
        """Returns `num` free blocks, adjacent if possible."""
        start = self._find_run(num, after)
        return range(start, start + num) if start >= 0 else self._find_scattered(num)

    def _find_run(self, num: int, after: int | None) -> int:
        """Returns the first block of a free run, or -1."""
        if after is not None and self._taken.find(bytes(num), after + 1, after + 1 + num) >= 0:
            return after + 1
        start = self._taken.find(bytes(num))
        return self._middle_of_longest(start, num) if start > 0 else start

    def _middle_of_longest(self, start: int, num: int) -> int:
        """Returns where `num` blocks are in the middle of a run that is nearly the longest.

        `start` is a run of `num`.
        """
        fits, too_long = num, self._num_free + 1
        while too_long - fits > 1 + fits // 8:
            width = min(fits * 4, (fits + too_long) // 2)
            found = self._taken.find(bytes(width))
            if found >= 0:
                start, fits = found, width
            else:
                too_long = width
        return start + (fits - num) // 2

    def _find_scattered(self, num: int) -> list[int]:
        blocks: list[int] = []
        block = -1
        while len(blocks) < num:
            block = self._taken.find(0, block + 1)
            blocks.append(block)
        return blocks
