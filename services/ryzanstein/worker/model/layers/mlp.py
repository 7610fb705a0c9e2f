"""The gated MLP of a layer: one stacked product, one gate, one product with the all-reduce.

Legend: T tokens, E hidden size, G gated columns of this rank.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch.nn.functional as F
from torch import Tensor

from ryzanstein.worker.model.architectures.spec import Activation, DecoderSpec
from ryzanstein.worker.model.layers.linear import RowParallelLinear, gate_up_linear
from ryzanstein.worker.model.layers.source import WeightSource
from ryzanstein.worker.model.parallel import TensorParallel

_ACTIVATIONS: Mapping[Activation, Callable[[Tensor], Tensor]] = {
    "silu": F.silu,
    "gelu": F.gelu,
    "gelu_tanh": lambda x: F.gelu(x, approximate="tanh"),
}


class GatedMLP:
    """down(activation(gate(x)) * up(x))."""

    def __init__(self, source: WeightSource, tp: TensorParallel, spec: DecoderSpec, prefix: str) -> None:
        names = (prefix + spec.names.gate, prefix + spec.names.up)
        self._gate_up = gate_up_linear(source, tp, names, spec.hidden_size, spec.intermediate_size, bias=spec.mlp_bias)
        self._down = RowParallelLinear(
            source, tp, prefix + spec.names.down, spec.intermediate_size, spec.hidden_size, bias=spec.mlp_bias
        )
        self._activate = _ACTIVATIONS[spec.activation]

    def __call__(self, x_TE: Tensor) -> Tensor:
        gate_TG, up_TG = self._gate_up(x_TE).chunk(2, dim=-1)
        return self._down(self._activate(gate_TG).mul_(up_TG))
