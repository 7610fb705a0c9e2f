"""Attention of a layer whose heads are not those of other layers, or that reads another layer's keys and values (Gemma 4).

Keys begin in the first of the layer's planes, values end in the last one: a slot may be wider than both, and
with two planes each is as wide as keys alone.

Legend: T tokens, E hidden size, H query heads of this rank, K its key-value heads, G query heads of one group
(H / K), D head dimension, N cache slots, C columns of a slot.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from ryzanstein.worker.architectures.spec import DecoderSpec
from ryzanstein.worker.cache.kv_cache import LayerPages
from ryzanstein.worker.cache.layer_groups import layer_groups
from ryzanstein.worker.collectives.parallel import TensorParallel
from ryzanstein.worker.kernels.functions.rows import Angles
from ryzanstein.worker.model.attention import Scoring, attend
from ryzanstein.worker.model.inputs.step import StepInputs
from ryzanstein.worker.model.layers.fused import qkv_rows
from ryzanstein.worker.model.layers.linear import ColumnParallelLinear, RowParallelLinear
from ryzanstein.worker.model.layers.norm import new_norm, optional_norm
from ryzanstein.worker.model.layers.rotary import new_rotation
from ryzanstein.worker.model.layers.source import WeightSource


class OwnHeadsAttention:
    """An attention half whose queries, keys and values are normed head by head.

    A layer that reads another layer's keys computes queries alone, and stores nothing.
    """

    def __init__(self, source: WeightSource, tp: TensorParallel, spec: DecoderSpec, index: int) -> None:
        names, prefix, layer = spec.names, spec.names.layer.format(layer=index), spec.layers[index]
        own, qk_norm = spec.of_layer(index), spec.qk_norm
        assert qk_norm is not None
        assert layer.rotary is not None
        self._share = share = tp.heads(own.num_heads, own.num_kv_heads)
        self._head_dim, self._group, self._rotary = own.head_dim, layer_groups(spec).groups[index], layer.rotary
        self._stores = layer.keys_of is None
        rows = qkv_rows(own, share, prefix)
        rows = rows if self._stores else rows[:1]
        self._qkv = ColumnParallelLinear(source, own.hidden_size, rows, bias=own.qkv_bias)
        self._query_norm = optional_norm(source, prefix, names.query_norm, own.head_dim, qk_norm.norm)
        if self._stores:
            self._key_norm = optional_norm(source, prefix, names.key_norm, own.head_dim, qk_norm.norm)
            self._value_norm = new_norm(source, "", own.head_dim, replace(qk_norm.norm, weight=False))
        self._rotate = new_rotation(source.kernels)
        self._scoring = Scoring(layer.attention_scale, own.score_cap)
        width, heads = own.num_heads * own.head_dim, (share.first_head * own.head_dim, share.num_heads * own.head_dim)
        out = prefix + names.attention_out
        self._out = RowParallelLinear(source, tp, out, width, own.hidden_size, own=heads, bias=own.out_bias)

    def __call__(self, x_TE: Tensor, inputs: StepInputs, angles: Sequence[Angles], pages: LayerPages) -> Tensor:
        """Returns this rank's part of a sum over all ranks."""
        keys, heads_TAD = inputs.groups[self._group], self._qkv(x_TE, inputs.adapters).view(len(x_TE), -1, self._head_dim)
        q_THD = self._query_norm(heads_TAD[:, : self._share.num_heads].contiguous())
        self._rotate(q_THD, angles[self._rotary])
        if self._stores:
            k_TKD, v_TKD = heads_TAD[:, self._share.num_heads :].chunk(2, dim=1)
            k_TKD = self._key_norm(k_TKD.contiguous())
            self._rotate(k_TKD, angles[self._rotary])
            _store(k_TKD, self._value_norm(v_TKD.contiguous()), keys.slots_T, pages)
        q_TKGD = q_THD.view(len(x_TE), self._share.num_kv_heads, -1, self._head_dim)
        out_TKGD = torch.empty_like(q_TKGD)
        attend(q_TKGD, pages, keys.segments, self._scoring, out_TKGD)
        return self._out(out_TKGD.view(len(x_TE), -1), inputs.adapters)


def _store(k_TKD: Tensor, v_TKD: Tensor, slots_T: Tensor, pages: LayerPages) -> None:
    first_NC, last_NC = pages.slots_NC, pages.slots_NC if pages.planes_PNC is None else pages.planes_PNC[-1]
    k_TW, v_TW = k_TKD.flatten(1).to(first_NC.dtype), v_TKD.flatten(1).to(first_NC.dtype)
    first_NC[:, : k_TW.shape[1]].index_copy_(0, slots_T, k_TW)
    last_NC[:, last_NC.shape[1] - v_TW.shape[1] :].index_copy_(0, slots_T, v_TW)
