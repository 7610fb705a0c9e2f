"""Pages of the prefix cache that leave the engine and come back: to other nodes, to memory, to disk.

What travels is a block: one page of one group of layers. Outside of the engine it has a *name*, the
key of its page and the number of its group. Blocks that arrive are idle: found by a match, evicted
like any other, and never more than a share of the pool. This module does not know what is in them.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Container, Iterable, Iterator, Sequence

from ryzanstein.worker.engine import sequence as running
from ryzanstein.worker.engine.blocks import BlockPool
from ryzanstein.worker.engine.extents import Extents
from ryzanstein.worker.engine.plan import Placed
from ryzanstein.worker.engine.prefix import KEY_BYTES, PageKey

NAME_BYTES = KEY_BYTES + 1
ARRIVED_SHARE = 0.95  # of the blocks that the engine may use, for those that arrived and were not used yet
# A group with a window sends its pages where a prompt may be resumed: at its end, and at every so
# many pages before. Between them only those that read all tokens are sent.
RESUME_PAGES = 256


def name_of(key: bytes, group: int) -> bytes:
    """Returns the name of a block."""
    return key + bytes([group])


def names_of(keys: Sequence[bytes], first: int, extents: Extents, num_prompt: int) -> Iterator[bytes]:
    """Yields what is to be sent of the pages from number `first` on, in the order of the chain.

    `num_prompt` tokens are the prompt's.
    """
    end = num_prompt // extents.block_size
    for page in range(first, len(keys)):
        for group, (window, lasting) in enumerate(extents.groups):
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


class TravelingPages:
    """The blocks of a pool by their names."""

    def __init__(self, pool: BlockPool) -> None:
        self._pool = pool
        # What is before each block that arrived and was not used yet, the oldest first.
        self._arrived: OrderedDict[bytes, bytes] = OrderedDict()

    def missing(self, names: Sequence[bytes]) -> list[int]:
        """Returns the places in `names` of blocks that are not cached, and keeps the others longest."""
        missing = [place for place, name in enumerate(names) if _key(name) not in self._pool]
        self._touch(reversed(names))
        return missing

    def find(self, names: Sequence[bytes]) -> list[Placed]:
        """Returns the cached ones of `names`, with their places in it."""
        blocks = ((place, self._pool.block_of(_key(name))) for place, name in enumerate(names))
        return [(place, block) for place, block in blocks if block is not None]

    def admit(self, names: Sequence[bytes], parent: bytes) -> list[Placed]:
        """Returns a block for each of `names` that is to be filled, with its place in `names`.

        The names are a piece of one chain, which continues `parent`. Each block can be found from
        now on: the ranks must fill it before their next step. What is cached already, and that for
        which there is no room, gets none.
        """
        before = list(self._ancestors(parent))
        self._touch([*before, *names])
        chosen = self._choose(names, parent, before)
        admitted: list[Placed] = []
        for group in sorted({name[-1] for _, name in chosen}):
            members = [(place, name) for place, name in chosen if name[-1] == group]
            # Next to what is before them: adjacent blocks are read as one view.
            last = next((name for name in before if name and name[-1] == group), b"")
            blocks = self._pool.allocate(len(members), self._pool.block_of(_key(last)))
            for (place, name), block in zip(members, blocks, strict=True):
                self._pool.publish(block, _key(name))
                admitted.append((place, block))
            self._pool.free(blocks)
        self._touch(self._ancestors(names[-1] if names else parent))
        return sorted(admitted)

    def _choose(self, names: Sequence[bytes], parent: bytes, before: Sequence[bytes]) -> list[tuple[int, bytes]]:
        """Returns those of `names` for which there is to be a block, with their places."""
        known = {*before, *names}
        room = self._pool.num_available - sum(self._pool.is_idle(_key(name)) for name in known)
        chosen: dict[bytes, int] = {}
        for place, name in enumerate(names):
            if _key(name) not in self._pool and name not in chosen:
                if len(chosen) >= room or not self._make_way(known):
                    break
                self._arrived[name] = parent
                self._arrived.move_to_end(name)
                chosen[name] = place
            parent = name
        return [(place, name) for name, place in chosen.items()]

    def _make_way(self, chain: Container[bytes]) -> bool:
        """Returns whether another block may arrive.

        If there are too many, the oldest of another chain is evicted: the end of a chain is useless
        without its beginning. Those that were used or evicted meanwhile are forgotten when they are
        the oldest: looking for them would take a time that grows with the pool.
        """
        most = int(self._pool.limit * ARRIVED_SHARE)
        for _ in range(len(self._arrived)):
            if len(self._arrived) < most:
                break
            oldest = next(iter(self._arrived))
            if oldest in chain:
                self._arrived.move_to_end(oldest)
            else:
                del self._arrived[oldest]
                self._pool.drop(_key(oldest))
        return len(self._arrived) < most

    def _touch(self, names: Iterable[bytes]) -> None:
        self._pool.touch(_key(name) for name in names)

    def _ancestors(self, name: bytes) -> Iterable[bytes]:
        """Yields the name and those that arrived before it in its chain, the last one first.

        In this order they are touched, so that the beginning of a chain outlives its end.
        """
        for _ in range(len(self._arrived) + 1):
            yield name
            if (parent := self._arrived.get(name)) is None:
                return
            name = parent


def _key(name: bytes) -> PageKey:
    return name[:-1], (name or b"\0")[-1]
