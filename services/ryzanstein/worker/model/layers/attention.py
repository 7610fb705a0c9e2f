"""The attention half of a layer: one stacked product, rotation, the cache, attention, one product with the all-reduce.

Legend: T tokens, E hidden size, H query heads of this rank, K its key-value heads, G query heads of one group (H / K),
D head dimension, N cache slots, C = 2 K D columns of a slot.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ryzanstein.worker.model.architectures.spec import DecoderSpec
from ryzanstein.worker.model.attention import attend
from ryzanstein.worker.model.inputs import StepInputs
from ryzanstein.worker.model.layers.linear import RowParallelLinear, qkv_linear
from ryzanstein.worker.model.layers.rotary import rotate
from ryzanstein.worker.model.layers.source import WeightSource
from ryzanstein.worker.model.parallel import TensorParallel


class Attention:
    """Writes the step's keys and values into the cache, then lets every query look at its sequence."""

    def __init__(self, source: WeightSource, tp: TensorParallel, spec: DecoderSpec, prefix: str) -> None:
        names = (prefix + spec.names.query, prefix + spec.names.key, prefix + spec.names.value)
        self._share = tp.heads(spec.num_heads, spec.num_kv_heads)
        self._head_dim = spec.head_dim
        heads = (spec.num_heads, spec.num_kv_heads, spec.head_dim)
        self._qkv = qkv_linear(source, names, spec.hidden_size, heads, self._share, bias=spec.attention_bias)
        width = spec.num_heads * spec.head_dim
        self._out = RowParallelLinear(
            source, tp, prefix + spec.names.attention_out, width, spec.hidden_size, bias=spec.attention_bias
        )

    def __call__(self, x_TE: Tensor, inputs: StepInputs, angles: tuple[Tensor, Tensor], pages_NC: Tensor) -> Tensor:
        num_tokens, num_heads, num_kv_heads = len(x_TE), self._share.num_heads, self._share.num_kv_heads
        qkv_T = self._qkv(x_TE)
        query_width, rotated_width = num_heads * self._head_dim, (num_heads + num_kv_heads) * self._head_dim
        rotate(qkv_T[:, :rotated_width].view(num_tokens, -1, self._head_dim), *angles)
        pages_NC.index_copy_(0, inputs.slots_T, qkv_T[:, query_width:])
        q_TKGD = qkv_T[:, :query_width].view(num_tokens, num_kv_heads, -1, self._head_dim)
        out_TKGD = torch.empty(q_TKGD.shape, dtype=x_TE.dtype, device=x_TE.device)
        attend(q_TKGD, pages_NC, inputs.segments, out_TKGD)
        return self._out(out_TKGD.view(num_tokens, query_width))
