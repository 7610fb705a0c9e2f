"""What is computed for each row alone: norms, activations, quantization to 8 bits.

Legend: T tokens, E width of a row.
"""

from __future__ import annotations

from ctypes import CDLL, c_float, c_int

import torch
from torch import Tensor

from ryzanstein.worker.kernels.functions.declaring import declared, integers, pointers

_ACTIVATIONS = {"silu": 0, "gelu": 1, "gelu_tanh": 2, "quick_gelu": 3, "relu": 4, "sigmoid": 5}  # of rows.c
SMALLEST_SCALE = torch.finfo(torch.float32).tiny
"""The least scale of a quantized row."""


class RowFunctions:
    """The functions of rows.c, but for rotation."""

    def __init__(self, library: CDLL) -> None:
        self._rms_norm = declared(library, "rms_norm", *pointers(3), *integers(2), c_float, c_float)
        self._activate = declared(library, "activate", *pointers(2), *integers(2), c_int)
        self._activate_gate = declared(library, "activate_gate", *pointers(2), *integers(2), c_int)
        quantized = *pointers(3), *integers(2), c_float
        self._quantize = {
            torch.float32: declared(library, "quantize_to_float", *quantized),
            torch.int8: declared(library, "quantize_to_int8", *quantized),
        }

    def rms_norm(self, x_TE: Tensor, weight_E: Tensor, eps: float, offset: float) -> Tensor:
        """Returns x / rms(x) * (offset + weight)."""
        x_TE = x_TE.contiguous()
        out_TE = torch.empty_like(x_TE)
        num_rows, width = x_TE.numel() // len(weight_E), len(weight_E)
        self._rms_norm(x_TE.data_ptr(), weight_E.data_ptr(), out_TE.data_ptr(), num_rows, width, eps, offset)
        return out_TE

    def activate(self, x_TE: Tensor, activation: str) -> Tensor:
        """Returns activation(x). The name is an activation of an architecture, or sigmoid."""
        out_TE = torch.empty_like(x_TE)
        self._activate(x_TE.data_ptr(), out_TE.data_ptr(), *x_TE.shape, _ACTIVATIONS[activation])
        return out_TE

    def activate_gate(self, gate_up_T2E: Tensor, activation: str) -> Tensor:
        """Returns activation(gate) * up."""
        num_rows, width = len(gate_up_T2E), gate_up_T2E.shape[1] // 2
        out_TE = gate_up_T2E.new_empty((num_rows, width))
        self._activate_gate(gate_up_T2E.data_ptr(), out_TE.data_ptr(), num_rows, width, _ACTIVATIONS[activation])
        return out_TE

    def quantize_rows(self, x_TE: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """Returns whole numbers in -127..127, as float32 or int8, and each row's scale [T, 1]."""
        x_TE = x_TE.contiguous()
        num_rows, width = x_TE.shape
        levels_TE, scale_T1 = torch.empty((num_rows, width), dtype=dtype), torch.empty((num_rows, 1))
        self._quantize[dtype](x_TE.data_ptr(), levels_TE.data_ptr(), scale_T1.data_ptr(), num_rows, width, SMALLEST_SCALE)
        return levels_TE, scale_T1
