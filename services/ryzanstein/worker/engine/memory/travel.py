"""Pages of the prefix cache that leave the engine and come back: to other nodes, to memory, to disk.

What travels is a block: one page of one group of layers, or a hot page. Outside of the engine it has
a *name*, the key of its page and the number of its group. Blocks that arrive are idle: found by a
match, evicted like any other, and never more than a share of the pool. Those of one conversation
are a chain, see `idle_blocks`. This module does not know what is in them.
"""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from ryzanstein.worker.engine import sequence as running
from ryzanstein.worker.engine.extents import Extents
from ryzanstein.worker.engine.memory.blocks import BlockPool
from ryzanstein.worker.engine.memory.prefix import KEY_BYTES, PageKey
from ryzanstein.worker.engine.plan import Placed

NAME_BYTES = KEY_BYTES + 1
ARRIVED_SHARE = 0.95  # of the blocks that the engine may use, for those that arrived and were not used yet
# A group with a window sends its pages where a prompt may be resumed: at its end, and at every so
# many pages before. Between them only those that read all tokens are sent.
RESUME_PAGES = 256
_MAX_HOT_ENDS = 1024  # chains whose hot pages are remembered


def name_of(key: bytes, group: int) -> bytes:
    """Returns the name of a block."""
    return key + bytes([group])


def names_of(keys: Sequence[bytes], first: int, extents: Extents, num_prompt: int) -> Iterator[bytes]:
    """Yields what is to be sent of the pages from number `first` on, in the order of the chain.

    `num_prompt` tokens are the prompt's.
    """
    end = num_prompt // extents.block_size
    for page in range(first, len(keys)):
        for group, (window, lasting) in enumerate(extents.traveling):
            if window is None or extents.lasts(lasting, page) or _is_resumed_with(page, window, extents, end):
                yield name_of(keys[page], group)


def _is_resumed_with(page: int, window: int, extents: Extents, end: int) -> bool:
    """Returns whether a sequence needs the page to be resumed where it may be, or later than the prompt's end."""
    later = page // RESUME_PAGES * RESUME_PAGES + RESUME_PAGES
    return page >= extents.first_kept(window, min(end, later) * extents.block_size)


def take_sealed(sequence: running.Sequence, extents: Extents) -> list[bytes]:
    """Returns the names of a sequence's full pages that were not reported yet."""
    first = sequence.num_reported
    if sequence.num_published <= first:
        return []
    sequence.num_reported = sequence.num_published
    return list(names_of(sequence.keys[: sequence.num_published], first, extents, sequence.num_at_start))


@dataclass(frozen=True, slots=True)
class FoundPages:
    """Pages with their places in a request: blocks, and hot pages."""

    blocks: list[Placed]
    hot: list[Placed]

    @property
    def places(self) -> list[int]:
        """All places, in order."""
        return sorted(place for place, _ in (*self.blocks, *self.hot))


class TravelingPages:
    """The pages of an engine by their names: those of its groups of layers, and hot ones if there are any."""

    def __init__(self, pool: BlockPool, num_groups: int = 1, hot: BlockPool | None = None, hot_kept: int = 0) -> None:
        """`hot_kept` is how many hot pages at the end of a chain are of use."""
        self._pool, self._hot, self._num_groups, self._hot_kept = pool, hot, num_groups, hot_kept
        self._pools = dict.fromkeys(range(num_groups), pool) | ({} if hot is None else {num_groups: hot})
        self._num_chains = 0
        # The hot pages that arrived of each of the last chains, the last ones of each.
        self._hot_ends: OrderedDict[int, deque[PageKey]] = OrderedDict()

    def missing(self, names: Sequence[bytes]) -> list[int]:
        """Returns the places in `names` of pages that are not cached, and keeps the others longest."""
        missing = []
        for place, name in enumerate(names):
            pool = self._pool_of(name)
            if pool is None or _key(name) not in pool:
                missing.append(place)
        self._touch(names)
        return missing

    def find(self, names: Sequence[bytes]) -> FoundPages:
        """Returns the cached ones of `names`."""
        found = FoundPages([], [])
        for place, name in enumerate(names):
            pool = self._pool_of(name)
            block = None if pool is None else pool.block_of(_key(name))
            if block is not None:
                (found.blocks if pool is self._pool else found.hot).append((place, block))
        return found

    def admit(self, names: Sequence[bytes], parent: bytes) -> FoundPages:
        """Returns a block for each of `names` that is to be filled.

        The names are a piece of one chain, which continues `parent`. Each block can be found from
        now on: the ranks must fill it before their next step. What is cached already, and that for
        which there is no room, gets none.
        """
        chain = self._chain_after(parent)
        self._touch(names, parent)
        admitted = FoundPages([], [])
        for group, members in self._choose(names, parent, chain).items():
            pool, keys = self._pools[group], [_key(name) for _, name in members]
            # Next to what is before them: adjacent blocks are read as one view.
            blocks = pool.allocate(len(keys), pool.block_of((parent[:-1], group)))
            for key, block in zip(keys, blocks, strict=True):
                pool.publish(block, key)
            pool.free(blocks)
            kind = admitted.blocks if pool is self._pool else admitted.hot
            kind += [(place, block) for (place, _), block in zip(members, blocks, strict=True)]
        admitted.blocks.sort()
        for _, block in admitted.blocks:
            self._pool.join(block, chain)
        self._touch(names, parent)
        self._supersede(chain, [_key(names[place]) for place, _ in sorted(admitted.hot)])
        return admitted

    def _choose(self, names: Sequence[bytes], parent: bytes, chain: int) -> dict[int, list[tuple[int, bytes]]]:
        """Returns those of `names` for which there is to be a block, with their places, by group."""
        room = {id(pool): pool.num_available - pool.num_idle_of(chain) for pool in self._pools.values()}
        for name in {*names, parent}:
            if (pool := self._pool_of(name)) is not None and pool.is_idle(_key(name)) and not pool.chain_of(_key(name)):
                room[id(pool)] -= 1
        chosen: dict[int, list[tuple[int, bytes]]] = {}
        known, num = set[bytes](), 0
        for place, name in enumerate(names):
            pool = self._pool_of(name)
            if pool is None or name in known or _key(name) in pool:
                continue
            if room[id(pool)] <= 0 or (pool is self._pool and not self._make_way(chain, num)):
                if pool is self._pool:
                    break  # what follows is of no use
                continue
            known.add(name)
            room[id(pool)] -= 1
            num += pool is self._pool
            chosen.setdefault(name[-1], []).append((place, name))
        return chosen

    def _make_way(self, chain: int, num_chosen: int) -> bool:
        """Returns whether another block may arrive, beside those that were chosen.

        If there are too many, the end of another chain is evicted: it is useless without its beginning.
        """
        most = int(self._pool.limit * ARRIVED_SHARE)
        while self._pool.num_in_chains + num_chosen >= most:
            if not self._pool.drop_oldest_end(excluding=chain):
                return False
        return True

    def _chain_after(self, parent: bytes) -> int:
        """Returns the chain of which the parent's page is a part, or a new one."""
        for group in range(self._num_groups if parent else 0):
            if (chain := self._pool.chain_of((parent[:-1], group))) is not None:
                return chain
        self._num_chains += 1
        return self._num_chains

    def _supersede(self, chain: int, keys: Sequence[PageKey]) -> None:
        """Makes hot pages of a chain the next to be evicted, if newer ones have superseded them: `keys` have arrived."""
        if self._hot is None or not keys:
            return
        ends = self._hot_ends.setdefault(chain, deque())
        self._hot_ends.move_to_end(chain)
        ends.extend(keys)
        while len(ends) > self._hot_kept:
            self._hot.supersede(ends.popleft())
        if len(self._hot_ends) > _MAX_HOT_ENDS:
            self._hot_ends.popitem(last=False)

    def _touch(self, names: Sequence[bytes], parent: bytes = b"") -> None:
        """Keeps pages longest: of the blocks the first ones, of the hot pages the last ones."""
        hot = self._num_groups
        self._pool.touch(_key(name) for name in (*reversed(names), parent) if name and name[-1] != hot)
        if self._hot is not None:
            self._hot.touch(_key(name) for name in names if name and name[-1] == hot)

    def _pool_of(self, name: bytes) -> BlockPool | None:
        """Returns the pool of a name; None for a group that there is not."""
        return self._pools.get(name[-1]) if name else None


def _key(name: bytes) -> PageKey:
    return name[:-1], name[-1]
