"""Copies pages between a rank's KV cache and the slab that it shares with the agent and the other ranks.

In the slab a page has the heads of all ranks, so that it does not depend on how many ranks the node
has. Each rank copies its own heads.

Legend: L planes of a block, one for each layer of its group, B its tokens, P parts of a slot (keys
and values; one for a latent), H heads of all ranks, D head dimension.
"""

from __future__ import annotations

import mmap
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from ryzanstein.worker.engine.extents import Windows
from ryzanstein.worker.engine.plan import Placed
from ryzanstein.worker.model.architectures.spec import DecoderSpec
from ryzanstein.worker.model.kv_cache import KVCache
from ryzanstein.worker.model.layer_groups import layer_groups
from ryzanstein.worker.model.parallel import TensorParallel
from ryzanstein.worker.sparse import SparseRule


@dataclass(frozen=True, slots=True)
class PageLayout:
    """A page in the slab, and this rank's heads in it: those from `first_head` on, `own_heads` of them.

    `writes`: this rank is the first of those that have these heads.
    """

    shape: tuple[int, int, int, int, int]  # L, B, P, H, D
    windows: Windows
    dtype: torch.dtype
    first_head: int
    own_heads: int
    writes: bool
    rules: tuple[SparseRule | None, ...] = ()

    @classmethod
    def of(cls, spec: DecoderSpec, tp: TensorParallel, block_size: int, dtype: torch.dtype) -> PageLayout:
        """Returns the layout of a decoder's pages."""
        share = tp.heads(spec.num_heads, spec.num_kv_heads)
        groups = layer_groups(spec)
        shape = (groups.num_planes, block_size, 2 if spec.latent is None else 1, spec.num_kv_heads, spec.head_dim)
        copies = max(1, tp.size * share.num_kv_heads // spec.num_kv_heads)
        return cls(shape, groups.windows, dtype, share.first_kv_head, share.num_kv_heads, tp.rank % copies == 0, groups.rules)

    @property
    def page_bytes(self) -> int:
        return int(torch.Size(self.shape).numel()) * self.dtype.itemsize

    @property
    def description(self) -> str:
        """What is in a page, the same on nodes whose pages are alike."""
        planes, tokens, parts, heads, width = self.shape
        dtype = str(self.dtype).removeprefix("torch.")
        windows = ",".join(str(window or "all") for window in self.windows)
        sparse = " ".join(("", *(f"{group}:{rule}" for group, rule in enumerate(self.rules) if rule is not None)))
        return (
            f"windows={windows}{sparse} planes={planes} tokens={tokens} parts={parts} heads={heads} width={width} dtype={dtype}"
        )


class PagePort:
    """Where the pages of one rank's cache leave and arrive."""

    def __init__(self, cache: KVCache, layout: PageLayout) -> None:
        self._cache, self.layout = cache, layout

    def copy_out(self, pages: Sequence[Placed], slab: mmap.mmap) -> None:
        """Copies blocks to their places in the slab."""
        if self.layout.writes:
            for place, block in pages:
                _copy(self._in_slab(slab, place), self._in_cache(block))

    def copy_in(self, pages: Sequence[Placed], slab: mmap.mmap) -> None:
        """Copies places of the slab to their blocks."""
        for place, block in pages:
            _copy(self._in_cache(block), self._in_slab(slab, place))

    def _in_slab(self, slab: mmap.mmap, place: int) -> Tensor:
        layout = self.layout
        count = layout.page_bytes // layout.dtype.itemsize
        page = torch.frombuffer(slab, dtype=layout.dtype, count=count, offset=place * layout.page_bytes)
        return page.view(layout.shape)[:, :, :, layout.first_head : layout.first_head + layout.own_heads]

    def _in_cache(self, block: int) -> Tensor:
        planes, tokens, parts, _, width = self.layout.shape
        return self._cache.block(block).view(planes, tokens, parts, self.layout.own_heads, width)


def _copy(target: Tensor, source: Tensor) -> None:
    """Copies a page.

    On a CPU with one thread: torch's threads would spin on cores that another rank computes on.
    """
    if target.device.type == source.device.type == "cpu":
        np.copyto(target.view(torch.uint8).numpy(), source.view(torch.uint8).numpy())
    else:
        target.copy_(source)
