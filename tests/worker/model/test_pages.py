"""Pages between caches of one rank and of several: each rank writes its heads, once, and every rank finds its own."""

from __future__ import annotations

import mmap

import pytest
import torch

from ryzanstein.worker.cache.kv_cache import KVCache
from ryzanstein.worker.cache.pages import OwnHeads, PageLayout, PagePort
from ryzanstein.worker.cache.zoned_cache import ZonedCache
from ryzanstein.worker.collectives.local import LocalCollectives
from ryzanstein.worker.collectives.parallel import TensorParallel

PLANES, TOKENS, HEADS, WIDTH = 3, 4, 4, 8
PART = 48
CPU = torch.device("cpu")


def heads_of_rank(rank: int, size: int) -> OwnHeads:
    """More ranks than heads: several have the same. Three ranks have two heads, one and one."""
    share = TensorParallel(rank, size, LocalCollectives()).heads(8 * HEADS, HEADS)
    return OwnHeads(share.first_kv_head, share.num_kv_heads, share.owns)


class Rank:
    """The port of one rank, with a random cache."""

    def __init__(self, layout: PageLayout, heads: OwnHeads) -> None:
        self.layout, self.heads = layout, heads
        self.cache: KVCache | ZonedCache
        if layout.axis == 1:
            self.cache = ZonedCache(PLANES, 6, heads.num * PART, KVCache(1, 1, 1, 1, dtype=torch.float32, device=CPU))
            for block in range(6):
                self.cache.block(block).random_(0, 256)
        else:
            self.cache = KVCache(PLANES, 6, TOKENS, layout.shape[2] * heads.num * WIDTH, dtype=layout.dtype, device=CPU)
            for plane in range(PLANES):
                self.cache.plane(plane).copy_(torch.randn(self.cache.plane(plane).shape))
        self.port = PagePort(self.cache.block, layout, heads, layout.page_bytes + 64)

    def block(self, number: int) -> torch.Tensor:
        return self.cache.block(number).reshape(self.layout.own_shape(self.heads))


def whole(ranks: list[Rank], block: int) -> torch.Tensor:
    """The block of all ranks with the heads side by side, those that several ranks have once."""
    return torch.cat([rank.block(block) for rank in ranks if rank.heads.writes], dim=ranks[0].layout.axis)


LAYOUTS = [
    PageLayout((PLANES, TOKENS, 2, HEADS, WIDTH), 3, torch.float32),
    PageLayout((PLANES, TOKENS, 1, HEADS, WIDTH), 3, torch.bfloat16),
    PageLayout((PLANES, TOKENS, 2, HEADS, WIDTH), 3, torch.bfloat16),
    PageLayout((PLANES, HEADS, PART), 1, torch.uint8),
]


NUMBERS_OF_RANKS = [(1, 1), (1, 2), (2, 4), (4, 1), (1, 8), (8, 2), (1, 3), (3, 2), (2, 3), (3, 1), (6, 3)]


@pytest.mark.parametrize("layout", LAYOUTS, ids=["float32", "latents", "bfloat16", "compressed"])
@pytest.mark.parametrize(
    ("first", "second"), [(1, 1), (1, 2), (2, 4), (4, 1), (1, 8), (8, 2), (1, 3), (3, 2), (2, 3), (3, 1), (6, 3)]
)
def test_every_rank_gets_its_heads_however_they_are_shared(layout, first, second) -> None:
    sources = [Rank(layout, heads_of_rank(rank, first)) for rank in range(first)]
    targets = [Rank(layout, heads_of_rank(rank, second)) for rank in range(second)]
    before = [rank.block(2).clone() for rank in targets]
    slab = mmap.mmap(-1, 3 * (layout.page_bytes + 64))
    for rank in sources:
        rank.port.copy_out([(1, 4)], slab)
    for rank in targets:
        rank.port.copy_in([(1, 3)], slab)
    assert torch.equal(whole(targets, 3), whole(sources, 4))
    assert all(torch.equal(rank.block(2), kept) for rank, kept in zip(targets, before, strict=True))
