"""The size of states, from the description of a decoder. It imports no torch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Self

from ryzanstein.worker.architectures.spec import DecoderSpec, DeltaSpec
from ryzanstein.worker.collectives.parallel import TensorParallel

ITEM_BYTES = 4


@dataclass(frozen=True, slots=True)
class DeltaShare:
    """The heads of one rank: key heads from `first_key_head` on, and the value heads that they serve."""

    delta: DeltaSpec
    first_key_head: int
    num_key_heads: int
    num_value_heads: int

    @classmethod
    def of(cls, delta: DeltaSpec, tp: TensorParallel) -> Self:
        """Deals whole key heads with their value heads. Raises UnevenSplit with more ranks than key heads."""
        share = tp.heads(delta.num_value_heads, delta.num_key_heads, apart="for a delta rule")
        return cls(delta, share.first_kv_head, share.num_kv_heads, share.num_heads)

    @property
    def value_heads(self) -> tuple[tuple[int, int], ...]:
        """Its value heads among those of all, as pieces (first, count)."""
        delta, first = self.delta, self.first_key_head
        group = delta.num_value_heads // delta.num_key_heads
        if not delta.tiled or self.num_key_heads == delta.num_key_heads:
            return ((first * group, self.num_value_heads),)
        return tuple((part * delta.num_key_heads + first, self.num_key_heads) for part in range(group))

    def value_rows(self, before: int = 0) -> tuple[tuple[int, int], ...]:
        """Its rows, as pieces, where each value head has `value_dim` of them, behind `before` others."""
        dim = self.delta.value_dim
        return tuple((before + first * dim, count * dim) for first, count in self.value_heads)

    @property
    def num_channels(self) -> int:
        return 2 * self.num_key_heads * self.delta.key_dim + self.num_value_heads * self.delta.value_dim

    @property
    def num_numbers(self) -> int:
        """The numbers of one slot in one layer."""
        delta = self.delta
        matrices = self.num_value_heads * delta.key_dim * delta.value_dim
        return (delta.length - 1) * self.num_channels + matrices


def state_bytes(spec: DecoderSpec, tp: TensorParallel) -> int:
    """Returns the size of a slot on this rank, of all layers; 0: no layer keeps a state."""
    return ITEM_BYTES * sum(DeltaShare.of(delta, tp).num_numbers for delta in spec.deltas)
