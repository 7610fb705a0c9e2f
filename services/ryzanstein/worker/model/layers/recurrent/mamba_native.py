"""The arithmetic of Mamba 2 by our own kernels, which add in one order whatever the step has."""

from __future__ import annotations

from torch import Tensor

from ryzanstein.worker.cache.state_sizes import MambaShare
from ryzanstein.worker.cache.states import LayerStates
from ryzanstein.worker.kernels.functions.recurrent.mamba import GroupScales, MambaFunctions, MambaHeads
from ryzanstein.worker.model.inputs.states.inputs import StateInputs
from ryzanstein.worker.model.layers.recurrent.convolution import slot_sizes


class NativeMamba:
    """The state space of one layer, and norms of its groups, as `TorchMamba` computes them."""

    def __init__(self, functions: MambaFunctions, share: MambaShare, heads: MambaHeads) -> None:
        self._functions, self._heads, self._num_groups = functions, heads, share.num_groups
        self._sizes = slot_sizes(share.slot, share.num_groups)

    def scan(
        self, mixed_TF: Tensor, step_TH: Tensor, gate_T: Tensor | None, states: LayerStates, inputs: StateInputs
    ) -> Tensor:
        """Returns the outputs of the heads, [T, H V], gated if there are gates, and keeps the matrices in the slots."""
        rows, runs = (mixed_TF, step_TH, gate_T), inputs.slot_runs
        return self._functions.scan(*rows, self._heads, slots_NW=states.slots_NW, runs=runs, sizes=self._sizes)

    def squares(self, x_T: Tensor) -> Tensor:
        """Returns the sum of squares of each group of a row, [T, G]."""
        return self._functions.squares(x_T, self._num_groups)

    def norm(self, x_T: Tensor, squares_TG: Tensor, scales: GroupScales, gate_T: Tensor | None) -> Tensor:
        """Divides each group in place by the root of its mean square, scales it, and gates it if there are gates."""
        return self._functions.norm(x_T, squares_TG, scales, gate_T)
