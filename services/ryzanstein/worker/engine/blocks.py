"""The pool of KV-cache blocks: which are held, which hold cached prefixes, which are free.

The scheduler allocates and frees here; the ranks see only block numbers. The pool knows nothing of
tokens, sequences or tensors.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Sequence


class BlockPool:
    """A pool of reference-counted blocks.

    A block is *free*, *held* (referenced) or *idle*: unreferenced, but its contents can still be
    found under a key. Idle blocks count as available; the least recently used is evicted first.

    Every `allocate` and `share` is paired with one `free`.
    """

    def __init__(self, num_blocks: int) -> None:
        self.num_blocks = num_blocks
        self._references = [0] * num_blocks
        self._keys: list[bytes | None] = [None] * num_blocks
        self._by_key: dict[bytes, int] = {}
        self._idle: OrderedDict[int, None] = OrderedDict()
        # One byte per block, 0 is free: bytearray.find finds a run of free blocks at the speed of
        # memory.
        self._taken = bytearray(num_blocks)
        self._num_free = num_blocks

    @property
    def num_available(self) -> int:
        """Returns the number of blocks that `allocate` can give: free and idle ones."""
        return self._num_free + len(self._idle)

    @property
    def num_idle(self) -> int:
        return len(self._idle)

    @property
    def num_held(self) -> int:
        return self.num_blocks - self._num_free - len(self._idle)

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
        self._evict(num - self._num_free)
        start = self._find_run(num, after)
        blocks = list(range(start, start + num)) if start >= 0 else self._find_scattered(num)
        for block in blocks:
            self._references[block] = 1
            self._taken[block] = 1
        self._num_free -= num
        return blocks

    def share(self, block: int) -> None:
        """Adds a reference to a held or idle block."""
        if self._references[block] == 0:
            del self._idle[block]
        self._references[block] += 1

    def free(self, blocks: Sequence[int]) -> None:
        """Releases one reference to each block.

        The last block becomes idle first, so that a prefix outlives its tails.
        """
        for block in reversed(blocks):
            self._references[block] -= 1
            if self._references[block] == 0:
                self._release(block)

    def publish(self, block: int, key: bytes) -> None:
        """Makes a held block's contents findable.

        The first block under a key stays; a later one with the same key remains private.
        """
        if key not in self._by_key and self._keys[block] is None:
            self._by_key[key] = block
            self._keys[block] = key

    def find(self, keys: Iterable[bytes]) -> list[int]:
        """Returns the blocks under the keys, up to the first missing key. Takes no reference."""
        found = []
        for key in keys:
            block = self._by_key.get(key)
            if block is None:
                break
            found.append(block)
        return found

    def _release(self, block: int) -> None:
        if self._keys[block] is not None:
            self._idle[block] = None
        else:
            self._taken[block] = 0
            self._num_free += 1

    def _evict(self, num: int) -> None:
        for _ in range(num):
            block, _none = self._idle.popitem(last=False)
            key = self._keys[block]
            assert key is not None, "an idle block has a key"
            del self._by_key[key]
            self._keys[block] = None
            self._release(block)

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
