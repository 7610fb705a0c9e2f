"""Types of blocks of our own: groups of inputs with a scale and a zero point, as GPTQ and AWQ have.

A block is a 16-bit scale and a 16-bit zero point, both float16, then the levels of each 32 inputs: 16
bytes of 4 bits, of which the lower halves are inputs 0 to 15 and the upper ones 16 to 31, or 32
bytes. Levels are unsigned; a weight is scale * (level - zero).
"""

from __future__ import annotations

from ryzanstein.worker.kernels.functions.blocks import BLOCKS
from ryzanstein.worker.products.block_types import BlockType


def _group(bits: int, inputs: int) -> BlockType:
    name = f"G{bits}_{inputs}"
    return BlockType(name, BLOCKS[name], inputs, 4 + inputs * bits // 8)


G4_32, G4_64, G4_128 = (_group(4, inputs) for inputs in (32, 64, 128))
G8_32, G8_64, G8_128 = (_group(8, inputs) for inputs in (32, 64, 128))

GROUPS = (G4_32, G4_64, G4_128, G8_32, G8_64, G8_128)
