"""Pages in the agent's memory: what the pool had to evict comes back from here without being computed."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import AsyncIterator, Callable, Sequence

from ryzanstein.worker.agent.pages.page import Page
from ryzanstein.worker.agent.pages.store import PageScope

_Name = tuple[bytes, bytes]


class HostTier:
    """A `PageStore` in memory, of at most `max_bytes`; the least recently used page goes first.

    `on_size` is called with the bytes in use, `on_corrupt` for each page that was damaged here.
    """

    def __init__(self, max_bytes: int, on_size: Callable[[int], None], on_corrupt: Callable[[], None]) -> None:
        self._max_bytes, self._on_size, self._on_corrupt = max_bytes, on_size, on_corrupt
        self._pages: OrderedDict[_Name, tuple[bytes, int]] = OrderedDict()
        self._num_bytes = 0

    async def missing(self, scope: PageScope, keys: Sequence[bytes]) -> Sequence[int]:
        """See `PageStore.missing`. The beginning of the chain is kept longest."""
        missing = [place for place, key in enumerate(keys) if (scope.root, key) not in self._pages]
        for key in reversed(keys):
            if (scope.root, key) in self._pages:
                self._pages.move_to_end((scope.root, key))
        return missing

    async def send(self, scope: PageScope, parent: bytes, batches: AsyncIterator[Sequence[Page]]) -> int:
        """See `PageStore.send`."""
        stored = 0
        async for pages in batches:
            for page in pages:
                self._drop((scope.root, page.key))
                self._pages[scope.root, page.key] = (bytes(page.content), page.checksum(scope.root))
                self._num_bytes += len(page.content)
            stored += len(pages)
            while self._num_bytes > self._max_bytes:
                self._drop(next(iter(self._pages)))
        self._on_size(self._num_bytes)
        return stored

    async def fetch(self, scope: PageScope, keys: Sequence[bytes]) -> AsyncIterator[Page]:
        """See `PageStore.fetch`."""
        for key in keys:
            if (found := self._pages.get((scope.root, key))) is None:
                return
            page = Page(key, found[0])
            if page.checksum(scope.root) != found[1]:
                self._drop((scope.root, key))
                self._on_corrupt()
                return
            yield page

    async def close(self) -> None:
        """Does nothing: the tier is shared by the models of the node."""

    def _drop(self, name: _Name) -> None:
        if (dropped := self._pages.pop(name, None)) is not None:
            self._num_bytes -= len(dropped[0])
