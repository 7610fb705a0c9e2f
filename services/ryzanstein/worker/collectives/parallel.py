"""How one model is divided over the ranks of a node.

It is a value that is passed, never a global: two ranks fit in one process.
"""

from __future__ import annotations

from dataclasses import dataclass

from ryzanstein.worker.collectives import Collectives
from ryzanstein.worker.refusal import UnevenSplit


@dataclass(frozen=True, slots=True)
class HeadShare:
    """The attention heads of one rank.

    Its query heads start at `first_head`, its key-value heads at `first_kv_head`.
    """

    num_heads: int
    num_kv_heads: int
    first_head: int
    first_kv_head: int


@dataclass(frozen=True, slots=True)
class TensorParallel:
    """A rank's place among the `size` ranks that share one model."""

    rank: int
    size: int
    collectives: Collectives

    def split(self, total: int, what: str) -> int:
        """Returns an equal share of `total`. Raises UnevenSplit with both numbers."""
        share, rest = divmod(total, self.size)
        if rest:
            raise UnevenSplit(f"{total} {what} do not divide over {self.size} ranks: tp must be a divisor of {total}")
        return share

    def heads(self, num_heads: int, num_kv_heads: int) -> HeadShare:
        """Returns contiguous query heads and the key-value heads that they read.

        With fewer key-value heads than ranks, several ranks hold each head (Pope et al. 2022,
        multi-query attention).
        """
        share = self.split(num_heads, "attention heads")
        if self.size > num_kv_heads and self.size % num_kv_heads == 0:
            copies = self.size // num_kv_heads
            return HeadShare(share, 1, self.rank * share, self.rank // copies)
        kv_share = self.split(num_kv_heads, "key-value heads")
        return HeadShare(share, kv_share, self.rank * share, self.rank * kv_share)
