"""The state space of Mamba 2 over slots of states.

Legend: T tokens, N slots, W width of a slot, F channels, G groups, H heads, V numbers of a head.
"""

from __future__ import annotations

from ctypes import CDLL, c_float, c_void_p
from dataclasses import dataclass

import torch
from torch import Tensor

from ryzanstein.worker.kernels.functions.declaring import declared, integers, pointers
from ryzanstein.worker.kernels.functions.recurrent.slots import SLOTS, SlotRuns, SlotSizes, slot_arguments


@dataclass(frozen=True, slots=True)
class MambaHeads:
    """Each head's own numbers: of its decay, added to its steps, and of its input in its output; and bounds of all steps."""

    decay_H: Tensor
    step_H: Tensor
    skip_H: Tensor
    limits: tuple[float, float]


@dataclass(frozen=True, slots=True)
class GroupScales:
    """The weights of a norm of groups of `count` numbers, of which a rank may have a part, and its epsilon."""

    weight: Tensor
    count: int
    eps: float


class MambaFunctions:
    """The functions of mamba.c."""

    def __init__(self, library: CDLL) -> None:
        rows = c_void_p, c_void_p, *integers(1), c_void_p, *integers(1)
        self._scan = declared(library, "mamba_scan", SLOTS, *rows, *pointers(3), c_float, c_float, c_void_p)
        self._squares = declared(library, "mamba_squares", c_void_p, *integers(3), c_void_p)
        self._norm = declared(library, "mamba_norm", *pointers(3), *integers(4), c_float, c_void_p, *integers(1))

    def scan(
        self,
        mixed_TF: Tensor,
        step_TH: Tensor,
        gate_T: Tensor | None,
        heads: MambaHeads,
        *,
        slots_NW: Tensor,
        runs: SlotRuns,
        sizes: SlotSizes,
    ) -> Tensor:
        """Returns the outputs of the heads, [T, H V], gated if there are gates, and keeps the matrices in the slots."""
        out_T = torch.empty((len(mixed_TF), sizes.num_heads * sizes.columns))
        slots = slot_arguments(len(mixed_TF), slots_NW, runs, sizes)
        gates = (0, 0) if gate_T is None else (gate_T.data_ptr(), gate_T.stride(0))
        numbers = (tensor.data_ptr() for tensor in (heads.decay_H, heads.step_H, heads.skip_H))
        rows = mixed_TF.data_ptr(), step_TH.data_ptr(), step_TH.stride(0), *gates
        self._scan(slots, *rows, *numbers, *heads.limits, out_T.data_ptr())
        return out_T

    def squares(self, x_T: Tensor, num_groups: int) -> Tensor:
        """Returns the sum of squares of each group of a row, [T, G]."""
        out_TG = torch.empty((len(x_T), num_groups))
        self._squares(x_T.data_ptr(), len(x_T), num_groups, x_T.shape[1] // num_groups, out_TG.data_ptr())
        return out_TG

    def norm(self, x_T: Tensor, squares_TG: Tensor, scales: GroupScales, gate_T: Tensor | None) -> Tensor:
        """Divides each group in place by the root of its mean square, scales it, and gates it if there are gates."""
        gates = (0, 0) if gate_T is None else (gate_T.data_ptr(), gate_T.stride(0))
        num_groups = squares_TG.shape[1]
        sizes = len(x_T), num_groups, x_T.shape[1] // num_groups, scales.count
        self._norm(x_T.data_ptr(), squares_TG.data_ptr(), scales.weight.data_ptr(), *sizes, scales.eps, *gates)
        return x_T
