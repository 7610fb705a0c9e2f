"""A gated delta rule in the place of attention (Yang et al. 2025, "Gated Delta Networks"; Qwen 3.5, Qwen 3 Next).

The input is projected to queries, keys and values, which a short convolution mixes with those of the last
tokens, to a gate of the output, and to two numbers of each head: how far its matrix decays, and how
strongly it is written. Whole key heads, with their value heads, are divided over the ranks.

What a head keeps is in slots (see `cache.states`), never in pages. Tokens are added to it one by one in
one order, so the result does not depend on where a prompt was cut.

Legend: T tokens, E hidden size, F channels of the convolution on this rank, L tokens that it sees, J key
heads of this rank, H its value heads, K key dimension, V value dimension.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate
from typing import Protocol

from torch import Tensor

from ryzanstein.worker.architectures.mixers import DeltaNames, DeltaSpec
from ryzanstein.worker.architectures.spec import DecoderSpec
from ryzanstein.worker.cache.kv_cache import LayerPages
from ryzanstein.worker.cache.state_sizes import DeltaShare
from ryzanstein.worker.cache.states import LayerStates
from ryzanstein.worker.collectives.parallel import TensorParallel
from ryzanstein.worker.kernels.functions.rows import Angles
from ryzanstein.worker.model.inputs.states.inputs import StateInputs
from ryzanstein.worker.model.inputs.step import StepInputs
from ryzanstein.worker.model.layers.linear import ColumnParallelLinear, RowParallelLinear, Rows, open_site
from ryzanstein.worker.model.layers.mlp import new_activation
from ryzanstein.worker.model.layers.recurrent.convolution import Piece, new_convolution, read_taps
from ryzanstein.worker.model.layers.recurrent.delta_native import NativeDelta
from ryzanstein.worker.model.layers.recurrent.delta_rule import HeadNumbers, TorchDelta, read_by_head
from ryzanstein.worker.model.layers.source import WeightSource
from ryzanstein.worker.products.adapted import AdapterRows
from ryzanstein.worker.products.floats import unpacked


class GatedDelta:
    """A first half of a layer without attention: adds the step's tokens to the states of their sequences."""

    def __init__(self, source: WeightSource, tp: TensorParallel, spec: DecoderSpec, delta: DeltaSpec, index: int) -> None:
        names, prefix = spec.names.delta, spec.names.layer.format(layer=index)
        assert names is not None
        share = DeltaShare.of(delta, tp)
        rows = _rows_by_key_head if names.qkv == names.z else _rows
        self._index, self._num_channels = index, share.slot.num_channels
        adaptable = not delta.tiled  # an adapter knows the value heads in the order of a checkpoint
        projections = rows(names, prefix, share)
        self._in = ColumnParallelLinear(source, spec.hidden_size, projections, bias=False, adaptable=adaptable)
        self._strengths_site = open_site(source, spec.hidden_size, _strength_rows(names, prefix, share)) if adaptable else None
        self._strengths = unpacked(_strengths(source, names, prefix, share, spec.hidden_size), None, source.kernels)
        weight_LF = read_taps(source, prefix + names.convolution, _channels(share), (delta.channels, delta.length))
        self._convolve = new_convolution(source.kernels, share.slot, weight_LF, None)
        self._activate = new_activation(source, spec.activation)
        numbers = HeadNumbers.read(source, names, prefix, share, spec.norm.eps)
        self._rule = _new_rule(source, share, numbers)
        self._out = _output(source, tp, prefix + names.out, share, spec.hidden_size)

    def __call__(self, x_TE: Tensor, inputs: StepInputs, angles: Sequence[Angles], pages: LayerPages) -> Tensor:
        """Returns this rank's part of a sum over all ranks."""
        del angles, pages  # it has neither positions nor keys
        assert inputs.states is not None
        states = inputs.states.cache.layer(self._index)
        in_T = self._in(x_TE, inputs.adapters)
        qkv_TF, gate_T = in_T[:, : self._num_channels], in_T[:, self._num_channels :]
        strengths_T2H = self._strengths(x_TE.float())
        if inputs.adapters is not None and self._strengths_site is not None:
            self._strengths_site.add(x_TE, strengths_T2H, inputs.adapters)
        mixed_TF = self._activate(self._convolve(qkv_TF, states, inputs.states))
        return self._out(self._rule(mixed_TF, strengths_T2H, gate_T, states, inputs.states), inputs.adapters)


class _Rule(Protocol):
    """The rule of one layer; see `TorchDelta`."""

    def __call__(
        self, mixed_TF: Tensor, strengths_T2H: Tensor, gate_T: Tensor, states: LayerStates, inputs: StateInputs
    ) -> Tensor: ...


def _new_rule(source: WeightSource, share: DeltaShare, numbers: HeadNumbers) -> _Rule:
    return TorchDelta(share, numbers) if source.kernels is None else NativeDelta(source.kernels.delta, share, numbers)


class _SumOfPieces:
    """A projection of which this rank holds several pieces of the input columns: the sum of their products."""

    def __init__(self, pieces: Sequence[RowParallelLinear], widths: Sequence[int]) -> None:
        self._pieces = list(zip(pieces, accumulate(widths, initial=0), widths, strict=False))

    def __call__(self, x_TI: Tensor, rows: AdapterRows | None = None) -> Tensor:
        first, *others = (piece(x_TI.narrow(1, start, count), rows) for piece, start, count in self._pieces)
        for other in others:
            first.add_(other)
        return first


def _output(
    source: WeightSource, tp: TensorParallel, name: str, share: DeltaShare, hidden_size: int
) -> RowParallelLinear | _SumOfPieces:
    width, owns = share.delta.num_value_heads * share.delta.value_dim, share.value_rows()
    adaptable = not share.delta.tiled
    pieces = [RowParallelLinear(source, tp, name, width, hidden_size, own=own, bias=False, adaptable=adaptable) for own in owns]
    return pieces[0] if len(pieces) == 1 else _SumOfPieces(pieces, [count for _, count in owns])


def _rows(names: DeltaNames, prefix: str, share: DeltaShare) -> list[Rows]:
    """Returns the rows of queries, keys and values, then those of gates."""
    delta = share.delta
    qkv = Rows(prefix + names.qkv, delta.channels, _channels(share))
    return [qkv, Rows(prefix + names.z, delta.num_value_heads * delta.value_dim, share.value_rows())]


def _rows_by_key_head(names: DeltaNames, prefix: str, share: DeltaShare) -> list[Rows]:
    """Returns them where a key head's are side by side."""
    delta = share.delta
    values = delta.num_value_heads // delta.num_key_heads * delta.value_dim
    sizes = (delta.key_dim, delta.key_dim, values, values)
    heads = range(share.first_key_head, share.first_key_head + share.num_key_heads)
    pieces = [(head * sum(sizes) + sum(sizes[:part]), size) for part, size in enumerate(sizes) for head in heads]
    return [Rows(prefix + names.qkv, delta.num_key_heads * sum(sizes), tuple(pieces))]


def _channels(share: DeltaShare) -> tuple[Piece, ...]:
    """Returns this rank's queries, keys and values among those of all."""
    delta = share.delta
    keys = (share.first_key_head * delta.key_dim, share.num_key_heads * delta.key_dim)
    whole = delta.num_key_heads * delta.key_dim
    return (keys, (whole + keys[0], keys[1]), *share.value_rows(2 * whole))


def _strength_rows(names: DeltaNames, prefix: str, share: DeltaShare) -> list[Rows]:
    """Returns the rows of `_strengths`: those of writing, then those of decay."""
    delta = share.delta
    if names.a != names.b:
        return [Rows(prefix + name, delta.num_value_heads, share.value_heads) for name in (names.b, names.a)]
    group = delta.num_value_heads // delta.num_key_heads
    heads = range(share.first_key_head, share.first_key_head + share.num_key_heads)
    pieces = [((2 * head + part) * group, group) for part in range(2) for head in heads]
    return [Rows(prefix + names.b, 2 * delta.num_value_heads, tuple(pieces))]


def _strengths(source: WeightSource, names: DeltaNames, prefix: str, share: DeltaShare, num_inputs: int) -> Tensor:
    """Returns the projection to each value head's strength of writing and to its decay, [2 H, E] in float32."""
    delta, count = share.delta, share.num_value_heads
    weight_2HE = source.new(2 * count, num_inputs).float()
    if names.a != names.b:
        for out_HE, name in zip(weight_2HE.chunk(2), (names.b, names.a), strict=True):
            read_by_head(source, f"{prefix}{name}.weight", share, out_HE)
        return weight_2HE
    group = delta.num_value_heads // delta.num_key_heads
    for head in range(share.num_key_heads):
        for part in range(2):
            out_GE = weight_2HE.narrow(0, part * count + head * group, group)
            start = (2 * (share.first_key_head + head) + part) * group
            source.read(f"{prefix}{names.b}.weight", (2 * delta.num_value_heads, num_inputs), out_GE, start=start)
    return weight_2HE
