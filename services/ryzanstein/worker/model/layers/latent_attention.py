"""Multi-head latent attention (DeepSeek-V2, 2024), absorbed.

The keys and values of heads are never computed. Queries are projected to the latents, multi-query
attention runs over the latents, and its output is projected to the heads' values.

A cache slot is one key for all heads: its rotated numbers, then the latent. It is also its own
value, so that any kernel with one head dimension works; only the latent's columns of the output are
used. Every rank computes and stores all latents; the heads are divided.

Legend: T tokens, E hidden size, H query heads of this rank, R rotated numbers, L numbers of a
latent, C = R + L columns of a slot, P plain numbers of a head's query or key, D = P + R, V numbers
of its value, N cache slots.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from ryzanstein.worker.architectures.spec import DecoderSpec, LatentSpec, NormSpec
from ryzanstein.worker.cache.kv_cache import LayerPages
from ryzanstein.worker.cache.layer_groups import layer_groups
from ryzanstein.worker.collectives.parallel import HeadShare, TensorParallel
from ryzanstein.worker.kernels.functions.rows import Angles
from ryzanstein.worker.model.attention import Scoring, attend
from ryzanstein.worker.model.inputs.step import StepInputs
from ryzanstein.worker.model.layers.linear import ColumnParallelLinear, RowParallelLinear, Rows
from ryzanstein.worker.model.layers.norm import new_norm
from ryzanstein.worker.model.layers.rotary import new_rotation
from ryzanstein.worker.model.layers.source import WeightSource
from ryzanstein.worker.products.adapted import AdapterRows
from ryzanstein.worker.products.floats import ByHead


class LatentAttention:
    """An attention half: stores the step's latents, then attends.

    Every query sees the latents of its sequence, or those in the layer's window.
    """

    def __init__(self, source: WeightSource, tp: TensorParallel, spec: DecoderSpec, latent: LatentSpec, index: int) -> None:
        layer, prefix = spec.layers[index], spec.names.layer.format(layer=index)
        share = tp.heads(spec.num_heads, spec.num_kv_heads)
        self._group, self._scoring = layer_groups(spec).groups[index], Scoring(layer.attention_scale, spec.score_cap)
        self._latents = _Latents(source, spec, latent, prefix)
        self._queries = _Queries(source, spec, latent, share, prefix)
        weights = _key_value_weights(source, spec, latent, share, prefix)
        self._to_latents, self._to_values = (ByHead(weight_HIO, source.kernels) for weight_HIO in weights)
        self._out = RowParallelLinear(
            source,
            tp,
            prefix + spec.names.attention_out,
            spec.num_heads * latent.value_dim,
            spec.hidden_size,
            own=(share.first_head * latent.value_dim, share.num_heads * latent.value_dim),
            bias=spec.out_bias,
        )

    def __call__(self, x_TE: Tensor, inputs: StepInputs, angles: Sequence[Angles], pages: LayerPages) -> Tensor:
        """Returns this rank's part of a sum over all ranks."""
        keys = inputs.groups[self._group]
        pages.slots_NC.index_copy_(0, keys.slots_T, self._latents(x_TE, angles[0], inputs.adapters).to(pages.slots_NC.dtype))
        plain_THP, rotated_THR = self._queries(x_TE, angles[0], inputs.adapters)
        q_THC = torch.cat([rotated_THR, self._to_latents(plain_THP)], dim=-1)
        found_THC = torch.empty_like(q_THC)
        attend(q_THC.unsqueeze(1), pages, keys.segments, self._scoring, found_THC.unsqueeze(1))
        values_THV = self._to_values(found_THC[..., rotated_THR.shape[-1] :])
        return self._out(values_THV.flatten(1), inputs.adapters)


class _Latents:
    """The projection of a token to its cache slot, the same on every rank."""

    def __init__(self, source: WeightSource, spec: DecoderSpec, latent: LatentSpec, prefix: str) -> None:
        names, width = spec.names, latent.rank + latent.rotary_dim
        rows = Rows(prefix + names.latent, width, ((latent.rank, latent.rotary_dim), (0, latent.rank)))
        self._down = ColumnParallelLinear(source, spec.hidden_size, [rows], bias=spec.qkv_bias)
        self._norm = new_norm(source, prefix + names.latent_norm, latent.rank, latent.norm)
        self._rank, self._rotate = latent.rank, new_rotation(source.kernels)

    def __call__(self, x_TE: Tensor, angles: Angles, rows: AdapterRows | None) -> Tensor:
        slots_TC = self._down(x_TE, rows)
        self._rotate(slots_TC.unsqueeze(1), angles)
        latents_TL = slots_TC[:, -self._rank :]
        latents_TL.copy_(self._norm(latents_TL))
        return slots_TC


class _Queries:
    """The projection from x or a query latent to this rank's queries, plain and rotated numbers."""

    def __init__(self, source: WeightSource, spec: DecoderSpec, latent: LatentSpec, share: HeadShare, prefix: str) -> None:
        self._plain_dim, self._head_dim = latent.plain_dim, latent.plain_dim + latent.rotary_dim
        rank = latent.query_rank
        self._latents = None if rank is None else _QueryLatents(source, spec, rank, latent.norm, prefix)
        rows = _head_rows(prefix + spec.names.query, spec, share, self._head_dim)
        self._up = ColumnParallelLinear(source, rank or spec.hidden_size, [rows], bias=False)
        self._rotate = new_rotation(source.kernels)

    def __call__(self, x_TE: Tensor, angles: Angles, rows: AdapterRows | None) -> tuple[Tensor, Tensor]:
        latents_T = x_TE if self._latents is None else self._latents(x_TE, rows)
        q_THD = self._up(latents_T, rows).view(len(x_TE), -1, self._head_dim)
        rotated_THR = q_THD[..., self._plain_dim :]
        self._rotate(rotated_THR, angles)
        return q_THD[..., : self._plain_dim], rotated_THR


class _QueryLatents:
    """The projection to the latents of queries, the same on every rank."""

    def __init__(self, source: WeightSource, spec: DecoderSpec, rank: int, norm: NormSpec, prefix: str) -> None:
        rows = Rows(prefix + spec.names.query_latent, rank, ((0, rank),))
        self._down = ColumnParallelLinear(source, spec.hidden_size, [rows], bias=spec.qkv_bias)
        self._norm = new_norm(source, prefix + spec.names.query_latent_norm, rank, norm)

    def __call__(self, x_TE: Tensor, rows: AdapterRows | None) -> Tensor:
        return self._norm(self._down(x_TE, rows))


def _key_value_weights(
    source: WeightSource, spec: DecoderSpec, latent: LatentSpec, share: HeadShare, prefix: str
) -> tuple[Tensor, Tensor]:
    """Returns the weights from a head's query to the latents, and from the latents to its value.

    They are two parts of one stored projection.
    """
    rows = _head_rows(prefix + spec.names.value, spec, share, latent.plain_dim + latent.value_dim)
    weight_OL = source.new(rows.count, latent.rank)
    source.read(f"{rows.name}.weight", (rows.total, latent.rank), weight_OL, start=rows.pieces[0][0])
    weight_HOL = weight_OL.view(share.num_heads, -1, latent.rank)
    return weight_HOL[:, : latent.plain_dim], weight_HOL[:, latent.plain_dim :].transpose(1, 2)


def _head_rows(name: str, spec: DecoderSpec, share: HeadShare, width: int) -> Rows:
    return Rows(name, spec.num_heads * width, ((share.first_head * width, share.num_heads * width),))
