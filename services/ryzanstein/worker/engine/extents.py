"""How far back each group of layers reads, and how many blocks a sequence therefore holds.

A model's layers are divided into groups of equal numbers of layers. The layers of a group have the
same extent: all tokens of a sequence, or a window of the last ones. A block holds one page (so many
tokens) of the layers of one group. So every block has the same size, and one pool serves all
groups, all models and their limits. A sequence has a block table for each group; in a window group
it holds only the pages that can still be read. This is the design of vLLM's hybrid KV cache manager
and of Jenga (Zhang et al., "Effective Memory Management for Serving LLM with Heterogeneity", 2025).

Where blocks are compressed, the newest tokens are in full precision besides, in *hot pages* that
span all layers and come from a pool of their own. A token at position p reads page j hot unless
p - (j B + B - 1) >= H, with B tokens in a page and H hot tokens: hot pages have a window of H.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass

Windows = tuple[int | None, ...]
"""The extent of each group: the tokens that a token sees, itself included; None for all."""

# Pages before the last full one from which a sequence can be resumed, too. The next turn of a
# conversation may write the last tokens of an answer differently.
SLACK = 1


@dataclass(frozen=True, slots=True)
class Extents:
    """The extents of a model's groups. A step feeds at most `token_budget` tokens of a sequence.

    `hot_tokens` is None if blocks are not compressed.
    """

    windows: Windows = (None,)
    block_size: int = 16
    token_budget: int = 512
    hot_tokens: int | None = None

    @property
    def hot_window(self) -> int:
        """The window of hot pages. A new token is written to one, even if it is to be read cold."""
        return max(1, self.hot_tokens or 0)

    @property
    def traveling(self) -> Windows:
        """The extents of all pages that can leave the ranks: of the groups, then of hot pages, if there are any."""
        return self.windows if self.hot_tokens is None else (*self.windows, self.hot_window)

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

    def most(self, window: int | None) -> int:
        """Returns the most pages that a sequence holds in a group: with them a step is never cut."""
        if window is None:
            return sys.maxsize
        return SLACK + self.pages(window - 1) + self.pages(self.block_size - 1 + self.token_budget)

    def blocks_for(self, num_tokens: int) -> int:
        """Returns the most blocks that a sequence holds until it has so many tokens."""
        num_pages = self.pages(num_tokens)
        return sum(min(num_pages, self.most(window)) for window in self.windows)

    def tokens_in(self, num_blocks: int) -> int:
        """Returns the tokens of the longest sequence that so many blocks hold."""
        growing = len(self.windows)
        for most in sorted(map(self.most, self.windows)):
            if most * growing > num_blocks:
                return num_blocks // growing * self.block_size
            num_blocks -= most
            growing -= 1
        return sys.maxsize

    def hot_pages_for(self, num_sequences: int) -> int:
        """Returns the hot pages with which so many running sequences never lack one in a step.

        Each holds those that it reads or could resume with, and extends them by its new tokens.
        """
        return num_sequences * (SLACK + self.pages(self.hot_window - 1) + 2) + self.pages(self.token_budget)
