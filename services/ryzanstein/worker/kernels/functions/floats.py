"""Products with float weights, and how such a weight is packed for them.

Legend: T rows, I inputs, O outputs, H heads.
"""

from __future__ import annotations

from ctypes import CDLL, c_int, c_int64

import torch
from torch import Tensor

from ryzanstein.worker.kernels.functions.declaring import declared, integers, pointers


class FloatFunctions:
    """The functions of floats.c."""

    def __init__(self, library: CDLL) -> None:
        self._packed_bytes = declared(library, "float_packed_bytes", *integers(2), c_int, returns=c_int64)
        self._pack = declared(library, "float_pack", *pointers(2), *integers(2), c_int)
        self._product = declared(library, "float_product", *pointers(4), *integers(3), c_int)
        self._product_unpacked = declared(library, "float_product_unpacked", *pointers(4), *integers(3))
        self._product_by_head = declared(library, "float_product_by_head", *pointers(3), *integers(4))

    def packed_bytes(self, num_outputs: int, num_inputs: int, dtype: torch.dtype) -> int:
        """Returns the size of the result of `pack` for such a weight."""
        packed_bytes: int = self._packed_bytes(num_outputs, num_inputs, dtype == torch.float16)
        return packed_bytes

    def pack(self, weight_OI: Tensor, dtype: torch.dtype) -> Tensor:
        """Returns a float32 weight packed for `product`, in float32 or float16."""
        weight_OI = weight_OI.contiguous()
        num_outputs, num_inputs = weight_OI.shape
        packed = torch.empty(self.packed_bytes(num_outputs, num_inputs, dtype) // dtype.itemsize, dtype=dtype)
        self._pack(weight_OI.data_ptr(), packed.data_ptr(), num_outputs, num_inputs, dtype == torch.float16)
        return packed

    def product(self, x_TI: Tensor, packed: Tensor, bias_O: Tensor | None, num_outputs: int) -> Tensor:
        """Returns x times a packed weight, plus the bias."""
        x_TI = x_TI.contiguous()
        num_rows, num_inputs = x_TI.shape
        out_TO = torch.empty((num_rows, num_outputs))
        self._product(
            *(x_TI.data_ptr(), packed.data_ptr(), None if bias_O is None else bias_O.data_ptr(), out_TO.data_ptr()),
            *(num_rows, num_inputs, num_outputs, packed.dtype == torch.float16),
        )
        return out_TO

    def product_unpacked(self, x_TI: Tensor, weight_OI: Tensor, bias_O: Tensor | None) -> Tensor:
        """Returns x times an unpacked float32 weight, plus the bias."""
        x_TI = x_TI.contiguous()
        (num_rows, num_inputs), num_outputs = x_TI.shape, len(weight_OI)
        out_TO = torch.empty((num_rows, num_outputs))
        self._product_unpacked(
            *(x_TI.data_ptr(), weight_OI.data_ptr(), None if bias_O is None else bias_O.data_ptr(), out_TO.data_ptr()),
            *(num_rows, num_inputs, num_outputs),
        )
        return out_TO

    def product_by_head(self, x_HTI: Tensor, packed_H: Tensor, num_outputs: int) -> Tensor:
        """Returns each head's rows times the head's own weight.

        The rows of `packed_H` are results of `pack`, in float32.
        """
        x_HTI = x_HTI.contiguous()
        out_HTO = torch.empty((*x_HTI.shape[:2], num_outputs))
        self._product_by_head(x_HTI.data_ptr(), packed_H.data_ptr(), out_HTO.data_ptr(), *x_HTI.shape, num_outputs)
        return out_HTO
