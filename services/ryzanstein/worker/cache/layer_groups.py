"""Which layers share blocks: groups of equal numbers of layers with one extent, see `Extents`.

What a layer reads is its window, or the node's rule of sparse attention. Layers with a window keep
far fewer tokens than those that read all. If a block spanned all layers, all would keep as many. So
layers are divided by extent, and each kind into groups of one size: a block is as large in every
group. Where the counts have no common divisor, the last group of a kind is padded: its block has
planes that no layer uses. A layer with a short convolution has a window, and may take several planes, and
so may one whose heads are larger than those of other layers.
A layer without keys and values is in no group: it keeps a state (see `states`), or nothing.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from functools import lru_cache
from typing import NamedTuple

from ryzanstein.worker.architectures.spec import DecoderSpec, LayerSpec
from ryzanstein.worker.engine.extents import AllLasting, Lasting, Windows
from ryzanstein.worker.settings.sparse import SparseRule

# Fewer and larger groups are worth so much of the memory of a long sequence: each has a block table
# in every step.
_WASTE = 0.05


@dataclass(frozen=True, slots=True)
class LayerGroups:
    """The groups of a model. Layer i has plane `planes[i]`, or planes from there on, of the blocks of group `groups[i]`.

    Of a layer that is in no group both are -1.

    `windows` and `lasting` are for `Extents`. `rules` are those of groups with sparse attention, `taps`
    the lengths of short convolutions; both are empty where no group has any.
    """

    windows: Windows
    num_planes: int
    groups: tuple[int, ...]
    planes: tuple[int, ...]
    rules: tuple[SparseRule | None, ...] = ()
    taps: tuple[int | None, ...] = ()

    @property
    def lasting(self) -> AllLasting:
        """Which pages each group keeps that have left its window; empty: none does."""
        lasting = [None if rule is None or rule.quest else Lasting(rule.sinks, rule.stride) for rule in self.rules]
        return tuple(lasting) if any(lasting) else ()

    @property
    def selects(self) -> bool:
        """Whether pages are chosen by query, for which their keys are summarized."""
        return any(rule is not None and rule.quest for rule in self.rules)


class Reach(NamedTuple):
    """What a layer keeps: a window, or everything; what it reads of that, if not all; and the planes that it takes.

    `taps` is the length of a short convolution, which reads its own kind of slots.
    """

    window: int | None
    rule: SparseRule | None = None
    taps: int | None = None
    planes: int = 1


@lru_cache
def layer_groups(spec: DecoderSpec) -> LayerGroups:
    """Returns the groups of a decoder. A window of the whole context is none."""
    reaches = [_reach(layer, spec.context_length) if layer.has_planes else None for layer in spec.layers]
    # The layers that keep all tokens come first.
    counted = Counter(reach for reach in reaches if reach is not None)
    counts = dict(sorted(counted.items(), key=lambda item: (item[0].window is not None, item[0].window or 0)))
    size = _size(counts, spec.context_length)
    found: list[Reach] = []
    places: dict[int, tuple[int, int]] = {}
    for kind in counts:
        members = [layer for layer, reach in enumerate(reaches) if reach == kind]
        fits = size // kind.planes
        places |= {layer: (len(found) + i // fits, i % fits * kind.planes) for i, layer in enumerate(members)}
        found += [kind] * -(-len(members) // fits)
    # A layer that reads the keys of another one reads them where they are.
    places |= {index: places[layer.keys_of] for index, layer in enumerate(spec.layers) if layer.keys_of is not None}
    groups, planes = zip(*(places.get(layer, (-1, -1)) for layer in range(spec.num_layers)), strict=True)
    windows, rules, taps, _ = zip(*found, strict=True)
    return LayerGroups(windows, size, groups, planes, rules if any(rules) else (), taps if any(taps) else ())


def _reach(layer: LayerSpec, context_length: int) -> Reach:
    """A window of the whole context is none. Pages that are chosen by query are chosen among all."""
    rule = layer.sparse
    if layer.convolution is not None:
        return Reach(layer.convolution.length, taps=layer.convolution.length, planes=layer.planes)
    if rule is not None and rule.window < context_length:
        return Reach(None if rule.quest else rule.window, rule)
    window = None if layer.window is None or layer.window >= context_length else layer.window
    return Reach(window, planes=layer.planes)


def _size(counts: dict[Reach, int], context_length: int) -> int:
    """Returns the largest size of a group that wastes little in a sequence of the whole context."""
    sizes = range(max(kind.planes for kind in counts), max(count * kind.planes for kind, count in counts.items()) + 1)
    kept = {size: _kept(counts, size, context_length) for size in sizes}
    least = min(kept.values())
    return max(size for size, numbers in kept.items() if numbers <= least * (1 + _WASTE))


def _kept(counts: dict[Reach, int], size: int, context_length: int) -> int:
    """Returns the planes of all tokens that a sequence of the whole context keeps."""
    return sum(-(-count // (size // reach.planes)) * size * _num_kept(reach, context_length) for reach, count in counts.items())


def _num_kept(reach: Reach, context_length: int) -> int:
    window, rule = reach.window, reach.rule
    if window is None or rule is None:
        return window or context_length
    strided = context_length // rule.stride if rule.stride else 0
    return min(context_length, window + rule.sinks + strided)
