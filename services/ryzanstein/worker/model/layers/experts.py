"""A mixture of experts (Shazeer et al. 2017).

Each expert is on one rank; the sum over ranks combines them. Every rank routes every token, which
is cheap and needs no exchange, and computes its own experts.

Legend: T tokens, t those of one expert, E hidden size, k experts of a token, W columns of an
expert.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from ryzanstein.worker.architectures.spec import DecoderSpec, MoeSpec
from ryzanstein.worker.collectives.parallel import TensorParallel
from ryzanstein.worker.model.layers.linear import ColumnParallelLinear, Rows, open_site
from ryzanstein.worker.model.layers.mlp import (
    FeedForward,
    GatedMLP,
    PlainMLP,
    dense_mlp,
    new_activation,
    new_clipped_gate,
    new_gate,
    new_sigmoid,
)
from ryzanstein.worker.model.layers.routing import ExpertRouter
from ryzanstein.worker.model.layers.source import WeightSource
from ryzanstein.worker.products.adapted import AdapterRows
from ryzanstein.worker.products.floats import unpacked


def feed_forward(source: WeightSource, tp: TensorParallel, spec: DecoderSpec, index: int) -> FeedForward | None:
    """Returns the second half of layer `index`, or None if it has none."""
    prefix, experts = spec.names.layer.format(layer=index), spec.layers[index].experts
    if not spec.layers[index].mlp:
        return None
    if experts is None or spec.names.beside is not None:
        return dense_mlp(source, tp, spec.of_layer(index), prefix)
    return Mixture(source, tp, spec, prefix, experts)


class Mixture:
    """A layer half that routes each token to its experts, and to the shared one if there is one."""

    def __init__(self, source: WeightSource, tp: TensorParallel, spec: DecoderSpec, prefix: str, moe: MoeSpec) -> None:
        self.route = ExpertRouter(source, spec, prefix, moe)
        width = -(-moe.num_experts // tp.size)
        own = range(tp.rank * width, min((tp.rank + 1) * width, moe.num_experts))
        experts = {
            index: _Expert(source, spec, prefix + spec.names.expert.format(expert=index), moe, here=index in own)
            for index in range(moe.num_experts)
        }
        self._experts = {index: experts[index] for index in own}
        self._shared = None if moe.shared_width is None else _shared_expert(source, tp, spec, prefix, moe.shared_width)

    def __call__(self, x_TE: Tensor, rows: AdapterRows | None = None) -> Tensor:
        return self.mixed(x_TE, self.route(x_TE), rows)

    def mixed(self, x_TE: Tensor, routed: tuple[Tensor, Tensor], rows: AdapterRows | None = None) -> Tensor:
        """Returns the sum of each token's chosen experts."""
        weights_Tk, chosen_Tk = routed
        out_TE = torch.zeros_like(x_TE) if self._shared is None else self._shared(x_TE, rows)
        for index in sorted(
            set(chosen_Tk.flatten().tolist())
        ):  # in order: a token's experts are added alike whatever others choose
            if (expert := self._experts.get(index)) is not None:
                row_t, rank_t = (chosen_Tk == index).nonzero(as_tuple=True)
                out_TE.index_add_(0, row_t, expert(x_TE[row_t]).mul_(weights_Tk[row_t, rank_t].unsqueeze(1)))
        return out_TE


class _Expert:
    """One whole MLP, gated if the architecture's are.

    The tensors of another rank's expert are read into empty tensors, so that every rank checks
    them.
    """

    def __init__(self, source: WeightSource, spec: DecoderSpec, prefix: str, moe: MoeSpec, *, here: bool) -> None:
        width, (gate, up, down) = moe.width, spec.names.expert_projections
        projections = [Rows(prefix + name, width, ((0, width if here else 0),)) for name in (gate, up) if name]
        self._in = ColumnParallelLinear(source, spec.hidden_size, projections, bias=moe.biased, adaptable=False)
        down_rows = Rows(prefix + down, spec.hidden_size, ((0, spec.hidden_size if here else 0),))
        self._down = ColumnParallelLinear(source, width, [down_rows], bias=moe.biased, adaptable=False)
        self._activate = _activation(source, spec, moe, gated=bool(gate))

    def __call__(self, x_tE: Tensor) -> Tensor:
        return self._down(self._activate(self._in(x_tE)))


def _activation(source: WeightSource, spec: DecoderSpec, moe: MoeSpec, *, gated: bool) -> Callable[[Tensor], Tensor]:
    if not gated:
        return new_activation(source, spec.activation)
    return new_gate(source, spec) if moe.gate is None else new_clipped_gate(source, moe.gate)


def _shared_expert(source: WeightSource, tp: TensorParallel, spec: DecoderSpec, prefix: str, width: int) -> FeedForward:
    """Returns an MLP for every token, split over the ranks as in a dense layer.

    Its output is gated if the architecture has a gate for it.
    """
    projections = spec.names.shared_projections or spec.names.expert_projections
    gate, up, down = (name and prefix + spec.names.shared_expert + name for name in projections)
    if not gate:
        return PlainMLP(source, tp, spec, (up, down, ""), width)
    mlp = GatedMLP(source, tp, spec, (gate, up, down), width)
    return mlp if spec.names.shared_gate is None else _Gated(source, prefix + spec.names.shared_gate, spec.hidden_size, mlp)


class _Gated:
    """An MLP whose output is multiplied by a gate, which each rank computes."""

    def __init__(self, source: WeightSource, name: str, hidden_size: int, mlp: FeedForward) -> None:
        gate_1E = source.new(1, hidden_size)
        source.read(f"{name}.weight", (1, hidden_size), gate_1E)
        self._site = open_site(source, hidden_size, [Rows(name, 1, ((0, 1),))])
        self._mlp, self._gate, self._sigmoid = mlp, unpacked(gate_1E, None, source.kernels), new_sigmoid(source.kernels)

    def __call__(self, x_TE: Tensor, rows: AdapterRows | None = None) -> Tensor:
        gate_T1 = self._gate(x_TE)
        if rows is not None:
            self._site.add(x_TE, gate_T1, rows)
        return self._mlp(x_TE, rows).mul_(self._sigmoid(gate_T1))
