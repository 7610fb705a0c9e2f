"""The short convolution of layers that keep a state: sums over each token and those before it, and a bias if there is one.

Legend: T tokens, R runs, F channels, L tokens that it sees, N slots.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch
from torch import Tensor

from ryzanstein.worker.cache.state_sizes import SlotShape
from ryzanstein.worker.cache.states import LayerStates
from ryzanstein.worker.kernels.functions.recurrent.slots import SlotSizes, TailFunctions
from ryzanstein.worker.kernels.native import NativeKernels
from ryzanstein.worker.model.inputs.states.inputs import StateInputs
from ryzanstein.worker.model.layers.source import WeightSource

Piece = tuple[int, int]
"""The first of a rank's channels that are side by side, and their number."""


class TailConvolution(Protocol):
    """A function of a step's tokens and of the last ones in slots."""

    def __call__(self, x_TF: Tensor, states: LayerStates, inputs: StateInputs) -> Tensor:
        """Returns the sums, [T, F], and keeps the last tokens in the slots."""
        ...


def new_convolution(
    kernels: NativeKernels | None, shape: SlotShape, weight_LF: Tensor, bias_F: Tensor | None
) -> TailConvolution:
    if kernels is None:
        return TorchConvolution(weight_LF, bias_F)
    return NativeConvolution(kernels.tails, shape, weight_LF, bias_F)


class TorchConvolution:
    """The convolution in torch's operators, in float32."""

    def __init__(self, weight_LF: Tensor, bias_F: Tensor | None) -> None:
        self._weight_LF, self._bias_F = weight_LF.float(), None if bias_F is None else bias_F.float()

    def __call__(self, x_TF: Tensor, states: LayerStates, inputs: StateInputs) -> Tensor:
        tails_NLF, (taps_LT, tails_RL) = states.tails_NLF, inputs.taps(len(self._weight_LF))
        known_XF = torch.cat((x_TF.float(), tails_NLF[inputs.source_S].flatten(0, 1)))
        tails_NLF[inputs.target_R] = known_XF[tails_RL]
        sum_TF = known_XF[taps_LT[0]] * self._weight_LF[0]
        if self._bias_F is not None:
            sum_TF.add_(self._bias_F)
        for taps_T, weight_F in zip(taps_LT[1:], self._weight_LF[1:], strict=True):
            sum_TF.addcmul_(known_XF[taps_T], weight_F)
        return sum_TF.to(x_TF.dtype)


class NativeConvolution:
    """The convolution by our own kernel, which sums in one order whatever the step has."""

    def __init__(self, functions: TailFunctions, shape: SlotShape, weight_LF: Tensor, bias_F: Tensor | None) -> None:
        self._functions, self._weights = functions, (weight_LF, bias_F)
        self._sizes = slot_sizes(shape, shape.num_heads)

    def __call__(self, x_TF: Tensor, states: LayerStates, inputs: StateInputs) -> Tensor:
        return self._functions.convolve(x_TF, self._weights, states.slots_NW, inputs.slot_runs, self._sizes)


def read_taps(source: WeightSource, name: str, pieces: Sequence[Piece], whole: tuple[int, int]) -> Tensor:
    """Returns the weights of this rank's channels, [L, F]. `whole` are how many channels there are, and L."""
    channels, length = whole
    weight_F1L = source.new(sum(count for _, count in pieces), 1, length)
    first = 0
    for start, count in pieces:
        source.read(f"{name}.weight", (channels, 1, length), weight_F1L.narrow(0, first, count), start=start)
        first += count
    return weight_F1L[:, 0].t().contiguous()


def slot_sizes(shape: SlotShape, num_groups: int) -> SlotSizes:
    """Returns the sizes as kernels take them."""
    return SlotSizes(shape.num_channels, shape.length, num_groups, shape.num_heads, shape.rows, shape.columns)
