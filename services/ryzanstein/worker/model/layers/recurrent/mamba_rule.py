"""The arithmetic of Mamba 2 in torch's operators: what our own kernels are compared with, and what GPUs run.

A head's matrix S is multiplied by its decay, exp(-exp(decay) dt); then key B writes the input x as long as the step dt:
S + B (dt x); query C finds C S, and a part of x is added. A step is softplus of its projection plus the head's
own number, within bounds. All of it is in float32.

Legend: T tokens, S sequences, n those that are still fed, F channels, G groups, H heads, K rows of a head's matrix,
V its columns, N slots.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from ryzanstein.worker.cache.state_sizes import MambaShare
from ryzanstein.worker.cache.states import LayerStates
from ryzanstein.worker.kernels.functions.recurrent.mamba import GroupScales, MambaHeads
from ryzanstein.worker.model.inputs.states.inputs import StateInputs


class TorchMamba:
    """The state space of one layer, and norms of its groups."""

    def __init__(self, share: MambaShare, heads: MambaHeads) -> None:
        self._share, self._heads = share, heads

    def scan(
        self, mixed_TF: Tensor, step_TH: Tensor, gate_T: Tensor | None, states: LayerStates, inputs: StateInputs
    ) -> Tensor:
        """Returns the outputs of the heads in float32, [T, H V], gated if there are gates; keeps the matrices in the slots."""
        share, heads, mamba = self._share, self._heads, self._share.mamba
        keys = share.num_groups * mamba.state_dim
        x_T, key_T, query_T = torch.split(mixed_TF.float(), [share.num_heads * mamba.head_dim, keys, keys], dim=1)
        x_THV, group = x_T.view(len(x_T), share.num_heads, mamba.head_dim), share.num_heads // share.num_groups
        key_THK, query_THK = (
            part_T.view(len(part_T), share.num_groups, mamba.state_dim).repeat_interleave(group, dim=1)
            for part_T in (key_T, query_T)
        )
        step_TH = F.softplus(step_TH.float() + heads.step_H).clamp(*heads.limits)
        decay_TH = (-heads.decay_H.exp() * step_TH).exp()
        rows = _Rows(key_THK, query_THK, x_THV * step_TH.unsqueeze(-1), decay_TH)
        out_T = torch.addcmul(_recur(rows, states.matrices_NHKV, inputs), x_THV, heads.skip_H.unsqueeze(-1)).flatten(1)
        return out_T if gate_T is None else out_T.mul_(F.silu(gate_T.float()))

    def squares(self, x_T: Tensor) -> Tensor:
        """Returns the sum of squares of each group of a row, [T, G]."""
        return self._groups(x_T).square().sum(dim=-1)

    def _groups(self, x_T: Tensor) -> Tensor:
        return x_T.view(len(x_T), self._share.num_groups, -1)

    def norm(self, x_T: Tensor, squares_TG: Tensor, scales: GroupScales, gate_T: Tensor | None) -> Tensor:
        """Divides each group in place by the root of its mean square, scales it, and gates it if there are gates."""
        self._groups(x_T).mul_(torch.rsqrt(squares_TG / scales.count + scales.eps).unsqueeze(-1))
        x_T.mul_(scales.weight)
        return x_T if gate_T is None else x_T.mul_(F.silu(gate_T.float()))


@dataclass(frozen=True, slots=True)
class _Rows:
    """What the tokens of a step bring."""

    key_THK: Tensor
    query_THK: Tensor
    written_THV: Tensor
    decay_TH: Tensor


def _recur(rows: _Rows, slots_NHKV: Tensor, inputs: StateInputs) -> Tensor:
    """Adds one token of each sequence at a time, and returns what the queries find."""
    state_SHKV, out_THV = slots_NHKV[inputs.source_S], torch.empty_like(rows.written_THV)
    for fed in inputs.fed:
        state_nHKV = state_SHKV[fed.sequence_n] * rows.decay_TH[fed.row_n][..., None, None]
        key_nHK1, written_nH1V = rows.key_THK[fed.row_n].unsqueeze(-1), rows.written_THV[fed.row_n].unsqueeze(-2)
        state_nHKV = torch.addcmul(state_nHKV, key_nHK1, written_nH1V)
        out_THV[fed.row_n] = (state_nHKV * rows.query_THK[fed.row_n].unsqueeze(-1)).sum(dim=-2)
        state_SHKV[fed.sequence_n] = state_nHKV
        if fed.ended is not None:
            slots_NHKV[fed.ended[1]] = state_SHKV[fed.ended[0]]
    return out_THV
