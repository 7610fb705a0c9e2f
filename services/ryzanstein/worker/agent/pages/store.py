"""What pages are sent to and fetched from: other nodes, memory, disk."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass
from typing import Protocol

from ryzanstein.worker.agent.pages.page import Page, PageSizes


@dataclass(frozen=True, slots=True)
class PageScope:
    """Which pages are meant: of a model, for a cache scope, under their root, of these sizes.

    `earlier` is the root under which the version before wrote them to disk, if it is another one.
    """

    model: str
    name: str
    root: bytes
    sizes: PageSizes
    earlier: bytes = b""


class StoreFailed(Exception):
    """A store cannot be used now, for a cause that is a label of metrics. It rests for `rest_s`."""

    def __init__(self, cause: str, rest_s: float) -> None:
        super().__init__(cause)
        self.cause, self.rest_s = cause, rest_s


class PageStore(Protocol):
    """Pages outside of the ranks. All methods raise StoreFailed."""

    async def missing(self, scope: PageScope, keys: Sequence[bytes]) -> Sequence[int]:
        """Returns the places in `keys` of pages that the store does not have."""
        ...

    async def send(self, scope: PageScope, parent: bytes, batches: AsyncIterator[Sequence[Page]]) -> int:
        """Stores pages of one chain after the page `parent`, a batch at a time; returns how many were stored."""
        ...

    def fetch(self, scope: PageScope, keys: Sequence[bytes]) -> AsyncIterator[Page]:
        """Yields pages in the order of `keys`, up to the first that is missing or damaged."""
        ...

    async def close(self) -> None: ...
