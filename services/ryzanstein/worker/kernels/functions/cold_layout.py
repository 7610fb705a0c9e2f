"""The layout of a cold page: 16 tokens of keys and values in 8 bits, with scales of their own.

It knows sizes and offsets alone, so that the agent can size a cache without torch. The kernels have
the same layout in attention_pages.h, which says what it is for.

A block is one part for each key-value head of the rank. A part: 16 bytes of head (float32 scale of
the keys, float32 scale of the values, 8 bytes of zeros), the keys as [D][16], the values as
[16][V], V being the head dimension D rounded up to 16. Keys with a scale for each channel follow V
bytes of FP8: a channel's scale is its number times the head's scale.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

ItemKind = Literal["float16", "fp8", "int8", "int8-channels"]

PAGE_TOKENS = 16
PART_HEAD_BYTES = 16
_ITEM_BYTES: dict[ItemKind, int] = {"float16": 2, "fp8": 1, "int8": 1, "int8-channels": 1}


@dataclass(frozen=True, slots=True)
class ColdKind:
    """How cold keys and values are kept. Values are in 8 bits always; keys alone may have a scale for each channel."""

    keys: ItemKind
    values: ItemKind


FP8 = ColdKind("fp8", "fp8")
INT8 = ColdKind("int8", "int8")
FP8_VALUES = ColdKind("float16", "fp8")
CHANNELS = ColdKind("int8-channels", "fp8")


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
    def keys_offset(self) -> int:
        """Where the keys begin in a part."""
        return PART_HEAD_BYTES + (self.value_row_bytes if self.kind.keys == "int8-channels" else 0)

    @property
    def values_offset(self) -> int:
        """Where the values begin in a part."""
        return self.keys_offset + PAGE_TOKENS * self.head_dim * _ITEM_BYTES[self.kind.keys]

    @property
    def part_bytes(self) -> int:
        """The size of one head's keys and values."""
        return self.values_offset + PAGE_TOKENS * self.value_row_bytes

    @property
    def block_bytes(self) -> int:
        """The size of a block in one layer."""
        return self.num_kv_heads * self.part_bytes


def sees_cold(position: int, hot_tokens: int) -> int:
    """Returns how many pages a query at a position sees cold: those from the first on.

    It sees page j cold if position - (16 j + 15) >= hot_tokens, in decode as in any chunk of a prefill.
    """
    return max(0, (position + 1 - hot_tokens) // PAGE_TOKENS)
