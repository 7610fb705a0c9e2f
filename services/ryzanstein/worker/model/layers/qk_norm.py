"""Norms of queries and keys before their rotation (Dehghani et al. 2023).

Legend: T tokens, H query heads of this rank, K its key-value heads, A = H or K, D head dimension.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from ryzanstein.worker.architectures.spec import DecoderSpec, QkNormSpec
from ryzanstein.worker.collectives.parallel import HeadShare, TensorParallel
from ryzanstein.worker.model.layers.norm import RMSNorm, new_norm
from ryzanstein.worker.model.layers.source import WeightSource
from ryzanstein.worker.model.program.ops import RowNorm


class QkNorm(Protocol):
    """A norm of queries [T, H, D] and keys [T, K, D], in place."""

    def __call__(self, q_THD: Tensor, k_TKD: Tensor) -> None: ...


def new_qk_norm(source: WeightSource, tp: TensorParallel, spec: DecoderSpec, prefix: str) -> QkNorm | None:
    """Returns the norm of `spec`, or None if it has none."""
    if spec.qk_norm is None or spec.names.query_norm is None or spec.names.key_norm is None:
        return None
    names = (prefix + spec.names.query_norm, prefix + spec.names.key_norm)
    share = tp.heads(spec.num_heads, spec.num_kv_heads)
    if spec.qk_norm.scope == "shared":
        return _SharedNorm(source, names, spec.head_dim, spec.qk_norm)
    if spec.qk_norm.scope == "width":
        return _WidthNorm(source, tp, names, spec, share)
    return _HeadNorm(source, names, spec, share)


def head_norms(norm: QkNorm | None) -> tuple[RowNorm, RowNorm] | None:
    """Returns RMS norms of each query and of each key, None if there are none or others."""
    return norm.native() if isinstance(norm, _SharedNorm) else None


class _SharedNorm:
    """A norm of each head separately, with one weight for all heads."""

    def __init__(self, source: WeightSource, names: tuple[str, str], head_dim: int, spec: QkNormSpec) -> None:
        self._query, self._key = (new_norm(source, name, head_dim, spec.norm) for name in names)

    def __call__(self, q_THD: Tensor, k_TKD: Tensor) -> None:
        q_THD.copy_(self._query(q_THD))
        k_TKD.copy_(self._key(k_TKD))

    def native(self) -> tuple[RowNorm, RowNorm] | None:
        """Returns both as a program has them, if they are RMS norms."""
        if not isinstance(self._query, RMSNorm) or not isinstance(self._key, RMSNorm):
            return None
        return self._query.native(), self._key.native()


@dataclass(frozen=True, slots=True)
class _Heads:
    """This rank's heads out of `total`."""

    total: int
    first: int
    count: int


def _heads(spec: DecoderSpec, share: HeadShare) -> tuple[_Heads, _Heads]:
    """Returns this rank's heads of queries and of keys."""
    query = _Heads(spec.num_heads, share.first_head, share.num_heads)
    return query, _Heads(spec.num_kv_heads, share.first_kv_head, share.num_kv_heads)


class _HeadNorm:
    """A norm of each head separately, with a weight per head: layer norms without a shift."""

    def __init__(self, source: WeightSource, names: tuple[str, str], spec: DecoderSpec, share: HeadShare) -> None:
        self._eps = spec.norm.eps
        read = _read_list if spec.qk_norm is not None and spec.qk_norm.scope == "head_list" else _read_stack
        self._query_HD, self._key_KD = (
            read(source, name, heads, spec.head_dim) for name, heads in zip(names, _heads(spec, share), strict=True)
        )

    def __call__(self, q_THD: Tensor, k_TKD: Tensor) -> None:
        for x_TAD, weight_AD in ((q_THD, self._query_HD), (k_TKD, self._key_KD)):
            x_TAD.copy_(F.layer_norm(x_TAD, x_TAD.shape[-1:], None, None, self._eps).mul_(weight_AD))


def _read_stack(source: WeightSource, name: str, heads: _Heads, head_dim: int) -> Tensor:
    weight_AD = source.new(heads.count, head_dim)
    source.read(f"{name}.weight", (heads.total, head_dim), weight_AD, start=heads.first)
    return weight_AD


def _read_list(source: WeightSource, name: str, heads: _Heads, head_dim: int) -> Tensor:
    """Returns weights that are stored head by head.

    Heads of other ranks are read into an empty tensor, so that their names count as known.
    """
    weight_AD, nothing = source.new(heads.count, head_dim), source.new(0)
    for head in range(heads.total):
        index = head - heads.first
        out = weight_AD[index] if 0 <= index < heads.count else nothing
        source.read(f"{name.format(head=head)}.weight", (head_dim,), out)
    return weight_AD


class _WidthNorm:
    """An RMS norm over all heads of all ranks.

    The ranks' squares are summed by one more all-reduce, of two numbers per token.
    """

    def __init__(
        self, source: WeightSource, tp: TensorParallel, names: tuple[str, str], spec: DecoderSpec, share: HeadShare
    ) -> None:
        self._collectives, self._eps = tp.collectives, spec.norm.eps
        self._weights: list[Tensor] = []
        both = _heads(spec, share)
        for name, heads in zip(names, both, strict=True):
            weight = source.new(heads.count * spec.head_dim)
            source.read(f"{name}.weight", (heads.total * spec.head_dim,), weight, start=heads.first * spec.head_dim)
            self._weights.append(weight.view(heads.count, spec.head_dim))
        self._counts = [heads.total * spec.head_dim for heads in both]
        self._owns = share.owns

    def __call__(self, q_THD: Tensor, k_TKD: Tensor) -> None:
        squares_T2 = torch.stack([x.float().square().sum(dim=(1, 2)) for x in (q_THD, k_TKD)], dim=1)
        if not self._owns:  # a key-value head that several ranks hold counts once
            squares_T2[:, 1] = 0
        squares_T2 = self._collectives.all_reduce(squares_T2)
        for x_TAD, weight_AD, index in ((q_THD, self._weights[0], 0), (k_TKD, self._weights[1], 1)):
            scale_T11 = torch.rsqrt(squares_T2[:, index] / self._counts[index] + self._eps)[:, None, None]
            x_TAD.copy_((x_TAD.float() * scale_T11).to(x_TAD.dtype) * weight_AD)
