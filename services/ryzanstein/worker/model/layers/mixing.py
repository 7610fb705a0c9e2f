"""The first half of a layer, which mixes a token with those before it.

It is attention, a short convolution, or a rule that keeps a state; or attention beside such a rule.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from torch import Tensor

from ryzanstein.worker.architectures.mixers import DeltaSpec, StateSpec
from ryzanstein.worker.architectures.spec import DecoderSpec
from ryzanstein.worker.cache.kv_cache import LayerPages
from ryzanstein.worker.collectives.parallel import TensorParallel
from ryzanstein.worker.kernels.functions.rows import Angles
from ryzanstein.worker.model.inputs.step import StepInputs
from ryzanstein.worker.model.layers.attention import Attention
from ryzanstein.worker.model.layers.convolution import ShortConvolution
from ryzanstein.worker.model.layers.latent_attention import LatentAttention
from ryzanstein.worker.model.layers.layerwise.attention import OwnHeadsAttention
from ryzanstein.worker.model.layers.recurrent.delta import GatedDelta
from ryzanstein.worker.model.layers.recurrent.mamba import StateSpace
from ryzanstein.worker.model.layers.source import WeightSource


class Mixing(Protocol):
    """A function of a step's tokens and of what the cache has of earlier ones."""

    def __call__(self, x_TE: Tensor, inputs: StepInputs, angles: Sequence[Angles], pages: LayerPages) -> Tensor:
        """Returns this rank's part of a sum over all ranks."""
        ...


def mixing_half(source: WeightSource, tp: TensorParallel, spec: DecoderSpec, index: int) -> Mixing | None:
    """Returns the first half of layer `index`, or None if it has none."""
    layer = spec.layers[index]
    if layer.convolution is not None:
        return ShortConvolution(source, tp, spec, layer.convolution, index)
    rule = None if layer.state is None else _rule(source, tp, spec, layer.state, index)
    attention = _attention(source, tp, spec, index) if layer.attention else None
    return rule if attention is None else attention if rule is None else _Both(attention, rule, spec)


class _Both:
    """Attention and a rule that read the same input, and whose outputs are added."""

    def __init__(self, attention: Mixing, rule: Mixing, spec: DecoderSpec) -> None:
        self._attention, self._rule, self._factors = attention, rule, spec.factors

    def __call__(self, x_TE: Tensor, inputs: StepInputs, angles: Sequence[Angles], pages: LayerPages) -> Tensor:
        """Returns this rank's part of a sum over all ranks."""
        ruled_TE = self._rule(x_TE, inputs, angles, pages)
        attended_TE = self._attention(x_TE * self._factors.attention_in, inputs, angles, pages)
        return ruled_TE.add_(attended_TE.mul_(self._factors.attention_out))


def _rule(source: WeightSource, tp: TensorParallel, spec: DecoderSpec, state: StateSpec, index: int) -> Mixing:
    if isinstance(state, DeltaSpec):
        return GatedDelta(source, tp, spec, state, index)
    return StateSpace(source, tp, spec, state, index)


def _attention(source: WeightSource, tp: TensorParallel, spec: DecoderSpec, index: int) -> Mixing:
    if spec.layers[index].heads is not None:
        return OwnHeadsAttention(source, tp, spec, index)
    if spec.latent is None:
        return Attention(source, tp, spec, index)
    return LatentAttention(source, tp, spec, spec.latent, index)
