"""The attention half of a layer: a stacked product, rotation, cache, attention, an output product.

The caller all-reduces the result.

Legend: T tokens, E hidden size, H query heads of this rank, K its key-value heads, G query heads of
one group (H / K), D head dimension, N cache slots, C = 2 K D columns of a slot.
With gates, those of the rank's heads follow keys and values in a row of the stacked product.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from ryzanstein.worker.architectures.spec import DecoderSpec
from ryzanstein.worker.cache.kv_cache import LayerPages
from ryzanstein.worker.cache.layer_groups import layer_groups
from ryzanstein.worker.collectives.parallel import HeadShare, TensorParallel
from ryzanstein.worker.kernels.functions.rows import Angles
from ryzanstein.worker.kernels.functions.steps.program import ATTEND, STORE
from ryzanstein.worker.model.attention import Scoring, attend
from ryzanstein.worker.model.inputs.step import StepInputs
from ryzanstein.worker.model.layers.fused import qkv_rows
from ryzanstein.worker.model.layers.linear import ColumnParallelLinear, RowParallelLinear
from ryzanstein.worker.model.layers.mlp import new_sigmoid
from ryzanstein.worker.model.layers.qk_norm import head_norms, new_qk_norm
from ryzanstein.worker.model.layers.rotary import new_rotation
from ryzanstein.worker.model.layers.source import WeightSource
from ryzanstein.worker.model.program.ops import Last, NotNative, Ops, RowNorm, Shape


class Attention:
    """An attention half: stores the step's keys and values, then attends.

    Every query sees its sequence, or the part of it in the layer's window.
    """

    def __init__(self, source: WeightSource, tp: TensorParallel, spec: DecoderSpec, index: int) -> None:
        prefix, layer = spec.names.layer.format(layer=index), spec.layers[index]
        self._share = tp.heads(spec.num_heads, spec.num_kv_heads)
        self._head_dim, self._clip, self._clip_last = spec.head_dim, spec.qkv_clip, spec.clip_after_norm
        self._group, self._rotary = layer_groups(spec).groups[index], layer.rotary
        self._grows = layer.rotary is not None and spec.rotaries[layer.rotary].growth is not None
        self._norm_last = spec.qk_norm is not None and spec.qk_norm.after_rotation
        self._rotation = None if source.kernels is None or self._norm_last else source.kernels.rotation
        self._rotate = new_rotation(source.kernels)
        self._scoring = Scoring(layer.attention_scale, spec.score_cap, _read_sinks(source, spec, self._share, prefix))
        self._qkv = ColumnParallelLinear(
            source,
            spec.hidden_size,
            qkv_rows(spec, self._share, prefix),
            bias=spec.qkv_bias,
            transposed=spec.transposed,
        )
        self._sigmoid = new_sigmoid(source.kernels) if spec.gated_attention else None
        self._qk_norm = new_qk_norm(source, tp, spec, prefix)
        self._out = RowParallelLinear(
            source,
            tp,
            prefix + spec.names.attention_out,
            spec.num_heads * spec.head_dim,
            spec.hidden_size,
            own=(self._share.first_head * spec.head_dim, self._share.num_heads * spec.head_dim),
            bias=spec.out_bias,
            transposed=spec.transposed,
        )

    def __call__(self, x_TE: Tensor, inputs: StepInputs, angles: Sequence[Angles], pages: LayerPages) -> Tensor:
        """Returns this rank's part of a sum over all ranks."""
        num_tokens, num_heads, num_kv_heads = len(x_TE), self._share.num_heads, self._share.num_kv_heads
        qkv_T = self._qkv(x_TE, inputs.adapters)
        query_width = num_heads * self._head_dim
        self._prepare(qkv_T)
        keys = inputs.groups[self._group]
        self._rotate_and_store(qkv_T, keys.slots_T, angles, pages.slots_NC)
        if self._rotary is not None and (growth_T1 := angles[self._rotary].growth_T1) is not None:
            qkv_T[:, :query_width].mul_(growth_T1)
        if keys.sealing is not None and pages.cold_BX is not None:
            keys.sealing.run(pages.slots_NC, pages.cold_BX)
        if keys.bounding is not None and pages.bounds_B2Y is not None:
            keys.bounding.run(pages.slots_NC, pages.bounds_B2Y)
        q_TKGD = qkv_T[:, :query_width].view(num_tokens, num_kv_heads, -1, self._head_dim)
        out_TKGD = torch.empty(q_TKGD.shape, dtype=x_TE.dtype, device=x_TE.device)
        attend(q_TKGD, pages, keys.segments, self._scoring, out_TKGD)
        out_T = out_TKGD.view(num_tokens, query_width)
        if self._sigmoid is not None:
            out_T.mul_(self._sigmoid(qkv_T[:, -query_width:].contiguous()))
        return self._out(out_T, inputs.adapters)

    def emit(self, ops: Ops, source: int, norm: RowNorm | None, pages: LayerPages) -> Last:
        """Adds its ops but for the last product. Raises NotNative."""
        norms, share = head_norms(self._qk_norm), self._share
        if self._sigmoid is not None or self._norm_last or self._grows:
            raise NotNative("gated attention, norms after the rotation, or queries that grow")
        columns, query_width = pages.slots_NC.shape[1], share.num_heads * self._head_dim
        memory, stack = ops.pages(pages), self._qkv.native()
        width = stack.width
        ops.share(self._group, Shape.of(share, self._head_dim, pages, width))
        qkv, attended = ops.product(stack, source, "qkv", norm=norm), ops.buffer("attended", query_width)
        called = self._qk_norm is not None and norms is None
        if called:
            ops.call(qkv, width, lambda qkv_T, _: self._prepare(qkv_T))
        ops.add(
            STORE,
            in_=qkv,
            num_outputs=width,
            group=self._group,
            rotary=-1 if self._rotary is None else self._rotary,
            num_heads=share.num_heads,
            num_kv_heads=share.num_kv_heads,
            head_dim=self._head_dim,
            columns=columns,
            clip=0.0 if called else self._clip or 0.0,
            clips_last=self._clip_last,
            half=pages.slots_NC.dtype == torch.float16,
            **memory,
            **ops.head_norms(norms),
        )
        ops.add(
            ATTEND,
            in_=qkv,
            out=attended,
            num_outputs=width,
            group=self._group,
            factor=self._scoring.scale,
            cap=self._scoring.cap or 0.0,
            sinks=ops.address(self._scoring.sinks_KG),
            **memory,
        )
        return Last(self._out.native(), attended)

    def _prepare(self, qkv_T: Tensor) -> None:
        """Clips and normalizes in place, if the architecture does."""
        if self._clip is not None and not self._clip_last:
            qkv_T.clamp_(-self._clip, self._clip)
        if not self._norm_last:
            self._norm(qkv_T)
        if self._clip is not None and self._clip_last:
            qkv_T.clamp_(-self._clip, self._clip)

    def _norm(self, qkv_T: Tensor) -> None:
        if self._qk_norm is not None:
            qk_THD = self._heads(qkv_T)
            self._qk_norm(qk_THD[:, : self._share.num_heads], qk_THD[:, self._share.num_heads :])

    def _rotate_and_store(self, qkv_T: Tensor, slots_T: Tensor, angles: Sequence[Angles], pages_NC: Tensor) -> None:
        """Rotates queries and keys in place, if the architecture does; stores keys and values."""
        kv_TC = qkv_T[:, self._share.num_heads * self._head_dim :][:, : pages_NC.shape[1]]
        if self._rotary is not None and self._rotation is not None:
            self._rotation.rotate_and_store(self._heads(qkv_T), angles[self._rotary], kv_TC, pages_NC, slots_T)
            return
        if self._rotary is not None:
            self._rotate(self._heads(qkv_T), angles[self._rotary])
        if self._norm_last:
            self._norm(qkv_T)
        pages_NC.index_copy_(0, slots_T, kv_TC.to(pages_NC.dtype))

    def _heads(self, qkv_T: Tensor) -> Tensor:
        """Returns the heads of queries, then those of keys."""
        num_heads = self._share.num_heads + self._share.num_kv_heads
        return qkv_T[:, : num_heads * self._head_dim].view(len(qkv_T), num_heads, self._head_dim)


def _read_sinks(source: WeightSource, spec: DecoderSpec, share: HeadShare, prefix: str) -> Tensor | None:
    """Returns the sinks of this rank's heads in float32, [K, G], if the architecture has any."""
    if spec.names.sinks is None:
        return None
    sinks_H = source.new(share.num_heads).float()
    source.read(prefix + spec.names.sinks, (spec.num_heads,), sinks_H, start=share.first_head)
    return sinks_H.view(share.num_kv_heads, -1)
