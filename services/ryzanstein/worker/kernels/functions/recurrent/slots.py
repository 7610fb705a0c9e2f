"""The slots of states as kernels see them, and the short convolution over what they keep of the last tokens.

Legend: T tokens, S sequences, R runs, N slots, W width of a slot, F channels, L tokens that the convolution sees.
"""

from __future__ import annotations

from ctypes import CDLL, POINTER, Structure, c_int64, c_void_p, pointer
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ryzanstein.worker.kernels.functions.declaring import declared, pointers


@dataclass(frozen=True, slots=True)
class SlotRuns:
    """The runs of a step: sequence s has those from `begin_S[s]` to `begin_S[s + 1]` - 1. All are int64."""

    begin_S: Tensor
    first_R: Tensor
    count_R: Tensor
    source_R: Tensor
    target_R: Tensor


@dataclass(frozen=True, slots=True)
class SlotSizes:
    """The sizes of a layer: channels, tokens that the convolution sees, and its heads' matrices.

    `num_groups` is how many of its heads, or of their groups, have keys of their own.
    """

    num_channels: int
    length: int
    num_groups: int
    num_heads: int
    rows: int
    columns: int


class SlotArguments(Structure):
    """The struct Slots of slots.h."""

    _fields_ = (
        *((name, c_void_p) for name in ("begin", "first", "count", "source", "target", "slots")),
        *((name, c_int64) for name in ("T", "S", "W", "F", "L", "J", "H", "K", "V")),
    )


SLOTS = POINTER(SlotArguments)


def slot_arguments(num_tokens: int, slots_NW: Tensor, runs: SlotRuns, sizes: SlotSizes) -> Any:
    """Returns a pointer to what every function of slots takes. Slots are float32 and contiguous."""
    columns = (runs.begin_S, runs.first_R, runs.count_R, runs.source_R, runs.target_R, slots_NW)
    numbers = (sizes.num_channels, sizes.length, sizes.num_groups, sizes.num_heads, sizes.rows, sizes.columns)
    shape = (num_tokens, len(runs.begin_S) - 1, slots_NW.shape[1])
    return pointer(SlotArguments(*(tensor.data_ptr() for tensor in columns), *shape, *numbers))


class TailFunctions:
    """The function of tails.c."""

    def __init__(self, library: CDLL) -> None:
        self._convolve = declared(library, "convolve_tails", SLOTS, c_void_p, c_int64, *pointers(3))

    def convolve(
        self, x_TF: Tensor, weights: tuple[Tensor, Tensor | None], slots_NW: Tensor, runs: SlotRuns, sizes: SlotSizes
    ) -> Tensor:
        """Returns the sums over each token and those before it, [T, F], and keeps the last ones in the slots.

        The weights are [L, F], and a bias [F] or None.
        """
        (weight_LF, bias_F), out_TF = weights, torch.empty((len(x_TF), sizes.num_channels))
        slots, bias = slot_arguments(len(x_TF), slots_NW, runs, sizes), 0 if bias_F is None else bias_F.data_ptr()
        self._convolve(slots, x_TF.data_ptr(), x_TF.stride(0), weight_LF.data_ptr(), bias, out_TF.data_ptr())
        return out_TF
