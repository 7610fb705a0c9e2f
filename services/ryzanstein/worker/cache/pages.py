"""Copies pages between a rank's KV cache and the slab that it shares with the agent and the other ranks.

In the slab a page has the heads of all ranks, so that it does not depend on how many ranks the node
has. Each rank copies its own heads. Where blocks are compressed there are two kinds of pages: the
blocks, as bytes with the scales of each head, and hot pages of all layers in full precision.

Legend: L planes of a page, one for each layer of its group (of the model, for hot ones), B its
tokens, P parts of a slot (keys and values; one for a latent), H heads of all ranks, D head
dimension, X bytes of a head's compressed part.
"""

from __future__ import annotations

import mmap
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from ryzanstein.worker.architectures.spec import DecoderSpec
from ryzanstein.worker.cache.kv_cache import KVCache
from ryzanstein.worker.cache.layer_groups import layer_groups
from ryzanstein.worker.cache.zoned_cache import ZonedCache
from ryzanstein.worker.cache.zones import Zones
from ryzanstein.worker.collectives.parallel import TensorParallel
from ryzanstein.worker.engine.plan import PageMove, Placed
from ryzanstein.worker.settings.options import RunnerOptions


@dataclass(frozen=True, slots=True)
class OwnHeads:
    """The heads of one rank: those from `first` on, `num` of them. `writes`: it is the first rank that has these."""

    first: int
    num: int
    writes: bool

    @classmethod
    def of(cls, spec: DecoderSpec, tp: TensorParallel) -> OwnHeads:
        share = tp.heads(spec.num_heads, spec.num_kv_heads)
        return cls(share.first_kv_head, share.num_kv_heads, share.owns)


@dataclass(frozen=True, slots=True)
class PageLayout:
    """A kind of page in the slab: its shape, with the heads of all ranks at `axis`."""

    shape: tuple[int, ...]
    axis: int
    dtype: torch.dtype

    @property
    def page_bytes(self) -> int:
        return int(torch.Size(self.shape).numel()) * self.dtype.itemsize

    def own_shape(self, heads: OwnHeads) -> tuple[int, ...]:
        """Returns the shape with one rank's heads alone."""
        return (*self.shape[: self.axis], heads.num, *self.shape[self.axis + 1 :])


def slots_layout(spec: DecoderSpec, num_planes: int, block_size: int, dtype: torch.dtype) -> PageLayout:
    """Returns the layout of pages in full precision, [L, B, P, H, D]."""
    shape = (num_planes, block_size, 2 if spec.latent is None else 1, spec.num_kv_heads, spec.head_dim)
    return PageLayout(shape, 3, dtype)


def cold_layout(spec: DecoderSpec, zones: Zones) -> PageLayout:
    """Returns the layout of compressed pages, [L, H, X]."""
    shape = (layer_groups(spec).num_planes, spec.num_kv_heads, zones.layout.part_bytes)
    return PageLayout(shape, 1, torch.uint8)


def description(spec: DecoderSpec, blocks: PageLayout, hot: PageLayout | None, zones: Zones | None) -> str:
    """Returns what is in pages, and what shaped it: the same on nodes whose pages are alike.

    What a token saw compressed has shaped its keys and values in all layers above.
    """
    groups = layer_groups(spec)
    windows = ",".join(str(window or "all") for window in groups.windows)
    windows += "".join(f" {group}:{rule}" for group, rule in enumerate(groups.rules) if rule is not None)
    if groups.rules:  # of layers that a node chose; windows are the model's own
        windows += f" layers={','.join(map(str, groups.groups))}"
    slots = blocks if hot is None else hot
    _, tokens, parts, heads, width = slots.shape
    dtype = str(slots.dtype).removeprefix("torch.")
    text = f"windows={windows} planes={blocks.shape[0]} tokens={tokens} parts={parts} heads={heads} width={width} dtype={dtype}"
    if zones is None:
        return text
    kind = zones.layout.kind
    return f"{text} keys={kind.keys} values={kind.values} hot={zones.hot_tokens}"


class PagePort:
    """Where the pages of one kind leave and arrive: `block` returns a page in the cache, by its number.

    In the slab there are `stride` bytes from one place to the next.
    """

    def __init__(self, block: Callable[[int], Tensor], layout: PageLayout, heads: OwnHeads, stride: int) -> None:
        self._block, self.layout, self._heads, self._stride = block, layout, heads, stride

    def copy_out(self, pages: Sequence[Placed], slab: mmap.mmap) -> None:
        """Copies pages to their places in the slab."""
        if self._heads.writes:
            for place, block in pages:
                _copy(self._in_slab(slab, place), self._in_cache(block))

    def copy_in(self, pages: Sequence[Placed], slab: mmap.mmap) -> None:
        """Copies places of the slab to their pages."""
        for place, block in pages:
            _copy(self._in_cache(block), self._in_slab(slab, place))

    def _in_slab(self, slab: mmap.mmap, place: int) -> Tensor:
        layout, heads = self.layout, self._heads
        count = layout.page_bytes // layout.dtype.itemsize
        page = torch.frombuffer(slab, dtype=layout.dtype, count=count, offset=place * self._stride)
        return page.view(layout.shape).narrow(layout.axis, heads.first, heads.num)

    def _in_cache(self, block: int) -> Tensor:
        return self._block(block).view(self.layout.own_shape(self._heads))


class RankPages:
    """The pages of one rank: its blocks, and its hot pages if blocks are compressed."""

    def __init__(
        self, spec: DecoderSpec, tp: TensorParallel, cache: KVCache | ZonedCache, options: RunnerOptions, zones: Zones | None
    ) -> None:
        dtype, block_size = options.kv_torch_dtype, options.block_size
        heads = OwnHeads.of(spec, tp)
        hot = None
        if isinstance(cache, ZonedCache) and zones is not None:
            blocks, hot = cold_layout(spec, zones), slots_layout(spec, spec.num_layers, block_size, dtype)
        else:
            blocks = slots_layout(spec, layer_groups(spec).num_planes, block_size, dtype)
        self.page_bytes, self.hot_page_bytes = blocks.page_bytes, 0 if hot is None else hot.page_bytes
        stride = max(self.page_bytes, self.hot_page_bytes)
        self.description = description(spec, blocks, hot, zones)
        self._cache = cache
        self._ports = [PagePort(cache.block, blocks, heads, stride)]
        if hot is not None and isinstance(cache, ZonedCache):
            self._ports.append(PagePort(cache.hot.block, hot, heads, stride))

    def move(self, move: PageMove, slab: mmap.mmap) -> None:
        """Copies this rank's heads."""
        for port, pages in zip(self._ports, (move.pages, move.hot), strict=False):
            (port.copy_out if move.out else port.copy_in)(pages, slab)
        if not move.out and isinstance(self._cache, KVCache):
            self._cache.bound([block for _, block in move.pages])


def _copy(target: Tensor, source: Tensor) -> None:
    """Copies a page.

    On a CPU with one thread: torch's threads would spin on cores that another rank computes on.
    """
    if target.device.type == source.device.type == "cpu":
        np.copyto(target.view(torch.uint8).numpy(), source.view(torch.uint8).numpy())
    else:
        target.copy_(source)
