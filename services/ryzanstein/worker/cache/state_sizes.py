"""The size of states, from the description of a decoder. It imports no torch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Self

from ryzanstein.worker.architectures.mixers import DeltaSpec, MambaSpec, StateSpec
from ryzanstein.worker.architectures.spec import DecoderSpec
from ryzanstein.worker.collectives.parallel import TensorParallel

ITEM_BYTES = 4


@dataclass(frozen=True, slots=True)
class SlotShape:
    """What one layer keeps in a slot: channels of the last `length` - 1 tokens, then a matrix of each head."""

    length: int
    num_channels: int
    num_heads: int
    rows: int
    columns: int

    @property
    def num_tails(self) -> int:
        """The numbers before the matrices."""
        return (self.length - 1) * self.num_channels

    @property
    def num_numbers(self) -> int:
        return self.num_tails + self.num_heads * self.rows * self.columns


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
    def slot(self) -> SlotShape:
        delta = self.delta
        channels = 2 * self.num_key_heads * delta.key_dim + self.num_value_heads * delta.value_dim
        return SlotShape(delta.length, channels, self.num_value_heads, delta.key_dim, delta.value_dim)


@dataclass(frozen=True, slots=True)
class MambaShare:
    """The heads of one rank, from `first_head` on, and the groups that they belong to.

    If there are fewer groups than ranks, ranks have parts of a group, whose norm `spans` them.
    """

    mamba: MambaSpec
    first_head: int
    num_heads: int
    first_group: int
    num_groups: int
    spans: bool

    @classmethod
    def of(cls, mamba: MambaSpec, tp: TensorParallel) -> Self:
        """Deals whole groups, or parts of them. Raises UnevenSplit with more ranks than heads."""
        share = tp.heads(mamba.num_heads, mamba.num_groups)
        groups = (share.first_kv_head, share.num_kv_heads)
        return cls(mamba, share.first_head, share.num_heads, *groups, tp.size > mamba.num_groups)

    @property
    def slot(self) -> SlotShape:
        mamba = self.mamba
        channels = self.num_heads * mamba.head_dim + 2 * self.num_groups * mamba.state_dim
        return SlotShape(mamba.length, channels, self.num_heads, mamba.state_dim, mamba.head_dim)


def slot_shape(state: StateSpec, tp: TensorParallel) -> SlotShape:
    """Returns what a layer keeps on this rank. Raises UnevenSplit."""
    return (DeltaShare.of(state, tp) if isinstance(state, DeltaSpec) else MambaShare.of(state, tp)).slot


def state_bytes(spec: DecoderSpec, tp: TensorParallel) -> int:
    """Returns the size of a slot on this rank, of all layers; 0: no layer keeps a state."""
    return ITEM_BYTES * sum(slot_shape(state, tp).num_numbers for state in spec.states)
