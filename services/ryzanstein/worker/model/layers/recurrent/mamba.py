"""The state space of Mamba 2 (Dao and Gu 2024; Granite 4, Falcon H1, Nemotron H), in the place of attention or beside it.

The input is projected to a gate of the output, to the heads' inputs and each group's rows of writing and of
reading, which a short convolution mixes with those of the last tokens, and to the length of each head's step.

Whole groups of heads are divided over the ranks. If there are fewer groups than ranks, several ranks hold
the rows of a group and divide its heads; the norm of a group then needs one more sum over all ranks, of
a number for each token and group.

What a head keeps is in slots (see `cache.states`). Tokens are added to it one by one in one order, so the
result does not depend on where a prompt was cut.

Legend: T tokens, E hidden size, F channels of the convolution on this rank, L tokens that it sees, G groups of
this rank, H its heads, V numbers of a head.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch
from torch import Tensor

from ryzanstein.worker.architectures.mixers import MambaNames, MambaSpec
from ryzanstein.worker.architectures.spec import DecoderSpec
from ryzanstein.worker.cache.kv_cache import LayerPages
from ryzanstein.worker.cache.state_sizes import MambaShare
from ryzanstein.worker.cache.states import LayerStates
from ryzanstein.worker.collectives.parallel import TensorParallel
from ryzanstein.worker.kernels.functions.recurrent.mamba import GroupScales, MambaHeads
from ryzanstein.worker.kernels.functions.rows import Angles
from ryzanstein.worker.model.inputs.states.inputs import StateInputs
from ryzanstein.worker.model.inputs.step import StepInputs
from ryzanstein.worker.model.layers.linear import ColumnParallelLinear, RowParallelLinear, Rows
from ryzanstein.worker.model.layers.mlp import new_activation
from ryzanstein.worker.model.layers.recurrent.convolution import Piece, new_convolution, read_taps
from ryzanstein.worker.model.layers.recurrent.mamba_native import NativeMamba
from ryzanstein.worker.model.layers.recurrent.mamba_rule import TorchMamba
from ryzanstein.worker.model.layers.source import WeightSource


class StateSpace:
    """A half of a layer that adds the step's tokens to the states of their sequences."""

    def __init__(self, source: WeightSource, tp: TensorParallel, spec: DecoderSpec, mamba: MambaSpec, index: int) -> None:
        names, prefix = spec.names.mamba, spec.names.layer.format(layer=index)
        assert names is not None
        share = MambaShare.of(mamba, tp)
        own, parts = _own(share), _parts(share)
        self._index, self._in_scale, self._out_scale = index, mamba.in_scale, mamba.out_scale
        self._split = [own[1], share.slot.num_channels, share.num_heads]
        total = mamba.width + mamba.channels + mamba.num_heads
        rows = Rows(prefix + names.projection, total, tuple(parts))
        self._in = ColumnParallelLinear(source, spec.hidden_size, [rows], bias=mamba.in_bias)
        self._part_scales = _part_scales(source, mamba, parts)
        channels = [(first - mamba.width, count) for first, count in parts[1:4]]
        weight_LF = read_taps(source, prefix + names.convolution, channels, (mamba.channels, mamba.length))
        bias_F = _bias(source, prefix + names.convolution, channels, mamba) if mamba.convolution_bias else None
        self._convolve = new_convolution(source.kernels, share.slot, weight_LF, bias_F)
        self._activate = new_activation(source, mamba.activation)
        self._rule = _new_rule(source, share, _heads(source, names, prefix, share))
        self._gated_first = mamba.norm != "before_gate"
        scales = None if mamba.norm is None else _scales(source, prefix + names.norm, share, spec.norm.eps)
        self._norm = None if scales is None else _GroupNorm(self._rule, tp, share, scales)
        self._out = RowParallelLinear(
            source, tp, prefix + names.out, mamba.width, spec.hidden_size, own=own, bias=mamba.out_bias
        )

    def __call__(self, x_TE: Tensor, inputs: StepInputs, angles: Sequence[Angles], pages: LayerPages) -> Tensor:
        """Returns this rank's part of a sum over all ranks."""
        del angles, pages  # it has neither positions nor keys
        assert inputs.states is not None
        states = inputs.states.cache.layer(self._index)
        in_T = self._in(x_TE if self._in_scale == 1 else x_TE * self._in_scale, inputs.adapters)
        if self._part_scales is not None:
            in_T = in_T * self._part_scales
        gate_T, channels_TF, step_TH = torch.split(in_T, self._split, dim=1)
        mixed_TF = self._activate(self._convolve(channels_TF, states, inputs.states))
        gates = gate_T if self._gated_first else None
        out_T = self._rule.scan(mixed_TF, step_TH, gates, states, inputs.states)
        if self._norm is not None:
            out_T = self._norm(out_T, None if self._gated_first else gate_T)
        out_TE = self._out(out_T.to(x_TE.dtype), inputs.adapters)
        return out_TE if self._out_scale == 1 else out_TE.mul_(self._out_scale)


class _Rule(Protocol):
    """The state space of one layer, and norms of groups; see `TorchMamba`."""

    def scan(
        self, mixed_TF: Tensor, step_TH: Tensor, gate_T: Tensor | None, states: LayerStates, inputs: StateInputs
    ) -> Tensor: ...

    def squares(self, x_T: Tensor) -> Tensor: ...

    def norm(self, x_T: Tensor, squares_TG: Tensor, scales: GroupScales, gate_T: Tensor | None) -> Tensor: ...


class _GroupNorm:
    """An RMS norm of each group of heads, of which this rank may have a part."""

    def __init__(self, rule: _Rule, tp: TensorParallel, share: MambaShare, scales: GroupScales) -> None:
        self._rule, self._scales, self._share, self._collectives = rule, scales, share, tp.collectives

    def __call__(self, x_T: Tensor, gate_T: Tensor | None) -> Tensor:
        squares_TG = self._rule.squares(x_T)
        return self._rule.norm(x_T, self._summed(squares_TG) if self._share.spans else squares_TG, self._scales, gate_T)

    def _summed(self, squares_TG: Tensor) -> Tensor:
        """Adds what other ranks have of this rank's group."""
        own = slice(self._share.first_group, self._share.first_group + self._share.num_groups)
        all_T = squares_TG.new_zeros(len(squares_TG), self._share.mamba.num_groups)
        all_T[:, own] = squares_TG
        return self._collectives.all_reduce(all_T)[:, own].contiguous()


def _new_rule(source: WeightSource, share: MambaShare, heads: MambaHeads) -> _Rule:
    return TorchMamba(share, heads) if source.kernels is None else NativeMamba(source.kernels.mamba, share, heads)


def _own(share: MambaShare) -> Piece:
    """Returns this rank's numbers among those that all heads put out."""
    return share.first_head * share.mamba.head_dim, share.num_heads * share.mamba.head_dim


def _parts(share: MambaShare) -> list[Piece]:
    """Returns this rank's rows of the projection: gates, inputs, rows of writing and of reading, steps."""
    mamba, (first, count) = share.mamba, _own(share)
    keys = mamba.num_groups * mamba.state_dim
    first_key, num_keys = share.first_group * mamba.state_dim, share.num_groups * mamba.state_dim
    steps = mamba.width + mamba.channels
    return [
        (first, count),
        (mamba.width + first, count),
        (2 * mamba.width + first_key, num_keys),
        (2 * mamba.width + keys + first_key, num_keys),
        (steps + share.first_head, share.num_heads),
    ]


def _part_scales(source: WeightSource, mamba: MambaSpec, parts: Sequence[Piece]) -> Tensor | None:
    """Returns the factor of each row of the projection, or None if all are 1."""
    if set(mamba.part_scales) == {1.0}:
        return None
    pieces = [source.new(count).fill_(scale) for scale, (_, count) in zip(mamba.part_scales, parts, strict=True)]
    return torch.cat(pieces)


def _bias(source: WeightSource, name: str, pieces: Sequence[Piece], mamba: MambaSpec) -> Tensor:
    bias_F, first = source.new(sum(count for _, count in pieces)), 0
    for start, count in pieces:
        source.read(f"{name}.bias", (mamba.channels,), bias_F.narrow(0, first, count), start=start)
        first += count
    return bias_F


def _scales(source: WeightSource, name: str, share: MambaShare, eps: float) -> GroupScales:
    mamba, (first, count) = share.mamba, _own(share)
    weight = source.new(count).float()
    source.read(f"{name}.weight", (mamba.width,), weight, start=first)
    return GroupScales(weight, mamba.width // mamba.num_groups, eps)


def _heads(source: WeightSource, names: MambaNames, prefix: str, share: MambaShare) -> MambaHeads:
    """Returns the numbers of this rank's heads, in float32 whatever the model's dtype."""
    decay_H, step_H, skip_H = (source.new(share.num_heads).float() for _ in range(3))
    for name, out_H in ((names.decay, decay_H), (names.step, step_H), (names.skip, skip_H)):
        source.read(prefix + name, (share.mamba.num_heads,), out_H, start=share.first_head)
    return MambaHeads(decay_H, step_H, skip_H, share.mamba.step_limits)
