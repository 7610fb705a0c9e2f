"""How far back each group of layers reads, and how many blocks a sequence therefore holds.

A model's layers are divided into groups of equal numbers of layers. The layers of a group have the
same extent: all tokens of a sequence, or a window of the last ones. A block holds one page (so many
tokens) of the layers of one group. So every block has the same size, and one pool serves all
groups, all models and their limits. A sequence has a block table for each group; in a window group
it holds only the pages that can still be read. This is the design of vLLM's hybrid KV cache manager
and of Jenga (Zhang et al., "Effective Memory Management for Serving LLM with Heterogeneity", 2025).

A group with a window may keep some pages that have left it: *lasting* pages, the first ones, or
every so many. A sequence's table begins with the lasting pages that have left the window.

Where blocks are compressed, the newest tokens are in full precision besides, in *hot pages* that
span all layers and come from a pool of their own. A token at position p reads page j hot unless
p - (j B + B - 1) >= H, with B tokens in a page and H hot tokens: hot pages have a window of H.

The settings of the engine, which bound all of it, are here too.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import chain
from typing import NamedTuple

from ryzanstein.generation.request import MAX_CHOICES
from ryzanstein.worker.settings.rank_settings import QueueSettings

Windows = tuple[int | None, ...]
"""The extent of each group: the tokens that a token sees, itself included; None for all."""


class Lasting(NamedTuple):
    """Pages that stay when they leave a window: of the first `sinks` tokens, and of every `stride` pages the first.

    A stride of 0 keeps none.
    """

    sinks: int
    stride: int


AllLasting = tuple[Lasting | None, ...]
"""The lasting pages of each group; empty: there are none."""

# Pages before the last full one from which a sequence can be resumed, too. The next turn of a
# conversation may write the last tokens of an answer differently.
SLACK = 1
SLOTS_OF_SEQUENCE = 3
"""Slots for states that a sequence needs: one that a step reads, one that it writes, and one for what others come back to."""
_MOST_PAGES = 1 << 40


@dataclass(frozen=True, slots=True)
class Extents:
    """The extents of a model's groups. A step feeds at most `token_budget` tokens of a sequence.

    `hot_tokens` is None if blocks are not compressed. `lasting` is parallel to `windows`, or empty.
    """

    windows: Windows = (None,)
    block_size: int = 16
    token_budget: int = 512
    hot_tokens: int | None = None
    lasting: AllLasting = ()

    @property
    def groups(self) -> list[tuple[int | None, Lasting | None]]:
        """The window and the lasting pages of each group."""
        return list(zip(self.windows, self.lasting or (None,) * len(self.windows), strict=True))

    @property
    def hot_window(self) -> int:
        """The window of hot pages. A new token is written to one, even if it is to be read cold."""
        return max(1, self.hot_tokens or 0)

    @property
    def traveling(self) -> list[tuple[int | None, Lasting | None]]:
        """The window and the lasting pages of all that can leave the ranks: the groups, then hot pages, if there are any."""
        return self.groups if self.hot_tokens is None else [*self.groups, (self.hot_window, None)]

    def pages(self, num_tokens: int) -> int:
        """Returns the number of pages of so many tokens."""
        return -(-num_tokens // self.block_size)

    def first_seen(self, window: int | None, position: int) -> int:
        """Returns the first page that a token at this position sees."""
        return 0 if window is None else max(0, position - window + 1) // self.block_size

    def first_kept(self, window: int | None, num_computed: int) -> int:
        """Returns the first page that a sequence keeps with so many tokens computed.

        It could be resumed at its last full page, or `SLACK` pages earlier.
        """
        return self.first_seen(window, (num_computed // self.block_size - SLACK) * self.block_size)

    def lasts(self, lasting: Lasting | None, page: int) -> bool:
        """Returns whether a page stays when it leaves the window."""
        if lasting is None:
            return False
        return page < self.pages(lasting.sinks) or (lasting.stride > 0 and page % lasting.stride == 0)

    def num_lasting(self, lasting: Lasting | None, page: int) -> int:
        """Returns how many lasting pages there are before a page."""
        if lasting is None:
            return 0
        sinks = min(page, self.pages(lasting.sinks))
        return sinks + (-(-page // lasting.stride) - -(-sinks // lasting.stride) if lasting.stride else 0)

    def lasting_pages(self, lasting: Lasting | None, page: int) -> Iterator[int]:
        """Yields the lasting pages before a page."""
        if lasting is None:
            return iter(())
        sinks, stride = min(page, self.pages(lasting.sinks)), lasting.stride
        return chain(range(sinks), range(-(-sinks // stride) * stride, page, stride) if stride else ())

    def most(self, window: int | None) -> int:
        """Returns the most pages that a sequence holds in a group, beside lasting ones: with them a step is never cut."""
        if window is None:
            return sys.maxsize
        return SLACK + self.pages(window - 1) + self.pages(self.block_size - 1 + self.token_budget)

    def blocks_for(self, num_tokens: int) -> int:
        """Returns the most blocks that a sequence holds until it has so many tokens."""
        num_pages = self.pages(num_tokens)
        return sum(min(num_pages, self.most(window) + self.num_lasting(lasting, num_pages)) for window, lasting in self.groups)

    def tokens_in(self, num_blocks: int) -> int:
        """Returns the tokens of the longest sequence that so many blocks hold."""
        fits, too_many = 0, _MOST_PAGES
        if self.blocks_for(too_many * self.block_size) <= num_blocks:
            return sys.maxsize
        while too_many - fits > 1:
            pages = (fits + too_many) // 2
            fits, too_many = (pages, too_many) if self.blocks_for(pages * self.block_size) <= num_blocks else (fits, pages)
        return fits * self.block_size

    def hot_pages_for(self, num_sequences: int) -> int:
        """Returns the hot pages with which so many running sequences never lack one in a step.

        Each holds those that it reads or could resume with, and extends them by its new tokens.
        """
        return num_sequences * (SLACK + self.pages(self.hot_window - 1) + 2) + self.pages(self.token_budget)


@dataclass(frozen=True, slots=True)
class EngineSettings:
    """The settings of one engine. `windows` and `lasting`: see `Extents`."""

    num_blocks: int
    """A sequence may be as long as they hold."""
    block_size: int = 16
    max_sequences: int = 64
    """Sequences in a step."""
    token_budget: int = 512
    """Tokens of a step."""
    queue: QueueSettings = field(default_factory=QueueSettings)
    max_idle_tenants: int = 4096
    """Counters of idle tenants that are kept."""
    borrowable_blocks: int = 0
    """Blocks that the engine may use beside its own while its limit allows it."""
    windows: Windows = (None,)
    hot_tokens: int = 0
    """Tokens that a token sees in full precision, if blocks are compressed."""
    hot_pages: int = 0
    """Blocks are compressed if there are any."""
    lasting: AllLasting = ()
    num_states: int = 0
    """Slots for states, if there are layers that keep one: three for each sequence of a step."""

    def __post_init__(self) -> None:
        """Raises ValueError for sizes with which a sequence could starve."""
        if min(self.num_blocks, self.block_size, self.max_sequences) < 1:
            raise ValueError(f"num_blocks, block_size and max_sequences must be at least 1: {self}")
        if self.num_blocks < len(self.windows):
            raise ValueError(f"num_blocks {self.num_blocks} must be at least {len(self.windows)}: one for each group of layers")
        if 0 < self.hot_pages < (least := self.extents.hot_pages_for(self.max_sequences)):
            raise ValueError(f"hot_pages {self.hot_pages} must be at least {least}: running sequences must never lack one")
        if 0 < self.num_states < (least := SLOTS_OF_SEQUENCE * self.max_sequences):
            raise ValueError(f"num_states {self.num_states} must be at least {least}: running sequences must never lack one")
        if self.borrowable_blocks < 0:
            raise ValueError(f"borrowable_blocks must be at least 0: {self.borrowable_blocks}")
        if self.token_budget < self.max_sequences:
            raise ValueError(
                f"token_budget {self.token_budget} must be at least max_sequences {self.max_sequences}: "
                "every running sequence decodes in every step"
            )
        if self.queue.max_waiting < MAX_CHOICES:
            raise ValueError(f"max_waiting {self.queue.max_waiting} must be at least {MAX_CHOICES}, the choices of one request")

    @property
    def extents(self) -> Extents:
        """How many blocks sequences hold."""
        hot_tokens = self.hot_tokens if self.hot_pages else None
        return Extents(self.windows, self.block_size, self.token_budget, hot_tokens, self.lasting)
