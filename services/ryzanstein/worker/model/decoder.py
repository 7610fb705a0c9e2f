"""One decoder for all architectures: embedding, layers of attention and MLP, final norm, head. Two all-reduces a layer.

Legend: T new tokens, R sampled rows, E hidden size.
"""

from __future__ import annotations

from torch import Tensor

from ryzanstein.worker.model.architectures.spec import DecoderSpec
from ryzanstein.worker.model.inputs import StepInputs
from ryzanstein.worker.model.kv_cache import KVCache
from ryzanstein.worker.model.layers.attention import Attention
from ryzanstein.worker.model.layers.mlp import GatedMLP
from ryzanstein.worker.model.layers.norm import RMSNorm
from ryzanstein.worker.model.layers.rotary import Rotary
from ryzanstein.worker.model.layers.source import WeightSource
from ryzanstein.worker.model.layers.vocabulary import VocabParallelEmbedding, VocabParallelHead, VocabularyShard
from ryzanstein.worker.model.parallel import TensorParallel


class DecoderLayer:
    """Attention, then MLP, each behind a norm and added to what came in."""

    def __init__(self, source: WeightSource, tp: TensorParallel, spec: DecoderSpec, index: int) -> None:
        prefix = spec.names.layer.format(layer=index)
        self._attention_norm = RMSNorm(source, prefix + spec.names.attention_norm, spec.hidden_size, spec.norm_eps)
        self._attention = Attention(source, tp, spec, prefix)
        self._mlp_norm = RMSNorm(source, prefix + spec.names.mlp_norm, spec.hidden_size, spec.norm_eps)
        self._mlp = GatedMLP(source, tp, spec, prefix)

    def __call__(self, x_TE: Tensor, inputs: StepInputs, angles: tuple[Tensor, Tensor], pages_NC: Tensor) -> Tensor:
        x_TE = self._attention(self._attention_norm(x_TE), inputs, angles, pages_NC).add_(x_TE)
        return self._mlp(self._mlp_norm(x_TE)).add_(x_TE)


class Decoder:
    """This rank's part of a model. Built from whatever `source` gives: weights, or only their shapes."""

    def __init__(self, source: WeightSource, tp: TensorParallel, spec: DecoderSpec) -> None:
        names = spec.names
        embedding = VocabularyShard(source, tp, names.embedding, spec.vocab_size, spec.hidden_size)
        self._embedding = VocabParallelEmbedding(embedding, tp)
        self._layers = [DecoderLayer(source, tp, spec, index) for index in range(spec.num_layers)]
        self._final_norm = RMSNorm(source, names.final_norm, spec.hidden_size, spec.norm_eps)
        head = embedding if spec.tied_head else VocabularyShard(source, tp, names.head, spec.vocab_size, spec.hidden_size)
        self.head = VocabParallelHead(head, tp, spec.vocab_size)
        self._rotary = Rotary(spec.rotary, spec.head_dim, embedding.weight_WE.device)

    def hidden(self, inputs: StepInputs, cache: KVCache) -> Tensor:
        """Runs the step, fills the cache, and returns what the head reads, [R, E]."""
        x_TE = self._embedding(inputs.ids_T)
        angles = self._rotary.angles(inputs.positions_T, x_TE.dtype)
        for index, layer in enumerate(self._layers):
            x_TE = layer(x_TE, inputs, angles, cache.layer(index))
        return self._final_norm(x_TE[inputs.last_R])
