"""The layout of a cold page: 16 tokens of keys and values in 8 bits, with scales of their own.

It knows sizes and offsets alone, so that the agent can size a cache without torch. The kernels have
the same layout in attention_pages.h, which says what it is for.

A block is one part for each key-value head of the rank. A part: 16 bytes of head (float32 scale of
the keys, float32 scale of the values, 8 bytes of zeros), the keys as [D][16], the values as
[16][V], V being the head dimension D rounded up to 16.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

ItemKind = Literal["float16", "fp8", "int8"]

PAGE_TOKENS = 16
PART_HEAD_BYTES = 16
_ITEM_BYTES: dict[ItemKind, int] = {"float16": 2, "fp8": 1, "int8": 1}


@dataclass(frozen=True, slots=True)
class ColdKind:
    """How cold keys and values are kept. Values are in 8 bits always."""

    keys: ItemKind
    values: ItemKind


FP8 = ColdKind("fp8", "fp8")
INT8 = ColdKind("int8", "int8")
FP8_VALUES = ColdKind("float16", "fp8")


@dataclass(frozen=True, slots=True)
class ColdLayout:
    """The cold blocks of a layer on one rank."""

    kind: ColdKind
    num_kv_heads: int
    head_dim: int

    @property
    def value_row_bytes(self) -> int:
        return -(-self.head_dim // PAGE_TOKENS) * PAGE_TOKENS

    @property
    def values_offset(self) -> int:
        """Where the values begin in a part."""
        return PART_HEAD_BYTES + PAGE_TOKENS * self.head_dim * _ITEM_BYTES[self.kind.keys]

    @property
    def part_bytes(self) -> int:
        """The size of one head's keys and values."""
        return self.values_offset + PAGE_TOKENS * self.value_row_bytes

    @property
    def block_bytes(self) -> int:
        """The size of a block in one layer."""
        return self.num_kv_heads * self.part_bytes
