"""Pages between caches of one rank and of several: each rank writes its heads, once, and every rank finds its own."""

from __future__ import annotations

import mmap

import pytest
import torch

from ryzanstein.worker.model.kv_cache import KVCache
from ryzanstein.worker.model.pages import PageLayout, PagePort

PLANES, TOKENS, HEADS, WIDTH = 3, 4, 4, 8
CPU = torch.device("cpu")


def ranks(size: int, dtype: torch.dtype, parts: int) -> list[PagePort]:
    """The ports of all ranks, with random caches. More ranks than heads: several have the same."""
    ports = []
    for rank in range(size):
        own = max(1, HEADS // size)
        first = rank * HEADS // size
        shape = (PLANES, TOKENS, parts, HEADS, WIDTH)
        layout = PageLayout(shape, (None,), dtype, first, own, writes=rank % max(1, size // HEADS) == 0)
        cache = KVCache(PLANES, 6, TOKENS, parts * own * WIDTH, dtype=dtype, device=CPU)
        for plane in range(PLANES):
            cache.plane(plane).copy_(torch.randn(cache.plane(plane).shape))
        ports.append(PagePort(cache, layout))
    return ports


def moved(sources: list[PagePort], targets: list[PagePort], source: int, target: int) -> None:
    slab = mmap.mmap(-1, 3 * sources[0].layout.page_bytes)
    for port in sources:
        port.copy_out([(1, source)], slab)
    for port in targets:
        port.copy_in([(1, target)], slab)


def heads_of(ports: list[PagePort], block: int, parts: int) -> torch.Tensor:
    """The block of all ranks with the heads side by side, those that several ranks have once."""
    own = [port for port in ports if port.layout.writes]
    shape = (PLANES, TOKENS, parts, own[0].layout.own_heads, WIDTH)
    return torch.cat([port._cache.block(block).reshape(shape) for port in own], dim=3)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("parts", [1, 2])
@pytest.mark.parametrize(("first", "second"), [(1, 1), (1, 2), (2, 4), (4, 1), (1, 8), (8, 2)])
def test_every_rank_gets_its_heads_however_they_are_shared(dtype, parts, first, second) -> None:
    sources, targets = ranks(first, dtype, parts), ranks(second, dtype, parts)
    assert len({(port.layout.page_bytes, port.layout.description) for port in (*sources, *targets)}) == 1
    before = [port._cache.block(2).clone() for port in targets]
    moved(sources, targets, source=4, target=3)
    assert torch.equal(heads_of(targets, 3, parts), heads_of(sources, 4, parts))
    assert all(torch.equal(port._cache.block(2), kept) for port, kept in zip(targets, before, strict=True))
