"""Products with weights in blocks, and how such a weight is packed for them.

Legend: T rows, I inputs, O outputs, B bytes of a row.
"""

from __future__ import annotations

from ctypes import CDLL, c_float, c_int, c_int64, c_void_p

import torch
from torch import Tensor

from ryzanstein.worker.kernels.functions.declaring import declared, integers, pointers
from ryzanstein.worker.kernels.functions.rows import SMALLEST_SCALE

_OF_GGUF = {"Q4_0": 2, "Q4_1": 3, "Q5_0": 6, "Q5_1": 7, "Q8_0": 8, "Q4_K": 12, "Q5_K": 13, "Q6_K": 14, "TQ2_0": 35, "MXFP4": 39}
_OF_GROUPS = {"G4_32": 432, "G4_64": 464, "G4_128": 4128, "G8_32": 832, "G8_64": 864, "G8_128": 8128}
BLOCKS = _OF_GGUF | _OF_GROUPS
"""The types of blocks that are multiplied as they are, and their ids in block_types.h.

Ids of GGUF's types are those of GGUF. G types are groups of so many inputs with 4-bit or unsigned
8-bit levels: a 16-bit scale, a 16-bit zero point, then for each 32 inputs the levels as Q4_0 or Q8_0
have them; a weight is scale * (level - zero).
"""


class BlockFunctions:
    """The functions of blocks.c and block_rows.c."""

    def __init__(self, library: CDLL) -> None:
        self._packed_bytes = declared(library, "blocks_packed_bytes", *integers(2), c_int, returns=c_int64)
        self._pack = declared(library, "blocks_pack", c_void_p, *integers(2), c_void_p, *integers(2), c_int)
        self._product = declared(library, "blocks_product", *pointers(4), *integers(3), c_int, c_float, returns=c_int)
        self._rows = declared(library, "blocks_rows", *pointers(3), *integers(3), c_int)

    def packed_bytes(self, num_outputs: int, num_inputs: int, kind: int) -> int:
        """Returns the size of a packed weight in blocks of a type, one of `BLOCKS`."""
        packed_bytes: int = self._packed_bytes(num_outputs, num_inputs, kind)
        return packed_bytes

    def pack(self, blocks_OB: Tensor, packed: Tensor, first: int, num_inputs: int, kind: int) -> None:
        """Packs rows of blocks, uint8, as outputs from `first` on. `packed` must begin as zeros."""
        num_rows, stride = len(blocks_OB), blocks_OB.stride(0)
        self._pack(blocks_OB.data_ptr(), stride, num_rows, packed.data_ptr(), first, num_inputs, kind)

    def product(self, x_TI: Tensor, packed: Tensor, bias_O: Tensor | None, num_outputs: int, kind: int) -> Tensor:
        """Returns quantized rows times a packed weight, plus the bias. Raises MemoryError."""
        x_TI = x_TI.contiguous()
        num_rows, num_inputs = x_TI.shape
        out_TO = torch.empty((num_rows, num_outputs))
        bias = None if bias_O is None else bias_O.data_ptr()
        pointers = x_TI.data_ptr(), packed.data_ptr(), bias, out_TO.data_ptr()
        if self._product(*pointers, num_rows, num_inputs, num_outputs, kind, SMALLEST_SCALE):
            raise MemoryError("no memory for the levels of rows")
        return out_TO

    def rows(self, packed: Tensor, index_T: Tensor, shape: tuple[int, int], kind: int) -> Tensor:
        """Returns rows of a packed weight [O, I] in float32. Rows that it does not have are zeros."""
        num_outputs, num_inputs = shape
        index_T = index_T.contiguous()
        out_TI = torch.empty((len(index_T), num_inputs))
        pointers = packed.data_ptr(), index_T.data_ptr(), out_TI.data_ptr()
        self._rows(*pointers, len(index_T), num_inputs, num_outputs, kind)
        return out_TI
