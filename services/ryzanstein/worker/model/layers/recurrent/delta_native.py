"""The arithmetic of a gated delta rule by our own kernel, which adds in one order whatever the step has."""

from __future__ import annotations

from torch import Tensor

from ryzanstein.worker.cache.state_sizes import DeltaShare
from ryzanstein.worker.cache.states import LayerStates
from ryzanstein.worker.kernels.functions.recurrent.delta import DeltaFunctions
from ryzanstein.worker.model.inputs.states.inputs import StateInputs
from ryzanstein.worker.model.layers.recurrent.convolution import slot_sizes
from ryzanstein.worker.model.layers.recurrent.delta_rule import HeadNumbers


class NativeDelta:
    """The rule of one layer, as `TorchDelta` computes it."""

    def __init__(self, functions: DeltaFunctions, share: DeltaShare, numbers: HeadNumbers) -> None:
        self._functions, self._sizes, self._tiled = functions, slot_sizes(share.slot, share.num_key_heads), share.delta.tiled
        self._numbers = (numbers.decay_H, numbers.step_H, numbers.norm_V, numbers.eps)

    def __call__(
        self, mixed_TF: Tensor, strengths_T2H: Tensor, gate_T: Tensor, states: LayerStates, inputs: StateInputs
    ) -> Tensor:
        """Returns the normed and gated outputs of the heads, [T, H V], and keeps the matrices in the slots."""
        rows, runs, sizes = (mixed_TF, strengths_T2H, gate_T), inputs.slot_runs, self._sizes
        slots_NW, tiled = states.slots_NW, self._tiled
        return self._functions.rule(*rows, self._numbers, slots_NW=slots_NW, runs=runs, sizes=sizes, tiled=tiled)
