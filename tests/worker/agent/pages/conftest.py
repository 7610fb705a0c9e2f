"""A mover without ranks: pages in a dict, in company of what can go wrong with ranks."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import pytest
from prometheus_client import CollectorRegistry

from ryzanstein.worker.agent.pages.mover import PagesLost
from ryzanstein.worker.agent.pages.page import Page, PageSizes, root_of
from ryzanstein.worker.agent.pages.store import PageScope
from ryzanstein.worker.page_metrics import PageMetrics

PAGE_BYTES = 4096


class FakeMover:
    """The interface of `PageMover`."""

    def __init__(self, pages: Sequence[Page] = (), batch: int = 3) -> None:
        self.pages = {page.key: page for page in pages}
        self.batch, self.batch_bytes = batch, batch * PAGE_BYTES
        self.parents: dict[bytes, bytes] = {}
        self.lost = False

    def fits(self, keys: Sequence[bytes]) -> int:
        return min(len(keys), self.batch)

    async def missing(self, keys: Sequence[bytes]) -> list[int]:
        self._check()
        return [place for place, key in enumerate(keys) if key not in self.pages]

    async def take(self, keys: Sequence[bytes]) -> list[Page]:
        self._check()
        assert len(keys) <= self.batch
        return [self.pages[key] for key in keys if key in self.pages]

    async def put(self, pages: Sequence[Page], parent: bytes) -> int:
        self._check()
        for page in pages:
            self.pages[page.key] = page
            self.parents[page.key] = parent
            parent = page.key
        return len(pages)

    def _check(self) -> None:
        if self.lost:
            raise PagesLost("gone")


@pytest.fixture
def new_mover() -> Callable[..., FakeMover]:
    return FakeMover


@pytest.fixture
def chain() -> Callable[..., list[Page]]:
    """Pages of a chain: every byte of each depends on its number."""

    def make(num: int, salt: int = 0) -> list[Page]:
        keys = [bytes([salt, i // 256, i % 256]).ljust(16, b"k") + b"\0" for i in range(num)]
        return [Page(key, bytes([(7 * i + salt) % 256]) * PAGE_BYTES) for i, key in enumerate(keys)]

    return make


@pytest.fixture
def scope() -> PageScope:
    return PageScope("m", "", root_of(b"weights", "format", ""), PageSizes(PAGE_BYTES))


class Counted:
    """Reads what `PageMetrics` counted."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        self.metrics = PageMetrics(self.registry)

    def __call__(self, name: str, **labels: str) -> float:
        return self.registry.get_sample_value(f"ryzanstein_worker_{name}", labels) or 0.0


@pytest.fixture
def counted() -> Counted:
    return Counted()
