"""The arithmetic of a gated delta rule by our own kernels, which sum in one order whatever the step has."""

from __future__ import annotations

from torch import Tensor

from ryzanstein.worker.cache.state_sizes import DeltaShare
from ryzanstein.worker.cache.states import LayerStates
from ryzanstein.worker.kernels.functions.delta import DeltaFunctions, DeltaRuns, DeltaShape
from ryzanstein.worker.model.inputs.states.inputs import StateInputs
from ryzanstein.worker.model.layers.delta.rule import HeadNumbers


class NativeDelta:
    """The convolution and the rule of one layer, as `TorchDelta` computes them."""

    def __init__(self, functions: DeltaFunctions, share: DeltaShare, weight_LF: Tensor, numbers: HeadNumbers) -> None:
        delta = share.delta
        self._functions, self._weight_LF = functions, weight_LF
        self._numbers = (numbers.decay_H, numbers.step_H, numbers.norm_V, numbers.eps)
        heads = (share.num_key_heads, share.num_value_heads)
        self._shape = DeltaShape(share.num_channels, delta.length, *heads, delta.key_dim, delta.value_dim, delta.tiled)

    def convolve(self, x_TF: Tensor, states: LayerStates, inputs: StateInputs) -> Tensor:
        """Returns the sums over each token and those before it, and keeps the last ones in the slots."""
        return self._functions.convolve(x_TF, self._weight_LF, states.slots_NW, _runs(inputs), self._shape)

    def recur(
        self, mixed_TF: Tensor, strengths_T2H: Tensor, gate_T: Tensor, states: LayerStates, inputs: StateInputs
    ) -> Tensor:
        """Returns the normed and gated outputs of the heads, [T, H V], and keeps the matrices in the slots."""
        rows = (mixed_TF, strengths_T2H, gate_T)
        return self._functions.rule(*rows, self._numbers, slots_NW=states.slots_NW, runs=_runs(inputs), shape=self._shape)


def _runs(inputs: StateInputs) -> DeltaRuns:
    return DeltaRuns(inputs.begin_S, inputs.first_R, inputs.count_R, inputs.source_R, inputs.target_R)
