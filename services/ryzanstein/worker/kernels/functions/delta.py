"""The gated delta rule and its short convolution over slots of states.

Legend: T tokens, S sequences, R runs, N slots, W width of a slot, F channels, L tokens that the convolution sees, H value
heads, V value dimension.
"""

from __future__ import annotations

from ctypes import CDLL, POINTER, Structure, byref, c_float, c_int64, c_void_p
from dataclasses import dataclass

import torch
from torch import Tensor

from ryzanstein.worker.kernels.functions.declaring import declared, integers, pointers


@dataclass(frozen=True, slots=True)
class DeltaRuns:
    """The runs of a step: sequence s has those from `begin_S[s]` to `begin_S[s + 1]` - 1. All are int64."""

    begin_S: Tensor
    first_R: Tensor
    count_R: Tensor
    source_R: Tensor
    target_R: Tensor


@dataclass(frozen=True, slots=True)
class DeltaShape:
    """The sizes of a layer: channels, tokens that the convolution sees, heads and their dimensions.

    The value heads of a key head follow each other, or if `tiled` are J heads apart.
    """

    num_channels: int
    length: int
    num_key_heads: int
    num_value_heads: int
    key_dim: int
    value_dim: int
    tiled: bool = False


class _Delta(Structure):
    """The struct Delta of delta.c."""

    _fields_ = (
        *((name, c_void_p) for name in ("begin", "first", "count", "source", "target", "slots")),
        *((name, c_int64) for name in ("T", "S", "W", "F", "L", "J", "H", "K", "V", "tiled")),
    )


class DeltaFunctions:
    """The functions of delta.c. Slots are float32 and contiguous."""

    def __init__(self, library: CDLL) -> None:
        self._convolve = declared(library, "delta_convolve", POINTER(_Delta), c_void_p, c_int64, *pointers(2))
        rule = POINTER(_Delta), *pointers(3), *integers(1), *pointers(3), c_float, c_void_p
        self._rule = declared(library, "delta_rule", *rule)

    def convolve(self, x_TF: Tensor, weight_LF: Tensor, slots_NW: Tensor, runs: DeltaRuns, shape: DeltaShape) -> Tensor:
        """Returns the sums over each token and those before it, [T, F], and keeps the last ones in the slots."""
        out_TF = torch.empty((len(x_TF), shape.num_channels))
        delta = _arguments(len(x_TF), slots_NW, runs, shape)
        self._convolve(byref(delta), x_TF.data_ptr(), x_TF.stride(0), weight_LF.data_ptr(), out_TF.data_ptr())
        return out_TF

    def rule(
        self,
        mixed_TF: Tensor,
        strengths_T2H: Tensor,
        gate_T: Tensor,
        heads: tuple[Tensor, Tensor, Tensor, float],
        *,
        slots_NW: Tensor,
        runs: DeltaRuns,
        shape: DeltaShape,
    ) -> Tensor:
        """Returns the normed and gated outputs of the heads, [T, H V], and keeps the matrices in the slots.

        `heads` are each head's decay and step, the weights of the norm, and its epsilon.
        """
        *numbers, eps = heads
        out_T = torch.empty((len(mixed_TF), shape.num_value_heads * shape.value_dim))
        delta = _arguments(len(mixed_TF), slots_NW, runs, shape)
        rows = mixed_TF.data_ptr(), strengths_T2H.data_ptr(), gate_T.data_ptr(), gate_T.stride(0)
        self._rule(byref(delta), *rows, *(tensor.data_ptr() for tensor in numbers), eps, out_T.data_ptr())
        return out_T


def _arguments(num_tokens: int, slots_NW: Tensor, runs: DeltaRuns, shape: DeltaShape) -> _Delta:
    columns = (runs.begin_S, runs.first_R, runs.count_R, runs.source_R, runs.target_R, slots_NW)
    sizes = (shape.num_channels, shape.length, shape.num_key_heads, shape.num_value_heads, shape.key_dim, shape.value_dim)
    return _Delta(
        *(tensor.data_ptr() for tensor in columns), num_tokens, len(runs.begin_S) - 1, slots_NW.shape[1], *sizes, shape.tiled
    )
