"""Which layers share blocks: groups of equal numbers of layers with one extent, see `Extents`.

Layers with a window keep far fewer tokens than those that read all. If a block spanned all layers,
all would keep as many. So layers are divided by extent, and each kind into groups of one size: a
block is as large in every group. Where the counts have no common divisor, the last group of a kind
is padded: its block has planes that no layer uses.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from functools import lru_cache

from ryzanstein.worker.engine.extents import Windows
from ryzanstein.worker.model.architectures.spec import DecoderSpec

# Fewer and larger groups are worth so much of the memory of a long sequence: each has a block table
# in every step.
_WASTE = 0.05


@dataclass(frozen=True, slots=True)
class LayerGroups:
    """The groups of a model. Layer i has plane `planes[i]` of the blocks of group `groups[i]`."""

    windows: Windows
    num_planes: int
    groups: tuple[int, ...]
    planes: tuple[int, ...]


@lru_cache
def layer_groups(spec: DecoderSpec) -> LayerGroups:
    """Returns the groups of a decoder. A window of the whole context is none."""
    extents = [_extent(window, spec.context_length) for window in (layer.window for layer in spec.layers)]
    # The layers that read all tokens come first.
    counts = dict(sorted(Counter(extents).items(), key=lambda item: (item[0] is not None, item[0] or 0)))
    size = _size(counts, spec.context_length)
    windows: list[int | None] = []
    places: dict[int, tuple[int, int]] = {}
    for window in counts:
        members = [layer for layer, extent in enumerate(extents) if extent == window]
        places |= {layer: (len(windows) + i // size, i % size) for i, layer in enumerate(members)}
        windows += [window] * -(-len(members) // size)
    groups, planes = zip(*(places[layer] for layer in range(spec.num_layers)), strict=True)
    return LayerGroups(tuple(windows), size, groups, planes)


def _extent(window: int | None, context_length: int) -> int | None:
    return None if window is None or window >= context_length else window


def _size(counts: dict[int | None, int], context_length: int) -> int:
    """Returns the largest size of a group that wastes little in a sequence of the whole context."""
    kept = {size: _kept(counts, size, context_length) for size in range(1, max(counts.values()) + 1)}
    least = min(kept.values())
    return max(size for size, numbers in kept.items() if numbers <= least * (1 + _WASTE))


def _kept(counts: dict[int | None, int], size: int, context_length: int) -> int:
    """Returns the planes of all tokens that a sequence of the whole context keeps."""
    return sum(-(-count // size) * size * (window or context_length) for window, count in counts.items())
