"""How one model is divided over the ranks of a node. A value that is passed, never a global: two ranks fit in one process."""

from __future__ import annotations

from dataclasses import dataclass

from ryzanstein.worker.model.collectives import Collectives
from ryzanstein.worker.model.refusal import UnevenSplit


@dataclass(frozen=True, slots=True)
class HeadShare:
    """The attention heads of one rank: heads `first_head ...` of the query, `first_kv_head ...` of keys and values."""

    num_heads: int
    num_kv_heads: int
    first_head: int
    first_kv_head: int


@dataclass(frozen=True, slots=True)
class TensorParallel:
    """This rank's place among `size` ranks that hold one model together."""

    rank: int
    size: int
    collectives: Collectives

    def split(self, total: int, what: str) -> int:
        """An equal share of `total`. Raises UnevenSplit with both numbers."""
        share, rest = divmod(total, self.size)
        if rest:
            raise UnevenSplit(f"{total} {what} do not divide over {self.size} ranks")
        return share

    def heads(self, num_heads: int, num_kv_heads: int) -> HeadShare:
        """Contiguous query heads with the key-value heads that they read.

        With fewer key-value heads than ranks each head is held by several ranks (Pope et al. 2022, multi-query attention).
        """
        share = self.split(num_heads, "attention heads")
        if self.size > num_kv_heads and self.size % num_kv_heads == 0:
            copies = self.size // num_kv_heads
            return HeadShare(share, 1, self.rank * share, self.rank // copies)
        kv_share = self.split(num_kv_heads, "key-value heads")
        return HeadShare(share, kv_share, self.rank * share, self.rank * kv_share)
