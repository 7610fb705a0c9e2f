"""A gated short convolution (LFM2, Liquid AI 2025), each channel of which sees the last few tokens.

The input is projected to two gates and a signal. Signal times first gate is what the cache keeps of a
token; a sum over the last tokens, with weights for each channel, times the second gate is projected
back. The channels are divided over the ranks as key-value heads are: a head has an equal share of
them, so a slot, and a page that leaves the ranks, has heads as those of attention have.

What a token gives to later ones is always read from the cache, also within a step: it is rounded there,
and the result must not depend on where a prompt was cut.

Legend: T tokens, E hidden size, F channels of this rank, K its key-value heads, G channels of a head,
P planes, L length of the convolution, N cache slots, C columns of a slot, D head dimension.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from ryzanstein.worker.architectures.mixers import ConvolutionSpec
from ryzanstein.worker.architectures.spec import DecoderSpec
from ryzanstein.worker.cache.kv_cache import LayerPages
from ryzanstein.worker.cache.layer_groups import layer_groups
from ryzanstein.worker.collectives.parallel import TensorParallel
from ryzanstein.worker.kernels.functions.rows import Angles
from ryzanstein.worker.model.inputs.step import StepInputs
from ryzanstein.worker.model.layers.linear import ColumnParallelLinear, RowParallelLinear, Rows
from ryzanstein.worker.model.layers.source import WeightSource


class ShortConvolution:
    """A first half of a layer without attention: stores the step's channels, then adds up the last tokens."""

    def __init__(
        self, source: WeightSource, tp: TensorParallel, spec: DecoderSpec, convolution: ConvolutionSpec, index: int
    ) -> None:
        names, prefix, size = spec.names, spec.names.layer.format(layer=index), spec.hidden_size
        share = tp.heads(spec.num_heads, spec.num_kv_heads, apart=spec.heads_apart)
        of_head = size // spec.num_kv_heads
        first, count = share.first_kv_head * of_head, share.num_kv_heads * of_head
        self._group = layer_groups(spec).groups[index]
        self._slots = _Slots(share.num_kv_heads, of_head, convolution.planes, spec.head_dim)
        self._in = ColumnParallelLinear(
            source,
            size,
            [Rows(prefix + names.convolution_in, 3 * size, tuple((part * size + first, count) for part in range(3)))],
            bias=convolution.bias,
        )
        weight_F1L = source.new(count, 1, convolution.length)
        source.read(f"{prefix}{names.convolution}.weight", (size, 1, convolution.length), weight_F1L, start=first)
        self._weight_LF = weight_F1L[:, 0].t().contiguous()
        self._bias_F = source.new(count) if convolution.bias else None
        if self._bias_F is not None:
            source.read(f"{prefix}{names.convolution}.bias", (size,), self._bias_F, start=first)
        out = prefix + names.convolution_out
        self._out = RowParallelLinear(source, tp, out, size, size, own=(first, count), bias=convolution.bias)

    def __call__(self, x_TE: Tensor, inputs: StepInputs, angles: Sequence[Angles], pages: LayerPages) -> Tensor:
        """Returns this rank's part of a sum over all ranks."""
        del angles  # the convolution itself knows the order of tokens
        keys, planes_PNC = inputs.groups[self._group], pages.planes_PNC
        assert planes_PNC is not None
        assert keys.taps_LT is not None
        gate_TF, out_gate_TF, signal_TF = self._in(x_TE, inputs.adapters).chunk(3, dim=1)
        own_TF = gate_TF * signal_TF
        self._slots.write(own_TF, planes_PNC, keys.slots_T)
        sum_TF = own_TF * self._weight_LF[-1]
        for taps_T, weight_F in zip(keys.taps_LT, self._weight_LF, strict=False):
            sum_TF += self._slots.read(planes_PNC, taps_T, own_TF.dtype).mul_(weight_F)
        if self._bias_F is not None:
            sum_TF += self._bias_F
        return self._out(sum_TF.mul_(out_gate_TF), inputs.adapters)


class _Slots:
    """Channels in slots that have room for keys and values of heads, in one plane or in several."""

    def __init__(self, num_heads: int, of_head: int, num_planes: int, head_dim: int) -> None:
        self._heads, self._of_head, self._shape = num_heads, of_head, (num_planes, 2, head_dim)
        self._unused = num_planes * 2 * head_dim - of_head

    def write(self, channels_TF: Tensor, planes_PNC: Tensor, slots_T: Tensor) -> None:
        """Stores the channels of a step's tokens."""
        channels_TKG = F.pad(channels_TF.view(len(channels_TF), self._heads, self._of_head), (0, self._unused))
        columns_P2TKD = channels_TKG.view(len(channels_TF), self._heads, *self._shape).permute(2, 0, 3, 1, 4)
        planes_PNC.index_copy_(1, slots_T, columns_P2TKD.flatten(2).to(planes_PNC.dtype))

    def read(self, planes_PNC: Tensor, slots_T: Tensor, dtype: torch.dtype) -> Tensor:
        """Returns the channels in some slots, [T, F]."""
        num_planes, parts, head_dim = self._shape
        columns_PTC = planes_PNC.index_select(1, slots_T).to(dtype)
        columns_PT2KD = columns_PTC.view(num_planes, len(slots_T), parts, self._heads, head_dim)
        channels_TKG = columns_PT2KD.permute(1, 3, 0, 2, 4).flatten(2)[..., : self._of_head]
        return channels_TKG.reshape(len(slots_T), -1)
