"""The ways in which GGUF stores numbers: blocks of so many numbers in so many bytes.

Ids, names and sizes are those of ggml (`ggml_type`, `GGML_QUANT_SIZES`). A row of a tensor is a
whole number of blocks.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class BlockType:
    """A type of tensor: `num_bytes` store `numbers` consecutive numbers of a row."""

    name: str
    id: int
    numbers: int
    num_bytes: int

    def row_bytes(self, row_numbers: int) -> int:
        """Returns the bytes of a row, whose length must be divisible by `numbers`."""
        return row_numbers // self.numbers * self.num_bytes


F32 = BlockType("F32", 0, 1, 4)
F16 = BlockType("F16", 1, 1, 2)
BF16 = BlockType("BF16", 30, 1, 2)
Q4_0 = BlockType("Q4_0", 2, 32, 18)
Q4_1 = BlockType("Q4_1", 3, 32, 20)
Q5_0 = BlockType("Q5_0", 6, 32, 22)
Q5_1 = BlockType("Q5_1", 7, 32, 24)
Q8_0 = BlockType("Q8_0", 8, 32, 34)
Q2_K = BlockType("Q2_K", 10, 256, 84)
Q3_K = BlockType("Q3_K", 11, 256, 110)
Q4_K = BlockType("Q4_K", 12, 256, 144)
Q5_K = BlockType("Q5_K", 13, 256, 176)
Q6_K = BlockType("Q6_K", 14, 256, 210)
IQ4_NL = BlockType("IQ4_NL", 20, 32, 18)
IQ4_XS = BlockType("IQ4_XS", 23, 256, 136)
TQ1_0 = BlockType("TQ1_0", 34, 256, 54)
TQ2_0 = BlockType("TQ2_0", 35, 256, 66)
MXFP4 = BlockType("MXFP4", 39, 32, 17)

BLOCK_TYPES: Mapping[int, BlockType] = {
    kind.id: kind
    for kind in (
        *(F32, F16, BF16, Q8_0, Q4_0, Q4_1, Q5_0, Q5_1),
        *(Q2_K, Q3_K, Q4_K, Q5_K, Q6_K, IQ4_NL, IQ4_XS, TQ1_0, TQ2_0, MXFP4),
    )
}
"""The types that are read, by id."""

FLOATS = (F32, F16, BF16)
"""The types of which each number is stored by itself."""

UNREAD: Mapping[int, str] = {
    9: "Q8_1",
    15: "Q8_K",
    16: "IQ2_XXS",
    17: "IQ2_XS",
    18: "IQ3_XXS",
    19: "IQ1_S",
    21: "IQ3_S",
    22: "IQ2_S",
    24: "I8",
    25: "I16",
    26: "I32",
    27: "I64",
    28: "F64",
    29: "IQ1_M",
    40: "NVFP4",
}
"""Types that ggml has and this package does not read, for messages."""
