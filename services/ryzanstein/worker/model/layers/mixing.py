"""The first half of a layer, which mixes a token with those before it: attention, a short convolution, or a delta rule."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from torch import Tensor

from ryzanstein.worker.architectures.spec import DecoderSpec
from ryzanstein.worker.cache.kv_cache import LayerPages
from ryzanstein.worker.collectives.parallel import TensorParallel
from ryzanstein.worker.kernels.functions.rows import Angles
from ryzanstein.worker.model.inputs.step import StepInputs
from ryzanstein.worker.model.layers.attention import Attention
from ryzanstein.worker.model.layers.convolution import ShortConvolution
from ryzanstein.worker.model.layers.delta.layer import GatedDelta
from ryzanstein.worker.model.layers.latent_attention import LatentAttention
from ryzanstein.worker.model.layers.source import WeightSource


class Mixing(Protocol):
    """A function of a step's tokens and of what the cache has of earlier ones."""

    def __call__(self, x_TE: Tensor, inputs: StepInputs, angles: Sequence[Angles], pages: LayerPages) -> Tensor:
        """Returns this rank's part of a sum over all ranks."""
        ...


def mixing_half(source: WeightSource, tp: TensorParallel, spec: DecoderSpec, index: int) -> Mixing:
    """Returns the first half of layer `index`."""
    if (convolution := spec.layers[index].convolution) is not None:
        return ShortConvolution(source, tp, spec, convolution, index)
    if (delta := spec.layers[index].delta) is not None:
        return GatedDelta(source, tp, spec, delta, index)
    if spec.latent is None:
        return Attention(source, tp, spec, index)
    return LatentAttention(source, tp, spec, spec.latent, index)
