"""What is computed for each row alone: norms, activations, quantization to 8 bits, rotation, float products.

Rotary embeddings turn queries and keys by a step's angles; the same call copies keys and values into the cache.

Legend: T tokens or rows, E width of a row, I inputs, O outputs, H heads, D head dimension, R rotated numbers of a head,
N slots of the cache, C columns of a slot.
"""

from __future__ import annotations

from ctypes import CDLL, c_float, c_int, c_int64, c_void_p
from dataclasses import dataclass

import torch
from torch import Tensor

from ryzanstein.worker.kernels.functions.declaring import declared, integers, pointers

ACTIVATIONS = {"silu": 0, "gelu": 1, "gelu_tanh": 2, "quick_gelu": 3, "relu": 4, "sigmoid": 5, "relu2": 6}  # of rows.c
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
        self._activate(x_TE.data_ptr(), out_TE.data_ptr(), *x_TE.shape, ACTIVATIONS[activation])
        return out_TE

    def activate_gate(self, gate_up_T2E: Tensor, activation: str) -> Tensor:
        """Returns activation(gate) * up."""
        num_rows, width = len(gate_up_T2E), gate_up_T2E.shape[1] // 2
        out_TE = gate_up_T2E.new_empty((num_rows, width))
        self._activate_gate(gate_up_T2E.data_ptr(), out_TE.data_ptr(), num_rows, width, ACTIVATIONS[activation])
        return out_TE

    def quantize_rows(self, x_TE: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """Returns whole numbers in -127..127, as float32 or int8, and each row's scale [T, 1]."""
        x_TE = x_TE.contiguous()
        num_rows, width = x_TE.shape
        levels_TE, scale_T1 = torch.empty((num_rows, width), dtype=dtype), torch.empty((num_rows, 1))
        self._quantize[dtype](x_TE.data_ptr(), levels_TE.data_ptr(), scale_T1.data_ptr(), num_rows, width, SMALLEST_SCALE)
        return levels_TE, scale_T1


class RotationFunctions:
    """The functions of rows.c that rotate."""

    def __init__(self, library: CDLL) -> None:
        self._angles = declared(library, "rotary_angles", *pointers(4), *integers(2), c_int, c_float)
        rotated = c_void_p, *integers(4), *pointers(2), c_int64, c_int
        stored = c_int64, *pointers(2), c_int64, c_int
        self._rotate_and_store = declared(library, "rotate_and_store", *rotated, *stored)

    def angles(self, positions_T: Tensor, frequencies_R: Tensor, interleaved: bool, magnitude: float) -> tuple[Tensor, Tensor]:
        """Returns cosine and signed sine of each position's angles, times magnitude, [T, 1, R]."""
        shape = len(positions_T), 1, len(frequencies_R)
        cos_T1R, sin_T1R = torch.empty(shape), torch.empty(shape)
        pointers = positions_T.data_ptr(), frequencies_R.data_ptr(), cos_T1R.data_ptr(), sin_T1R.data_ptr()
        self._angles(*pointers, shape[0], shape[2], interleaved, magnitude)
        return cos_T1R, sin_T1R

    def rotate(self, x_THD: Tensor, angles: Angles) -> None:
        """Rotates the first numbers of each head in place."""
        self._rotate_and_store(*_rotation(x_THD, angles), 0, None, None, 0, False)

    def rotate_and_store(self, qk_THD: Tensor, angles: Angles, kv_TC: Tensor, pages_NC: Tensor, slots_T: Tensor) -> None:
        """Rotates queries and keys in place, then copies keys and values `kv_TC` into their slots.

        The keys of `kv_TC` are a part of `qk_THD`.
        """
        self._rotate_and_store(
            *_rotation(qk_THD, angles),
            *(kv_TC.storage_offset() - qk_THD.storage_offset(), pages_NC.data_ptr(), slots_T.data_ptr()),
            *(kv_TC.shape[1], pages_NC.dtype == torch.float16),
        )


def _rotation(x_THD: Tensor, angles: Angles) -> tuple[int, ...]:
    """Returns the arguments that describe what is rotated and by which angles."""
    num_tokens, num_heads, head_dim = x_THD.shape
    apart = x_THD.stride(1) if num_heads > 1 else head_dim
    cos, sin = angles.cos_T1R.data_ptr(), angles.sin_T1R.data_ptr()
    return (
        x_THD.data_ptr(),
        x_THD.stride(0),
        num_tokens,
        num_heads,
        apart,
        cos,
        sin,
        angles.cos_T1R.shape[-1],
        angles.interleaved,
    )


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


@dataclass(frozen=True, slots=True)
class Angles:
    """The rotation of a step's tokens. The sine is signed so that rotating needs no negation.

    `growth_T1`: what queries are multiplied by besides.
    """

    cos_T1R: Tensor
    sin_T1R: Tensor
    interleaved: bool
    growth_T1: Tensor | None = None
