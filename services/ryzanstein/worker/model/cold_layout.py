"""The layout of a cold page: 16 tokens of keys and values in 8 bits, with scales of their own.

It knows sizes and offsets alone, so that the agent can size a cache without torch. The kernels have
the same layout in attention_pages.h, which says what it is for.

A block is one part for each key-value head of the rank. A part: 16 bytes of head (float32 scale of
the keys, float32 scale of the values, 8 bytes of zeros), the keys as [D][16], the values as
[16][V], V being the head dimension D rounded up to 16.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, get_args

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


KvCompression = Literal["none", "lazy-fp8", "eager-fp8", "late-fp8", "lazy-int8", "lazy-fp8-values"]
"""The setting. Late: only the second half of the layers is compressed, the others keep all in full precision."""

KV_COMPRESSIONS: tuple[KvCompression, ...] = get_args(KvCompression)
DEFAULT_HOT_TOKENS = 16
_KINDS: dict[KvCompression, ColdKind] = {
    "lazy-fp8": FP8,
    "eager-fp8": FP8,
    "late-fp8": FP8,
    "lazy-int8": INT8,
    "lazy-fp8-values": FP8_VALUES,
}


@dataclass(frozen=True, slots=True)
class Compression:
    """How a model's keys and values are compressed: the kind, the tokens that stay hot, the first such layer."""

    kind: ColdKind
    hot_tokens: int
    first_layer: int


def compression_of(setting: KvCompression, hot_tokens: int, num_layers: int) -> Compression | None:
    """Returns what a setting means for a model; None for none.

    Eager: a page is cold as soon as it is full, whatever `hot_tokens` says.
    """
    if setting == "none":
        return None
    first_layer = num_layers // 2 if setting == "late-fp8" else 0
    return Compression(_KINDS[setting], 0 if setting == "eager-fp8" else hot_tokens, first_layer)


def sees_cold(position: int, hot_tokens: int) -> int:
    """Returns how many pages a query at a position sees cold: those from the first on.

    It sees page j cold if position - (16 j + 15) >= hot_tokens, in decode as in any chunk of a prefill.
    """
    return max(0, (position + 1 - hot_tokens) // PAGE_TOKENS)
