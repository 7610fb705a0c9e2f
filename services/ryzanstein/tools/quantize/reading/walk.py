"""Runs windows of text through a model layer by layer: only one layer's weights are in memory.

Legend: W windows, T tokens of a window, E hidden size, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from ryzanstein.tools.quantize.reading.layer_weights import LayerWeights
from ryzanstein.worker.architectures.spec import DecoderSpec
from ryzanstein.worker.cache.kv_cache import LayerPages
from ryzanstein.worker.cache.layer_groups import layer_groups
from ryzanstein.worker.cache.sizes import slot_width
from ryzanstein.worker.cache.states import StateCache
from ryzanstein.worker.checkpoints.checkpoint import WeightFiles
from ryzanstein.worker.collectives.local import LocalCollectives
from ryzanstein.worker.collectives.parallel import TensorParallel
from ryzanstein.worker.engine.extents import Extents
from ryzanstein.worker.engine.plan import StepPlan
from ryzanstein.worker.model.alibi import alibi_bias
from ryzanstein.worker.model.decoder import DecoderLayer
from ryzanstein.worker.model.inputs.builder import InputBuilder
from ryzanstein.worker.model.inputs.for_torch.batches import DecodeBatches
from ryzanstein.worker.model.inputs.for_torch.masks import ScoreMasks
from ryzanstein.worker.model.inputs.layout import CacheLayout
from ryzanstein.worker.model.inputs.readers import torch_readers, with_taps
from ryzanstein.worker.model.layers.embedding import Embedding
from ryzanstein.worker.model.layers.norm import new_norm
from ryzanstein.worker.model.layers.rotary import Rotary
from ryzanstein.worker.model.layers.vocabulary import VocabParallelHead, VocabularyShard
from ryzanstein.worker.refusal import ModelRefused

ALONE = TensorParallel(0, 1, LocalCollectives())
_BLOCK = 16
_HEAD_ROWS = 128  # logits of so many rows are in memory at once

Layer = Callable[[Tensor], Tensor]
"""A layer that is bound to a window's positions: [T, E] to [T, E]."""


def carry(layer: Layer, states_WTE: Tensor) -> None:
    """Replaces the states before a layer by those after it."""
    for state_TE in states_WTE:
        state_TE.copy_(layer(state_TE))


class Walk:
    """The positions, masks and cache that windows of one length need. They are the same in every layer."""

    def __init__(self, spec: DecoderSpec, length: int) -> None:
        self.spec, self.length = spec, length
        num_blocks = -(-length // _BLOCK)
        groups = layer_groups(spec)
        device, dtype = torch.device("cpu"), torch.float32
        layout = CacheLayout(num_blocks, _BLOCK, device)
        batches = DecodeBatches(layout, ScoreMasks(layout, dtype, alibi_bias(spec, ALONE, dtype, device)))
        attending = torch_readers(batches, groups.windows, 0, knows_causal=spec.has_plain_scores)
        readers = with_taps(attending, layout, groups.taps)
        states = StateCache(spec, ALONE, 1, device) if spec.states else None
        builder = InputBuilder(layout, Extents(groups.windows, _BLOCK), readers, states=states)
        tables = [list(range(num_blocks))] * len(groups.windows)
        self._inputs = builder.build(StepPlan(0, [0] * length, [length], [0], tables, [0]))
        rotaries = [Rotary(rotary, device, None) for rotary in spec.rotaries]
        self._angles = [rotary.angles(self._inputs.positions_T, dtype) for rotary in rotaries]
        planes_PNC = torch.zeros(groups.num_planes, num_blocks * _BLOCK + 1, slot_width(spec, ALONE))
        self._pages = [LayerPages(planes_PNC[0], planes_PNC=planes_PNC[: layer.planes]) for layer in spec.layers]

    def layer(self, weights: LayerWeights, index: int) -> Layer:
        """Reads a layer's weights and returns the layer."""
        layer = DecoderLayer(weights, ALONE, self.spec, index)
        return lambda x_TE: layer(x_TE, self._inputs, self._angles, self._pages[index])

    def embedded(self, files: WeightFiles, ids_WT: Tensor) -> Iterator[Tensor]:
        """Yields the first layer's input of each window, [T, E].

        Raises ModelRefused for layers that read more than the states before them.
        """
        spec = self.spec
        if spec.per_layer is not None or any(layer.keys_of is not None for layer in spec.layers):
            raise ModelRefused(
                f"config.json: layers of this {spec.model_type} read inputs of their own, or keys of other layers: no text can "
                "be run through them one by one. Use rtn or int8 without a calibration text"
            )
        source, names = LayerWeights(files), self.spec.names
        shard = VocabularyShard(source, ALONE, names.embedding, self.spec.vocab_size, self.spec.hidden_size)
        embedding = Embedding(source, shard, ALONE, self.spec)
        for ids_T in ids_WT:
            yield embedding(ids_T, self._inputs.positions_T)


@dataclass(frozen=True, slots=True)
class DecoderHead:
    """The final norm and the head of a model."""

    norm: Callable[[Tensor], Tensor]
    head: VocabParallelHead

    @classmethod
    def read(cls, files: WeightFiles, spec: DecoderSpec) -> DecoderHead:
        source, names = LayerWeights(files), spec.names
        name = names.embedding if spec.tied_head else names.head
        shard = VocabularyShard(source, ALONE, name, spec.vocab_size, spec.hidden_size)
        norm = new_norm(source, names.final_norm, spec.hidden_size, spec.norm)
        return cls(norm, VocabParallelHead(source, shard, ALONE, spec))

    def log_probabilities(self, x_TE: Tensor) -> Iterator[tuple[slice, Tensor]]:
        """Yields rows and their log probabilities [t, V], a few rows at a time."""
        for first in range(0, len(x_TE), _HEAD_ROWS):
            rows = slice(first, min(first + _HEAD_ROWS, len(x_TE)))
            logits_tV = self.head.logits(self.norm(x_TE[rows]))
            assert logits_tV is not None, "the only rank is rank 0"
            yield rows, logits_tV.log_softmax(dim=-1)
