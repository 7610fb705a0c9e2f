"""Attention with linear biases (Press et al. 2022).

Instead of a rotation, each head prefers near keys by a slope of its own.

Legend: H all query heads, K key-value heads of this rank, G query heads of a group, L keys,
P positions.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import lru_cache

import torch
from torch import Tensor

from ryzanstein.worker.architectures.spec import AlibiSpec, DecoderSpec
from ryzanstein.worker.collectives.parallel import TensorParallel

_TABLE = 1024  # positions by which a table of biases grows


@dataclass(frozen=True, slots=True, eq=False)
class AlibiBias:
    """The biases that are added to the scores of this rank's heads.

    Only differences within a row of scores matter, so the bias does not depend on the query.
    """

    spec: AlibiSpec
    slopes_KG1: Tensor
    dtype: torch.dtype

    def at(self, positions_L: Tensor) -> Tensor:
        """Returns the biases of keys at these positions: [..., L] gives [..., K, G, L]."""
        positions_11L = positions_L[..., None, None, :]
        slopes_KG1 = self.slopes_KG1.bfloat16() if self.spec.rounded else self.slopes_KG1
        return (slopes_KG1 * positions_11L).to(self.dtype) * self.spec.scale

    def up_to(self, length: int) -> Tensor:
        """Returns the biases of the first `length` or more positions, [H, P], contiguous."""
        return _biases(self, -(-length // _TABLE) * _TABLE)


@lru_cache(maxsize=1)
def _biases(bias: AlibiBias, num_positions: int) -> Tensor:
    return bias.at(torch.arange(num_positions, device=bias.slopes_KG1.device)).flatten(0, 1).contiguous()


def alibi_bias(spec: DecoderSpec, tp: TensorParallel, dtype: torch.dtype, device: torch.device) -> AlibiBias | None:
    """Returns the biases of `spec` for this rank, or None if it has none."""
    if spec.alibi is None:
        return None
    share = tp.heads(spec.num_heads, spec.num_kv_heads)
    own = slopes(spec.num_heads)[share.first_head : share.first_head + share.num_heads]
    return AlibiBias(spec.alibi, own.view(share.num_kv_heads, -1, 1).to(device), dtype)


def slopes(num_heads: int) -> Tensor:
    """Returns the slopes: powers of two from 2^(-8 / n) down to 2^-8.

    n is `num_heads` rounded up to a power of two. If n is more than `num_heads`, every second slope
    comes first.
    """
    rounded = 2 ** math.ceil(math.log2(num_heads))
    powers = 2.0 ** (-8 / rounded * torch.arange(1, rounded + 1, dtype=torch.float32))
    return powers if rounded == num_heads else torch.cat([powers[1::2], powers[::2]])[:num_heads]
