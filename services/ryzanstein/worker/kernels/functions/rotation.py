"""The rotation of queries and keys by their positions, together with the copy of keys and values into the cache.

Legend: T tokens, H heads, D head dimension, R rotated numbers of a head, N slots of the cache, C columns of a slot.
"""

from __future__ import annotations

from ctypes import CDLL, c_float, c_int, c_int64, c_void_p

import torch
from torch import Tensor

from ryzanstein.worker.kernels.functions.angles import Angles
from ryzanstein.worker.kernels.functions.declaring import declared, integers, pointers


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
