"""What adapters add to the results of a product: the function of adapters.c.

Legend: T rows of the step, N those with an adapter, I inputs, R ranks, O outputs.
"""

from __future__ import annotations

from ctypes import CDLL, Structure, byref, c_int64, c_void_p

from torch import Tensor

from ryzanstein.worker.kernels.functions.declaring import declared

FACTORS = 6
"""The 64-bit numbers of the struct Factors: addresses of A, B and bias, the rank, the stride of B's rows, scale and half."""


class SiteStruct(Structure):
    """The struct Site of adapters.h."""

    num_weights: int
    low_stride: int
    _fields_ = (
        *((name, c_void_p) for name in ("slots", "pieces")),
        *((name, c_int64) for name in ("num_weights", "num_pieces", "low_stride")),
    )


class AdaptedStruct(Structure):
    """The struct Adapted of adapters.h."""

    _fields_ = (
        *((name, c_void_p) for name in ("x", "rows", "ids", "out", "site", "segments", "index", "low")),
        *(
            (name, c_int64)
            for name in ("x_stride", "out_stride", "num_inputs", "num_rows", "num_segments", "first_id", "num_ids")
        ),
    )


class AdapterFunctions:
    """The function of adapters.c."""

    def __init__(self, library: CDLL) -> None:
        self._add = declared(library, "adapters_add", c_void_p, c_int64)

    def add(self, asked: AdaptedStruct, rows_TI: Tensor | None, out_TO: Tensor, work: int) -> None:
        """Adds to `out_TO`. `work` is about how many products that takes. Other fields of `asked` are set already."""
        if rows_TI is not None:
            asked.x, asked.x_stride = rows_TI.data_ptr(), rows_TI.stride(0)
        asked.out, asked.out_stride = out_TO.data_ptr(), out_TO.stride(0)
        self._add(byref(asked), work)
