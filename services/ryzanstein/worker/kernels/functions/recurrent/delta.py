"""The gated delta rule over slots of states.

Legend: T tokens, N slots, W width of a slot, F channels, H value heads, V value dimension.
"""

from __future__ import annotations

from ctypes import CDLL, c_float, c_void_p

import torch
from torch import Tensor

from ryzanstein.worker.kernels.functions.declaring import declared, integers, pointers
from ryzanstein.worker.kernels.functions.recurrent.slots import SLOTS, SlotRuns, SlotSizes, slot_arguments


class DeltaFunctions:
    """The function of delta.c."""

    def __init__(self, library: CDLL) -> None:
        rule = SLOTS, *integers(1), *pointers(3), *integers(1), *pointers(3), c_float, c_void_p
        self._rule = declared(library, "delta_rule", *rule)

    def rule(
        self,
        mixed_TF: Tensor,
        strengths_T2H: Tensor,
        gate_T: Tensor,
        heads: tuple[Tensor, Tensor, Tensor, float],
        *,
        slots_NW: Tensor,
        runs: SlotRuns,
        sizes: SlotSizes,
        tiled: bool,
    ) -> Tensor:
        """Returns the normed and gated outputs of the heads, [T, H V], and keeps the matrices in the slots.

        `heads` are each head's decay and step, the weights of the norm, and its epsilon. Value heads of a key
        head follow each other, or if `tiled` are as many heads apart as there are key heads.
        """
        *numbers, eps = heads
        out_T = torch.empty((len(mixed_TF), sizes.num_heads * sizes.columns))
        slots = slot_arguments(len(mixed_TF), slots_NW, runs, sizes)
        rows = mixed_TF.data_ptr(), strengths_T2H.data_ptr(), gate_T.data_ptr(), gate_T.stride(0)
        self._rule(slots, int(tiled), *rows, *(tensor.data_ptr() for tensor in numbers), eps, out_T.data_ptr())
        return out_T
