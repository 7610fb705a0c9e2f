"""AWQ (Lin et al. 2023): scales inputs with large activations up before rounding, and folds the inverse into what precedes.

What precedes is a norm, the up projection for the down projection, or the values for the output of
attention. Where nothing linear precedes, nothing is scaled.

Legend: O outputs, I inputs, K key-value heads, G query heads of a group, D head dimension.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from ryzanstein.tools.quantize.methods.grids import Grid, fitted
from ryzanstein.tools.quantize.reading.layer_tensors import LayerTensors
from ryzanstein.tools.quantize.reading.layer_weights import Site
from ryzanstein.worker.architectures.spec import DecoderSpec

_STEPS = 10
_SMALLEST = 1e-4

GridOf = Callable[[int], Grid | None]
"""Returns the grid of a matrix with so many inputs, None if it stays in floats."""


@dataclass(frozen=True, slots=True)
class _Link:
    """Sites with the same inputs, which `producer` makes: a norm, or the rows of a projection.

    `groups` are the query heads that read one value head; each of its numbers has one scale.
    """

    consumers: Sequence[Site]
    producer: str
    is_norm: bool
    groups: tuple[int, int, int] | None = None  # K, G, D


def fold_scales(tensors: LayerTensors, sites: Sequence[Site], spec: DecoderSpec, index: int, grid_of: GridOf) -> None:
    """Replaces a layer's weights by scaled ones that compute the same function in full precision."""
    for link in _links(sites, spec, index):
        if not link.consumers:
            continue
        watched, grid = link.consumers[0].watched, grid_of(link.consumers[0].weight_OI.shape[1])
        if watched is None or not watched.num_rows or grid is None:
            continue
        weight_OI = torch.cat([tensors[name] for site in link.consumers for name in site.matrices])
        mean_I = watched.absolute_I / watched.num_rows
        scale_I = _searched(weight_OI, watched.hessian_II, _shared(mean_I, link), grid)
        if scale_I is None:
            continue
        scale_I = _folded_norm(tensors, spec, link, scale_I) if link.is_norm else _folded_rows(tensors, link, scale_I)
        for site in link.consumers:
            _scale_inputs(tensors, site, scale_I)


def _links(sites: Sequence[Site], spec: DecoderSpec, index: int) -> Iterator[_Link]:
    names, prefix = spec.names, spec.names.layer.format(layer=index)
    by_matrix = {name: site for site in sites for name in site.matrices}

    def found(*modules: str | None) -> list[Site]:
        every = [by_matrix.get(f"{prefix}{module}.weight") for module in modules if module is not None]
        return list({id(site): site for site in every if site is not None}.values())

    if spec.latent is not None:
        return
    dense = spec.layers[index].experts is None
    attention, feed_forward = found(names.query, names.key, names.value), found(names.gate, names.up) if dense else []
    if spec.layers[index].state is not None:
        attention = []  # the norm has another reader
    shared_norm = spec.parallel and names.mlp_norm is None
    if names.attention_norm is not None and spec.norm.weight and (dense or not shared_norm):
        yield _Link([*attention, *(feed_forward if shared_norm else [])], prefix + names.attention_norm, True)
    if names.mlp_norm is not None and spec.norm.weight and feed_forward:
        yield _Link(feed_forward, prefix + names.mlp_norm, True)
    if dense and names.gate not in (None, names.up):
        yield _Link(found(names.down), prefix + names.up, False)
    normed = spec.qk_norm is not None and spec.qk_norm.values  # a norm undoes what scales values
    if spec.qkv_layout == "split" and spec.qkv_clip is None and not normed:
        heads = (spec.num_kv_heads, spec.num_heads // spec.num_kv_heads, spec.head_dim)
        yield _Link(found(names.attention_out), prefix + names.value, False, heads)


def _shared(mean_I: Tensor, link: _Link) -> Tensor:
    if link.groups is None:
        return mean_I
    mean_KGD = mean_I.view(link.groups)
    return mean_KGD.mean(dim=1, keepdim=True).expand(link.groups).reshape(-1)


def _searched(weight_OI: Tensor, hessian_II: Tensor, mean_I: Tensor, grid: Grid) -> Tensor | None:
    """Returns the power of the activations' magnitudes with the least error of the outputs; None for the power 0."""
    best_error, best = _error(weight_OI, torch.ones_like(mean_I), hessian_II, grid), None
    for step in range(1, _STEPS):
        scale_I = mean_I.clamp_min(_SMALLEST).pow(step / _STEPS)
        scale_I /= (scale_I.max() * scale_I.min()).sqrt()
        error = _error(weight_OI, scale_I, hessian_II, grid)
        if error < best_error:
            best_error, best = error, scale_I
    return best


def _error(weight_OI: Tensor, scale_I: Tensor, hessian_II: Tensor, grid: Grid) -> float:
    off_OI = fitted(weight_OI * scale_I, grid, searched=False).floats().div_(scale_I).sub_(weight_OI)
    return (off_OI @ hessian_II).mul_(off_OI).sum().item()


def _folded_norm(tensors: LayerTensors, spec: DecoderSpec, link: _Link, scale_I: Tensor) -> Tensor:
    """Divides a norm's weight, or one plus it. Returns the scales that the rounded weight really has."""
    name = f"{link.producer}.weight"
    plus = 1.0 if spec.norm.plus_one else 0.0
    old_I = tensors[name] + plus
    new_I = tensors.rounded(name, old_I / scale_I - plus)
    real_I = old_I / (new_I + plus)
    usable_I = real_I.isfinite() & (real_I > 0)
    tensors[name] = torch.where(usable_I, new_I, tensors[name])
    real_I = torch.where(usable_I, real_I, 1.0)
    if f"{link.producer}.bias" in tensors:
        tensors[f"{link.producer}.bias"] = tensors[f"{link.producer}.bias"] / real_I
    return real_I


def _folded_rows(tensors: LayerTensors, link: _Link, scale_I: Tensor) -> Tensor:
    """Divides the rows of a projection. A row of values belongs to several inputs, which have the same scale."""
    scale_O = scale_I if link.groups is None else scale_I.view(link.groups)[:, 0].reshape(-1)
    tensors[f"{link.producer}.weight"] = tensors[f"{link.producer}.weight"] / scale_O.unsqueeze(1)
    if f"{link.producer}.bias" in tensors:
        tensors[f"{link.producer}.bias"] = tensors[f"{link.producer}.bias"] / scale_O
    return scale_I


def _scale_inputs(tensors: LayerTensors, site: Site, scale_I: Tensor) -> None:
    for name in site.matrices:
        tensors[name] = tensors[name] * scale_I
    if site.watched is not None:
        site.watched.hessian_II.div_(scale_I).div_(scale_I.unsqueeze(1))
        site.watched.absolute_I.div_(scale_I)
