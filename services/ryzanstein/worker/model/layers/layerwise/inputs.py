"""Inputs of each layer beside the hidden states: per-layer embeddings (Gemma 3n and 4, Google DeepMind 2025).

Rows of the table are divided over the ranks as those of the embedding are, and only looked up, never
multiplied. What is computed of them is small, and every rank computes all of it.

Legend: T tokens, E hidden size, L layers, P numbers of a layer's input.
"""

from __future__ import annotations

import math

from torch import Tensor

from ryzanstein.worker.architectures.layer_heads import PerLayerNames, PerLayerSpec
from ryzanstein.worker.architectures.spec import DecoderSpec
from ryzanstein.worker.collectives.parallel import TensorParallel
from ryzanstein.worker.model.layers.linear import ColumnParallelLinear, Rows
from ryzanstein.worker.model.layers.mlp import new_activation
from ryzanstein.worker.model.layers.norm import new_norm
from ryzanstein.worker.model.layers.source import WeightSource
from ryzanstein.worker.model.layers.vocabulary import VocabParallelEmbedding, VocabularyShard
from ryzanstein.worker.products.adapted import AdapterRows


class PerLayerInputs:
    """The inputs of all layers: of each the part of a token's row plus a normed projection of its embedding, over root 2."""

    def __init__(self, source: WeightSource, tp: TensorParallel, spec: DecoderSpec, own: PerLayerSpec) -> None:
        names, width = _names(spec), spec.num_layers * own.width
        shard = VocabularyShard(source, tp, names.table, own.vocab_size, width)
        self._shape = (spec.num_layers, own.width)
        self._lookup, self._scale = VocabParallelEmbedding(source, shard, tp), math.sqrt(own.width)
        self._project = _whole(source, names.projection, (width, spec.hidden_size))
        self._projection_scale = spec.hidden_size**-0.5
        self._norm = new_norm(source, names.projection_norm, own.width, spec.norm)

    def __call__(self, ids_T: Tensor, x_TE: Tensor, rows: AdapterRows | None = None) -> Tensor:
        """Returns the inputs of all layers, [L, T, P]."""
        projected_TLP = self._project(x_TE, rows).mul_(self._projection_scale).view(len(x_TE), *self._shape)
        rows_TLP = self._lookup(ids_T, rows).mul_(self._scale).view_as(projected_TLP)
        return self._norm(projected_TLP).add_(rows_TLP).mul_(math.sqrt(0.5)).transpose(0, 1).contiguous()


class LayerInput:
    """The end of a layer that adds its own input: gated by the hidden states, projected and normed."""

    def __init__(self, source: WeightSource, spec: DecoderSpec, own: PerLayerSpec, prefix: str) -> None:
        names, size = _names(spec), spec.hidden_size
        self._gate = _whole(source, prefix + names.gate, (own.width, size))
        self._activate = new_activation(source, spec.activation)
        self._out = _whole(source, prefix + names.out, (size, own.width))
        self._norm = new_norm(source, prefix + names.norm, size, spec.norm)

    def __call__(self, x_TE: Tensor, own_TP: Tensor, rows: AdapterRows | None = None) -> Tensor:
        gated_TP = self._activate(self._gate(x_TE, rows)).mul_(own_TP)
        return self._norm(self._out(gated_TP, rows)).add_(x_TE)


def _whole(source: WeightSource, name: str, shape: tuple[int, int]) -> ColumnParallelLinear:
    """Returns a projection that every rank has whole."""
    num_outputs, num_inputs = shape
    return ColumnParallelLinear(source, num_inputs, [Rows(name, num_outputs, ((0, num_outputs),))], bias=False)


def _names(spec: DecoderSpec) -> PerLayerNames:
    assert spec.names.per_layer is not None
    return spec.names.per_layer
