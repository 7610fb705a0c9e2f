"""The MLP of a layer: a product, a gate or an activation, a product.

With a gate, the first product is stacked.

Legend: T tokens, E hidden size, G columns of this rank.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from ryzanstein.worker.architectures.mixers import Activation
from ryzanstein.worker.architectures.spec import ClippedGate, DecoderSpec
from ryzanstein.worker.collectives.parallel import TensorParallel
from ryzanstein.worker.kernels.functions.rows import ACTIVATIONS as ROW_ACTIVATIONS
from ryzanstein.worker.kernels.native import NativeKernels
from ryzanstein.worker.model.layers.fused import gate_up_rows
from ryzanstein.worker.model.layers.linear import ColumnParallelLinear, RowParallelLinear, Rows
from ryzanstein.worker.model.layers.source import WeightSource
from ryzanstein.worker.model.program.ops import Last, NotNative, Ops, RowNorm
from ryzanstein.worker.products.adapted import AdapterRows

ACTIVATIONS: Mapping[Activation, Callable[[Tensor], Tensor]] = {
    "silu": F.silu,
    "gelu": F.gelu,
    "gelu_tanh": lambda x: F.gelu(x, approximate="tanh"),
    "quick_gelu": lambda x: x * torch.sigmoid(1.702 * x),
    "relu": F.relu,
    "relu2": lambda x: F.relu(x).square(),
}


class FeedForward(Protocol):
    """A function of each token alone that returns this rank's part of a sum over all ranks."""

    def __call__(self, x_TE: Tensor, rows: AdapterRows | None = None) -> Tensor:
        """`rows`: those of x that have an adapter."""
        ...


def dense_mlp(source: WeightSource, tp: TensorParallel, spec: DecoderSpec, prefix: str) -> FeedForward:
    """Returns the MLP of a layer without experts."""
    names = spec.names
    if names.gate is None:
        plain = (prefix + names.up, prefix + names.down, prefix + names.activation)
        return PlainMLP(source, tp, spec, plain, spec.intermediate_size)
    return GatedMLP(source, tp, spec, (prefix + names.gate, prefix + names.up, prefix + names.down), spec.intermediate_size)


def new_gate(source: WeightSource, spec: DecoderSpec) -> Callable[[Tensor], Tensor]:
    """Returns the function activation(gate) * up of rows that hold all gates and then all ups."""
    if source.kernels is not None:
        return partial(source.kernels.rows.activate_gate, activation=spec.activation)
    activate = ACTIVATIONS[spec.activation]

    def gate(gate_up_TW: Tensor) -> Tensor:
        gate_TG, up_TG = gate_up_TW.chunk(2, dim=-1)
        return activate(gate_TG).mul_(up_TG)

    return gate


def new_clipped_gate(source: WeightSource, clipped: ClippedGate) -> Callable[[Tensor], Tensor]:
    """Returns the same function for a gate of gpt-oss."""
    sigmoid, limit = new_sigmoid(source.kernels), clipped.limit

    def gate(gate_up_TW: Tensor) -> Tensor:
        gate_TG, up_TG = gate_up_TW.chunk(2, dim=-1)
        gate_TG = gate_TG.clamp(max=limit)
        return sigmoid(gate_TG * clipped.gain).mul_(gate_TG).mul_(up_TG.clamp(-limit, limit).add_(1))

    return gate


def new_sigmoid(kernels: NativeKernels | None) -> Callable[[Tensor], Tensor]:
    """Returns our own sigmoid if there are kernels.

    torch's gives different bits at the end of the range that a thread computes.
    """
    return torch.sigmoid if kernels is None else partial(kernels.rows.activate, activation="sigmoid")


class Xielu:
    """An expanded integral of ELU with learned slopes (Huang and Schlag 2024): a parabola above 0, an exponential below."""

    def __init__(self, source: WeightSource, name: str) -> None:
        slopes, constants = source.new(2).float(), source.new(2).float()
        for index, (slope, constant) in enumerate((("alpha_p", "beta"), ("alpha_n", "eps"))):
            source.read(f"{name}.{slope}", (1,), slopes[index : index + 1])
            source.read(f"{name}.{constant}", (), constants[index])
        (self._above, below), (self._beta, self._least) = F.softplus(slopes), constants
        self._below = self._beta + below

    def __call__(self, x_TG: Tensor) -> Tensor:
        above_TG = self._above * x_TG * x_TG
        below_TG = torch.expm1(torch.minimum(x_TG, self._least)).sub_(x_TG).mul_(self._below)
        return torch.where(x_TG > 0, above_TG, below_TG).add_(self._beta * x_TG).to(x_TG.dtype)


def new_activation(source: WeightSource, activation: Activation) -> Callable[[Tensor], Tensor]:
    if source.kernels is not None:
        return partial(source.kernels.rows.activate, activation=activation)
    return ACTIVATIONS[activation]


class GatedMLP:
    """A gated MLP, down(activation(gate(x)) * up(x)) (Shazeer 2020).

    `names` are the names of gate, up and down.
    """

    def __init__(
        self, source: WeightSource, tp: TensorParallel, spec: DecoderSpec, names: tuple[str, str, str], width: int
    ) -> None:
        gate, up, down = names
        self._gate_up = ColumnParallelLinear(
            source, spec.hidden_size, gate_up_rows(tp, gate, up, width), bias=spec.mlp_bias, transposed=spec.transposed
        )
        own, options = tp.columns(width), {"bias": spec.mlp_bias, "transposed": spec.transposed}
        self._down = RowParallelLinear(source, tp, down, width, spec.hidden_size, own=own, **options)
        self._gate, self._factors, self._num_gates = new_gate(source, spec), spec.factors, own[1]
        self._activation = spec.activation

    def __call__(self, x_TE: Tensor, rows: AdapterRows | None = None) -> Tensor:
        gate_up_TW, factors = self._gate_up(x_TE, rows), self._factors
        if factors.gate != 1:
            gate_up_TW[:, : self._num_gates].mul_(factors.gate)
        out_TE = self._down(self._gate(gate_up_TW), rows)
        return out_TE if factors.mlp_out == 1 else out_TE.mul_(factors.mlp_out)

    def emit(self, ops: Ops, source: int, norm: RowNorm | None) -> Last:
        """Adds its ops but for the last product. Raises NotNative."""
        if self._factors.gate != 1 or self._factors.mlp_out != 1:
            raise NotNative("factors of an MLP")
        activated = ops.gated_product(self._gate_up.native(), source, norm, self._activation, self._num_gates)
        return Last(self._down.native(), activated)


class PlainMLP:
    """A plain MLP, down(activation(up(x))).

    `names` are the names of up, down and the activation, which may be learned.
    """

    def __init__(
        self, source: WeightSource, tp: TensorParallel, spec: DecoderSpec, names: tuple[str, str, str], width: int
    ) -> None:
        up, down, activation = names
        own = tp.columns(width)
        rows = Rows(up, width, (own,))
        self._up = ColumnParallelLinear(source, spec.hidden_size, [rows], bias=spec.mlp_bias, transposed=spec.transposed)
        self._down = RowParallelLinear(
            source, tp, down, width, spec.hidden_size, own=own, bias=spec.mlp_bias, transposed=spec.transposed
        )
        self._activation = spec.activation
        learned = spec.activation == "xielu"
        self._activate = Xielu(source, activation) if learned else new_activation(source, spec.activation)

    def __call__(self, x_TE: Tensor, rows: AdapterRows | None = None) -> Tensor:
        return self._down(self._activate(self._up(x_TE, rows)), rows)

    def emit(self, ops: Ops, source: int, norm: RowNorm | None) -> Last:
        """Adds its ops but for the last product. Raises NotNative."""
        if self._activation in ROW_ACTIVATIONS:
            kind = ROW_ACTIVATIONS[self._activation]
            return Last(self._down.native(), ops.product(self._up.native(), source, "activated", norm=norm, activation=kind))
        stack = self._up.native()
        out = ops.product(stack, source, "activated", norm=norm)
        ops.call(out, stack.width, lambda x_TG, _: self._activate(x_TG))
        return Last(self._down.native(), out)
