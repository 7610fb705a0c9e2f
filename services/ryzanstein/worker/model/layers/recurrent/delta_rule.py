"""The arithmetic of a gated delta rule in torch's operators: what our own kernels are compared with, and what GPUs run.

A head's matrix S is multiplied by its decay g; then key k writes value v: S + k (b (v - k S)), where b is
the strength; the output is q S. Queries and keys have length 1. All of it is in float32.

Legend: T tokens, S sequences, n those that are still fed, F channels, J key heads,
H value heads, K key dimension, V value dimension, N slots.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Self

import torch
import torch.nn.functional as F
from torch import Tensor

from ryzanstein.worker.architectures.mixers import DeltaNames
from ryzanstein.worker.cache.state_sizes import DeltaShare
from ryzanstein.worker.cache.states import LayerStates
from ryzanstein.worker.model.inputs.states.inputs import StateInputs
from ryzanstein.worker.model.layers.source import WeightSource

_LENGTH_EPS = 1e-6


@dataclass(frozen=True, slots=True)
class HeadNumbers:
    """The numbers of each head, in float32 whatever the model's dtype: a decay is exp(-exp(decay) softplus(a + step)).

    `norm_V` scales the outputs of every head, after they are normed.
    """

    decay_H: Tensor
    step_H: Tensor
    norm_V: Tensor
    eps: float

    @classmethod
    def read(cls, source: WeightSource, names: DeltaNames, prefix: str, share: DeltaShare, eps: float) -> Self:
        delta, count = share.delta, share.num_value_heads
        decay_H, step_H, norm_V = (source.new(size).float() for size in (count, count, delta.value_dim))
        for name, out_H in ((names.decay, decay_H), (names.step, step_H)):
            read_by_head(source, prefix + name, share, out_H)
        source.read(f"{prefix}{names.norm}.weight", (delta.value_dim,), norm_V)
        return cls(decay_H, step_H, norm_V, eps)


def read_by_head(source: WeightSource, name: str, share: DeltaShare, out_H: Tensor) -> None:
    """Reads what a tensor, [H, ...], has of each value head of this rank."""
    begin, shape = 0, (share.delta.num_value_heads, *out_H.shape[1:])
    for first, count in share.value_heads:
        source.read(name, shape, out_H.narrow(0, begin, count), start=first)
        begin += count


class TorchDelta:
    """The rule of one layer."""

    def __init__(self, share: DeltaShare, numbers: HeadNumbers) -> None:
        self._share, self._numbers = share, numbers

    def __call__(
        self, mixed_TF: Tensor, strengths_T2H: Tensor, gate_T: Tensor, states: LayerStates, inputs: StateInputs
    ) -> Tensor:
        """Returns the normed and gated outputs of the heads, [T, H V], and keeps the matrices in the slots."""
        share, numbers, delta = self._share, self._numbers, self._share.delta
        num_tokens, width = len(mixed_TF), share.num_key_heads * delta.key_dim
        mixed_TF, keys = mixed_TF.float(), (num_tokens, share.num_key_heads, delta.key_dim)
        q_TJK, k_TJK = mixed_TF[:, :width].view(keys), mixed_TF[:, width : 2 * width].view(keys)
        v_THV = mixed_TF[:, 2 * width :].view(num_tokens, share.num_value_heads, delta.value_dim)
        q_THK, k_THK = (_for_values(_of_length_one(x_TJK), share) for x_TJK in (q_TJK, k_TJK))
        write_TH, a_TH = strengths_T2H.chunk(2, dim=1)
        decay_TH = (-numbers.decay_H.exp() * F.softplus(a_TH + numbers.step_H)).exp()
        rows = _Rows(q_THK * delta.key_dim**-0.5, k_THK, v_THV, decay_TH, write_TH.sigmoid())
        out_THV = _recur(rows, states.matrices_NHKV, inputs)
        normed_THV = F.rms_norm(out_THV, (delta.value_dim,), None, numbers.eps) * numbers.norm_V
        return normed_THV.mul_(F.silu(gate_T.float()).view_as(normed_THV)).flatten(1).to(gate_T.dtype)


@dataclass(frozen=True, slots=True)
class _Rows:
    """What the tokens of a step bring."""

    q_THK: Tensor
    k_THK: Tensor
    v_THV: Tensor
    decay_TH: Tensor
    write_TH: Tensor


def _of_length_one(x_THK: Tensor) -> Tensor:
    return x_THK * torch.rsqrt(x_THK.square().sum(dim=-1, keepdim=True) + _LENGTH_EPS)


def _for_values(x_TJK: Tensor, share: DeltaShare) -> Tensor:
    """Returns for each value head what its key head has, [T, H, K]."""
    group = share.num_value_heads // share.num_key_heads
    return x_TJK.repeat(1, group, 1) if share.delta.tiled else x_TJK.repeat_interleave(group, dim=1)


def _recur(rows: _Rows, slots_NHKV: Tensor, inputs: StateInputs) -> Tensor:
    """Adds one token of each sequence at a time, and returns what the queries find."""
    state_SHKV, out_THV = slots_NHKV[inputs.source_S], torch.empty_like(rows.v_THV)
    for fed in inputs.fed:
        state_nHKV = state_SHKV[fed.sequence_n] * rows.decay_TH[fed.row_n][..., None, None]
        k_nHK1 = rows.k_THK[fed.row_n].unsqueeze(-1)
        known_nHV = (state_nHKV * k_nHK1).sum(dim=-2)
        written_nHV = (rows.v_THV[fed.row_n] - known_nHV) * rows.write_TH[fed.row_n].unsqueeze(-1)
        state_nHKV = torch.addcmul(state_nHKV, k_nHK1, written_nHV.unsqueeze(-2))
        out_THV[fed.row_n] = (state_nHKV * rows.q_THK[fed.row_n].unsqueeze(-1)).sum(dim=-2)
        state_SHKV[fed.sequence_n] = state_nHKV
        if fed.ended is not None:
            slots_NHKV[fed.ended[1]] = state_SHKV[fed.ended[0]]
    return out_THV
