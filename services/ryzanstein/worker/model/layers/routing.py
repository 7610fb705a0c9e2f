"""Chooses each token's experts and their weights. The same on every rank, always in float32.

Legend: T tokens, E hidden size, X experts, k experts of a token, Y groups of G experts.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial

import torch
from torch import Tensor

from ryzanstein.worker.architectures.spec import DecoderSpec, GroupLimit, MoeSpec
from ryzanstein.worker.model.layers.mlp import new_sigmoid
from ryzanstein.worker.model.layers.norm import new_norm
from ryzanstein.worker.model.layers.source import WeightSource
from ryzanstein.worker.products.floats import unpacked

_SOFTMAX: Callable[[Tensor], Tensor] = partial(torch.softmax, dim=-1)


class ExpertRouter:
    """A router that scores all experts, chooses the best and weights them."""

    def __init__(self, source: WeightSource, spec: DecoderSpec, prefix: str, moe: MoeSpec) -> None:
        self._top_k, self._routing, names = moe.top_k, moe.routing, spec.names
        weight_XE = source.new(moe.num_experts, spec.hidden_size).float()
        source.read(f"{prefix}{names.router}.weight", (moe.num_experts, spec.hidden_size), weight_XE)
        self._norm, self._expert_X = None, None
        if names.beside is not None:
            self._norm = new_norm(source, "", spec.hidden_size, replace(spec.norm, weight=False))
            weight_XE *= _read(source, prefix + names.beside.input_scale, spec.hidden_size) * spec.hidden_size**-0.5
            self._expert_X = _read(source, prefix + names.beside.expert_scale, moe.num_experts)
        self._product = unpacked(weight_XE, _read_bias(source, f"{prefix}{names.router}.bias", moe), source.kernels)
        self._scores = _SOFTMAX if moe.routing.scores == "softmax" else new_sigmoid(source.kernels)
        self._correction_X = source.new(moe.num_experts).float() if moe.routing.corrected else None
        if self._correction_X is not None:
            shape = (1, moe.num_experts) if moe.routing.correction_row else (moe.num_experts,)
            source.read(prefix + names.router_correction, shape, self._correction_X.view(shape))

    def __call__(self, x_TE: Tensor) -> tuple[Tensor, Tensor]:
        """Returns the weights of each token's experts [T, k] in x's dtype, and their indices."""
        x_TE = x_TE if self._norm is None else self._norm(x_TE)
        scores_TX = self._scores(self._product(x_TE.float()))
        chosen_Tk = self._rated(scores_TX).topk(self._top_k, dim=-1).indices
        weights_Tk = scores_TX.gather(1, chosen_Tk)
        if self._routing.normalized:
            sums_T1 = weights_Tk.sum(dim=-1, keepdim=True).add_(self._routing.added)  # scores may all underflow
            weights_Tk = weights_Tk / (sums_T1.clamp_(min=self._routing.least) if self._routing.least else sums_T1)
        if self._expert_X is not None:
            weights_Tk = weights_Tk * self._expert_X[chosen_Tk]
        return (weights_Tk * self._routing.scale).to(x_TE.dtype), chosen_Tk

    def _rated(self, scores_TX: Tensor) -> Tensor:
        """Returns the ratings that experts are chosen by: higher is better."""
        rated_TX = scores_TX if self._correction_X is None else scores_TX + self._correction_X
        groups = self._routing.groups
        return rated_TX if groups is None else _within_groups(rated_TX, groups)


def _read(source: WeightSource, name: str, size: int) -> Tensor:
    numbers = source.new(size).float()
    source.read(name, (size,), numbers)
    return numbers


def _read_bias(source: WeightSource, name: str, moe: MoeSpec) -> Tensor | None:
    if not moe.biased:
        return None
    bias_X = source.new(moe.num_experts).float()
    source.read(name, (moe.num_experts,), bias_X)
    return bias_X


def _within_groups(rated_TX: Tensor, groups: GroupLimit) -> Tensor:
    """Returns the ratings with minus infinity for all experts outside the best groups."""
    rated_TYG = rated_TX.view(len(rated_TX), groups.num_groups, -1)
    sums_TY = rated_TYG.topk(groups.num_rated, dim=-1).values.sum(dim=-1)
    out_TY = torch.ones_like(sums_TY, dtype=torch.bool).scatter_(1, sums_TY.topk(groups.top_k, dim=-1).indices, False)
    return rated_TYG.masked_fill(out_TY.unsqueeze(-1), -torch.inf).view_as(rated_TX)
