"""How one model is divided over the ranks of a node.

It is a value that is passed, never a global: two ranks fit in one process.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from ryzanstein.worker.collectives import Collectives
from ryzanstein.worker.refusal import UnevenSplit

_BLOCK = 32
"""The columns of the smallest block of quantized weights."""
_ENOUGH = 8


@dataclass(frozen=True, slots=True)
class HeadShare:
    """The attention heads of one rank.

    Its query heads start at `first_head`, its key-value heads at `first_kv_head`. `owns`: it is the
    first rank that holds these key-value heads. Each of them has equally many of the query heads.
    """

    num_heads: int
    num_kv_heads: int
    first_head: int
    first_kv_head: int
    owns: bool = True


@dataclass(frozen=True, slots=True)
class TensorParallel:
    """A rank's place among the `size` ranks that share one model."""

    rank: int
    size: int
    collectives: Collectives

    @property
    def widest(self) -> TensorParallel:
        """The place of the first rank, which has the most heads."""
        return replace(self, rank=0)

    def columns(self, total: int) -> tuple[int, int]:
        """Returns the first of this rank's columns of an MLP, and their number: equal ones if they divide.

        If they do not, they are whole blocks of 32, if each rank gets eight of them, and the last ranks
        have more, because the first ones may have more heads. Raises UnevenSplit if there is no column
        for each rank. Columns that divide stay equal although they may be no whole blocks: the order of
        sums, and so the bits, are those of nodes of earlier releases.
        """
        in_blocks = total % self.size and total % _BLOCK == 0 and total >= _ENOUGH * _BLOCK * self.size
        unit = _BLOCK if in_blocks else 1
        if total < self.size:
            raise UnevenSplit(f"{total} MLP columns for {self.size} ranks: each needs one")
        first, count = _dealt(total // unit, self.size, self.size - 1 - self.rank)
        return total - (first + count) * unit, count * unit

    def heads(self, num_heads: int, num_kv_heads: int, *, apart: str = "") -> HeadShare:
        """Returns contiguous query heads and the key-value heads that they read.

        Key-value heads are dealt whole, with all of their query heads. With fewer of them than ranks,
        the ranks are dealt to them: several ranks hold a head (Pope et al. 2022, multi-query
        attention), and divide its query heads. Raises UnevenSplit with more ranks than query heads, and
        where key-value heads must be `apart`, which says why, with more ranks than those.
        """
        group = num_heads // num_kv_heads
        if self.size <= num_kv_heads:
            first, count = _dealt(num_kv_heads, self.size, self.rank)
            return HeadShare(count * group, count, first * group, first)
        if apart:
            what = f"{num_kv_heads} key-value heads for {self.size} ranks"
            raise UnevenSplit(f"{what}: {apart} each needs one of its own; tp must be at most {num_kv_heads}")
        if -(-self.size // num_kv_heads) > group:
            what = f"{num_heads} attention heads of {num_kv_heads} key-value heads"
            raise UnevenSplit(f"{what} for {self.size} ranks: each needs an attention head; tp must be at most {num_heads}")
        head = next(head for head in range(num_kv_heads) if self.rank < sum(_dealt(self.size, num_kv_heads, head)))
        first_rank, num_ranks = _dealt(self.size, num_kv_heads, head)
        first, count = _dealt(group, num_ranks, self.rank - first_rank)
        return HeadShare(count, 1, head * group + first, head, self.rank == first_rank)


def _dealt(total: int, parts: int, index: int) -> tuple[int, int]:
    """Returns where a part begins, and its size. The first parts have one more if the total does not divide."""
    share, rest = divmod(total, parts)
    return index * share + min(index, rest), share + (index < rest)
