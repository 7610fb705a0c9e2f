"""Products with 8-bit weights, how such a weight is packed for them, and the transform of rows before them.

Legend: T rows, E width of a row, I inputs, O outputs.
"""

from __future__ import annotations

from ctypes import CDLL, c_float, c_int, c_int64

import torch
from torch import Tensor

from ryzanstein.worker.kernels.functions.declaring import declared, integers, pointers
from ryzanstein.worker.kernels.functions.rows import SMALLEST_SCALE


class Int8Functions:
    """The functions of int8.c."""

    def __init__(self, library: CDLL) -> None:
        self._transform_rows = declared(library, "transform_rows", *pointers(2), *integers(3))
        self._packed_bytes = declared(library, "int8_packed_bytes", *integers(2), returns=c_int64)
        self._pack = declared(library, "int8_pack", *pointers(2), *integers(2))
        self._product = declared(library, "int8_product", *pointers(4), *integers(4), c_float, returns=c_int)
        self._rows = declared(library, "int8_rows", *pointers(4), *integers(4))

    def transform_rows(self, x_TE: Tensor, block: int) -> Tensor:
        """Returns the Hadamard transform of each `block` numbers of each row, without its factor.

        `block` is a power of two of at least 16 that divides the width, or 1.
        """
        x_TE = x_TE.contiguous()
        out_TE = torch.empty_like(x_TE)
        self._transform_rows(x_TE.data_ptr(), out_TE.data_ptr(), *x_TE.shape, block)
        return out_TE

    def packed_bytes(self, num_outputs: int, num_inputs: int) -> int:
        """Returns the size of the result of `pack` for such a weight."""
        packed_bytes: int = self._packed_bytes(num_outputs, num_inputs)
        return packed_bytes

    def pack(self, levels_OI: Tensor) -> Tensor:
        """Returns a weight of whole numbers in -127..127, int8, packed for `product`."""
        levels_OI = levels_OI.contiguous()
        num_outputs, num_inputs = levels_OI.shape
        packed = torch.empty(self.packed_bytes(num_outputs, num_inputs), dtype=torch.uint8)
        self._pack(levels_OI.data_ptr(), packed.data_ptr(), num_outputs, num_inputs)
        return packed

    def product(self, x_TI: Tensor, packed: Tensor, scale_O: Tensor, block: int) -> Tensor:
        """Returns transformed and quantized rows times a packed weight, in float32. Raises MemoryError.

        `block`: see `transform_rows`; the weight was transformed so.
        """
        x_TI = x_TI.contiguous()
        (num_rows, num_inputs), num_outputs = x_TI.shape, len(scale_O)
        out_TO = torch.empty((num_rows, num_outputs))
        pointers = x_TI.data_ptr(), packed.data_ptr(), scale_O.data_ptr(), out_TO.data_ptr()
        if self._product(*pointers, num_rows, num_inputs, num_outputs, block, SMALLEST_SCALE):
            raise MemoryError("no memory for the levels of rows")
        return out_TO

    def rows(self, packed: Tensor, scale_O: Tensor, index_T: Tensor, num_inputs: int, block: int) -> Tensor:
        """Returns rows of a packed weight, transformed back. Rows that it does not have are zeros."""
        index_T = index_T.contiguous()
        out_TI = torch.empty((len(index_T), num_inputs))
        pointers = packed.data_ptr(), scale_O.data_ptr(), index_T.data_ptr(), out_TI.data_ptr()
        self._rows(*pointers, len(index_T), num_inputs, len(scale_O), block)
        return out_TI
