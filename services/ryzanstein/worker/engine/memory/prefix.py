"""Prefix reuse: which blocks already hold the keys and values of a sequence's first tokens.

A page's contents depend on its tokens and on all tokens before it, so its key is a hash over its
own tokens and the key of its parent (a Merkle chain, as in vLLM's automatic prefix caching). Keys
are 128-bit BLAKE2b: a client that could build two prompts with the same key would read another
client's cache. The chains of a cache scope begin with a key of their own, so requests of two scopes
share no page. Each group of layers has a block of its own for a page, found under (key, group).

A sequence resumes after page m - 1 if its next token finds all that it sees: every page in groups
that read all tokens, the last ones in groups with a window, and the hot pages of compressed blocks.
The pages before them need not exist, except those that last. Where layers keep a state, it resumes
where there is one as well (see `states`).
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass
from hashlib import blake2b
from itertools import chain, islice

from ryzanstein.worker.engine.extents import Extents, Lasting
from ryzanstein.worker.engine.memory.blocks import BlockPool
from ryzanstein.worker.engine.memory.states import StateSlots
from ryzanstein.worker.engine.sequence import BlockTable, Sequence

KEY_BYTES = 16
PageKey = tuple[bytes, int]
"""Under which a block is found: the key of its page, and the number of its group."""


@dataclass(frozen=True, slots=True)
class PageGroup:
    """Pages that are alike: those of a group of layers, or the hot pages, which have the last number."""

    number: int
    window: int | None
    pool: BlockPool
    lasting: Lasting | None = None


def scope_root(scope: str, adapter: bytes = b"") -> bytes:
    """Returns the key with which the chains of a cache scope begin: empty for the empty scope.

    `adapter` is the digest of the adapter with which keys and values are computed; empty: without one.
    """
    root = blake2b(scope.encode(), digest_size=KEY_BYTES, person=b"cache-scope").digest() if scope else b""
    return blake2b(adapter, digest_size=KEY_BYTES, key=root, person=b"adapter").digest() if adapter else root


def chain_key(parent: bytes, token_ids: SequenceOf[int]) -> bytes:
    """Returns the key of a page with these tokens after the page with key `parent`.

    `parent` is the root of the scope for the first page.
    """
    return blake2b(array("q", token_ids).tobytes(), digest_size=KEY_BYTES, key=parent).digest()


def chain_keys(token_ids: SequenceOf[int], block_size: int, root: bytes = b"") -> list[bytes]:
    """Returns the keys of the full blocks of a sequence whose scope has this root."""
    keys: list[bytes] = []
    for start in range(0, len(token_ids) - block_size + 1, block_size):
        keys.append(chain_key(keys[-1] if keys else root, token_ids[start : start + block_size]))
    return keys


@dataclass(frozen=True, slots=True)
class Match:
    """The longest prefix after which a sequence can resume: `num_pages`, and a table for each group.

    Hot pages have the last table. The groups that read all tokens know `num_known` pages, maybe more
    than can be resumed. Of so many more pages keys and values are there, but no state: `num_without_state`.
    """

    num_pages: int
    tables: list[BlockTable]
    num_known: int
    num_without_state: int = 0


class PrefixCache:
    """An index of the full pages of sequences."""

    def __init__(self, groups: SequenceOf[PageGroup], extents: Extents, states: StateSlots | None = None) -> None:
        self._groups, self._states = groups, states
        self._extents = extents
        self._whole = [group for group in groups if group.window is None]
        self._windowed: dict[int, list[PageGroup]] = {}
        for group in groups:
            if group.window is not None:
                self._windowed.setdefault(group.window, []).append(group)

    def match(self, sequence: Sequence) -> Match:
        """Returns the longest cached prefix. Takes no reference.

        The last token is never part of it: it must be computed to get its logits.
        """
        num_known = sequence.num_reusable // self._extents.block_size
        self._extend_keys(sequence, num_known)
        for group in self._whole:
            num_known = len(group.pool.find((key, group.number) for key in islice(sequence.keys, num_known)))
        num_found = self._resumable(sequence.keys, self._until_lost(sequence.keys, num_known))
        num_pages = num_found if self._states is None else self._with_state(sequence.keys, num_found, self._states)
        tables = [self._table(sequence.keys, num_pages, group) for group in self._groups]
        return Match(num_pages, tables, num_known, num_found - num_pages)

    def publish(self, sequence: Sequence) -> None:
        """Makes the pages that the last step filled findable."""
        num_full = sequence.num_computed // self._extents.block_size
        self._extend_keys(sequence, num_full)
        for group, table in zip(self._groups, sequence.tables, strict=True):
            for page in range(max(sequence.num_published, table.first), num_full):
                group.pool.publish(table.block(page), (sequence.keys[page], group.number))
        sequence.num_published = num_full

    def _table(self, keys: SequenceOf[bytes], num_pages: int, group: PageGroup) -> BlockTable:
        first = self._first_seen(group, num_pages)
        lasting = list(self._extents.lasting_pages(group.lasting, first))
        pages = chain(lasting, range(first, num_pages))
        return BlockTable(first, group.pool.find((keys[page], group.number) for page in pages), len(lasting))

    def _until_lost(self, keys: SequenceOf[bytes], num_pages: int) -> int:
        """Returns the most pages, at most so many, before which no lasting page is missing."""
        for group in self._groups:
            pages = self._extents.lasting_pages(group.lasting, num_pages)
            lost = (page for page in pages if (keys[page], group.number) not in group.pool)
            num_pages = next(lost, num_pages)
        return num_pages

    def _first_seen(self, group: PageGroup, num_pages: int) -> int:
        """Returns the first page that the token after so many pages sees."""
        return self._extents.first_seen(group.window, num_pages * self._extents.block_size)

    def _resumable(self, keys: SequenceOf[bytes], num_pages: int) -> int:
        """Returns the most pages, at most so many, of which each window group has all that is seen.

        One pass from the last page to the first: a missing page ends the prefix before it, and the
        pages behind it are no longer needed. It is taken again in each step while a prompt waits for
        blocks, so groups with the same window are looked at together.
        """
        first_seen, size = self._extents.first_seen, self._extents.block_size
        firsts = [first_seen(window, num_pages * size) for window in self._windowed]
        page = num_pages
        while (page := page - 1) >= min(firsts, default=num_pages):
            for groups, first in zip(self._windowed.values(), firsts, strict=True):
                if page >= first and not all((keys[page], group.number) in group.pool for group in groups):
                    num_pages = page
                    firsts = [first_seen(window, page * size) for window in self._windowed]
                    break
        return num_pages

    def _with_state(self, keys: SequenceOf[bytes], num_pages: int, states: StateSlots) -> int:
        """Returns the most pages, at most so many, after which all that is seen is there, and the state."""
        while (num_stateful := states.resumable(keys, num_pages)) < num_pages:
            num_pages = self._resumable(keys, self._until_lost(keys, num_stateful))
        return num_pages

    def _extend_keys(self, sequence: Sequence, num_full: int) -> None:
        keys = sequence.keys
        size = self._extents.block_size
        while len(keys) < num_full:
            start = len(keys) * size
            parent = keys[-1] if keys else sequence.group.message.cache_root
            keys.append(chain_key(parent, sequence.tokens(start, start + size)))
