"""Brings back the pages of a prompt that the ranks do not have, where that takes less time than computing them.

Both costs are measured: a prompt token by the steps of this engine, a page by earlier fetches from
the same source.

In a model whose layers all have windows, a prompt resumes after its page m - 1 if in each group the
pages are there that its next token sees: the last ones, and those that last.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate, chain

import structlog

from ryzanstein.worker.agent.pages.mover import PageMover, PagesLost
from ryzanstein.worker.agent.pages.page import Page
from ryzanstein.worker.agent.pages.store import PageScope, PageStore, StoreFailed
from ryzanstein.worker.agent.pages.tiers.pieces import MAX_KEYS
from ryzanstein.worker.engine.extents import Extents
from ryzanstein.worker.engine.memory.travel import name_of
from ryzanstein.worker.engine.messages import EngineStats, StepEvents
from ryzanstein.worker.page_metrics import PageMetrics

IsThere = Callable[[int, int], bool]
"""Whether the page of this number is there, of this group."""


def seen_pages(extents: Extents, group: int, num_pages: int) -> Iterator[int]:
    """Yields the pages of a group that are read by the token after so many pages."""
    window, lasting = extents.traveling[group]
    first = extents.first_seen(window, num_pages * extents.block_size)
    return chain(extents.lasting_pages(lasting, first), range(first, num_pages))


def last_resumable(extents: Extents, num_pages: int, is_there: IsThere) -> int:
    """Returns the most pages after which a prompt of so many pages resumes; 0: after none."""
    counts = [_counts(extents, group, num_pages, is_there) for group in range(len(extents.traveling))]
    return next((num for num in range(num_pages, 0, -1) if all(_resumes(each, extents, num) for each in counts)), 0)


class _Counts:
    """Of one group: how many of the first pages, and of the first lasting ones, are there."""

    def __init__(self, group: int, pages: Sequence[bool], lasting: Sequence[bool]) -> None:
        self.group = group
        self.pages, self.lasting = list(accumulate(pages, initial=0)), list(accumulate(lasting, initial=0))


def _counts(extents: Extents, group: int, num_pages: int, is_there: IsThere) -> _Counts:
    lasting = extents.traveling[group][1]
    pages = [is_there(group, page) for page in range(num_pages)]
    return _Counts(group, pages, [there and extents.lasts(lasting, page) for page, there in enumerate(pages)])


def _resumes(counts: _Counts, extents: Extents, num_pages: int) -> bool:
    window, lasting = extents.traveling[counts.group]
    first = extents.first_seen(window, num_pages * extents.block_size)
    whole_window = counts.pages[num_pages] - counts.pages[first] == num_pages - first
    return whole_window and counts.lasting[first] == extents.num_lasting(lasting, first)


log = structlog.get_logger(__name__)

LEAST_TOKENS = 128  # fewer are computed at once
_KEEP = 0.9
_UNKNOWN_TOKEN_S = 0.005
_LEAST_S = 1.0  # a fetch may take, however few tokens it saves: a first connection takes a moment
MOST_S = 3.0  # for all sources: a router gives up a node that does not accept an attempt within 5 s
_RANKS_S = 0.5  # more, where this node's ranks answer late
_SLOW_REST_S = 10.0  # of a source from which nothing came in time
SAVING = 0.8  # of the time of computing, that a fetch may take


class PrefillPace:
    """What a prompt token costs here, in seconds; 0: unknown."""

    def __init__(self) -> None:
        self.token_s = 0.0

    def worth_s(self, num_tokens: int) -> float:
        """Returns how long a fetch may take that saves the computing of so many tokens."""
        return SAVING * num_tokens * (self.token_s or _UNKNOWN_TOKEN_S)

    def step(self, events: StepEvents, before: EngineStats) -> None:
        """Learns from a step that computed much of a prompt."""
        tokens = events.stats.prefill_tokens - before.prefill_tokens
        if tokens >= 16:
            self.token_s = _mean(self.token_s, events.step_s / tokens)


@dataclass(slots=True)
class PageSource:
    """A store from which pages may come back. `page_s`: what one cost so far; 0: unknown.

    It is not asked until `rests_until` (monotonic seconds).
    """

    name: str
    store: PageStore
    page_s: float = 0.0
    rests_until: float = 0.0


class Restoring:
    """One prompt's way back into the ranks: from one source after the other."""

    def __init__(self, mover: PageMover, scope: PageScope, extents: Extents, pace: PrefillPace, metrics: PageMetrics) -> None:
        self._mover, self._scope, self._extents = mover, scope, extents
        self._pace, self._metrics = pace, metrics
        self._ends_s = 0.0
        self.num_restored = 0

    async def run(self, keys: Sequence[bytes], sources: Sequence[PageSource], ends_s: float) -> None:
        """Restores what is worth it of the pages with these keys, a whole chain, until `ends_s` (monotonic seconds).

        First the pages of groups of layers that read all tokens, then, where those end, the last
        ones of groups with a window and the hot ones: without them the others are of no use. If all
        groups have a window, those where the latest turn can be resumed.
        """
        whole = [group for group, window in enumerate(self._extents.windows) if window is None]
        if len(keys) * self._extents.block_size < LEAST_TOKENS:
            return
        self._ends_s = ends_s
        try:
            async with asyncio.timeout(max(0.0, ends_s - time.monotonic()) + _RANKS_S):
                await self._run(keys, whole, sources)
        except (PagesLost, TimeoutError):
            return

    async def _run(self, keys: Sequence[bytes], whole: Sequence[int], sources: Sequence[PageSource]) -> None:
        if not whole:
            await self._windows_alone(keys, sources)
            return
        num_pages = await self._all(keys, whole, sources)
        if num_pages * self._extents.block_size >= LEAST_TOKENS:
            await self._windows(keys[:num_pages], num_pages * self._extents.block_size, sources)

    async def _windows(self, keys: Sequence[bytes], num_tokens: int, sources: Sequence[PageSource]) -> None:
        """Restores what groups with a window need to go on after these pages, which would save so many tokens."""
        for group, (window, _) in enumerate(self._extents.traveling):
            if window is not None:
                names = [name_of(keys[page], group) for page in seen_pages(self._extents, group, len(keys))]
                await self._names(names, num_tokens, sources)

    async def _windows_alone(self, keys: Sequence[bytes], sources: Sequence[PageSource]) -> None:
        """Restores what a model needs whose layers all have windows, from the first source with which it resumes later.

        Nothing says where earlier turns ended, so the sources are asked which pages they lack.
        """
        size, num = self._extents.block_size, len(keys)
        names = [name_of(key, group) for group in range(len(self._extents.traveling)) for key in keys]
        lacking = frozenset(await self._mover.missing(names))
        here = self._last_resumable(num, lacking)
        for source in sources:
            if (num - here) * size < LEAST_TOKENS:
                return
            lacking_there = await self._lacking(source, names)
            last = self._last_resumable(num, lacking & lacking_there)
            if (last - here) * size >= LEAST_TOKENS:
                await self._windows(keys[:last], (last - here) * size, [source])
                return

    def _last_resumable(self, num_pages: int, lacking: frozenset[int]) -> int:
        return last_resumable(self._extents, num_pages, lambda group, page: group * num_pages + page not in lacking)

    async def _lacking(self, source: PageSource, names: Sequence[bytes]) -> frozenset[int]:
        """Returns the places in `names` of what a source lacks: all, if it cannot be asked."""
        everything, began = frozenset(range(len(names))), time.monotonic()
        if not source.rests_until <= began < self._ends_s:
            return everything
        found: set[int] = set()
        try:
            async with asyncio.timeout(min(_LEAST_S, self._ends_s - began)):
                for start in range(0, len(names), MAX_KEYS):
                    missing = await source.store.missing(self._scope, names[start : start + MAX_KEYS])
                    found.update(start + place for place in missing)
        except (StoreFailed, TimeoutError) as error:
            self._failed(source, error)
            return everything
        return frozenset(found)

    def _failed(self, source: PageSource, error: Exception, *, rests: bool = True) -> None:
        self._metrics.restore_failed(source.name)
        if rests:
            source.rests_until = time.monotonic() + getattr(error, "rest_s", _SLOW_REST_S)
        log.warning("pages not restored", source=source.name, cause=getattr(error, "cause", "slow"))

    async def _all(self, keys: Sequence[bytes], groups: Sequence[int], sources: Sequence[PageSource]) -> int:
        """Restores pages of these groups; returns how many there are now, from the first one on."""
        names = [name_of(key, group) for key in keys for group in groups]
        missing = await self._mover.missing(names)
        num_tokens = len(missing) // len(groups) * self._extents.block_size
        if num_tokens >= LEAST_TOKENS:
            await self._names(names, num_tokens, sources)
            missing = await self._mover.missing(names)
        return missing[0] // len(groups) if missing else len(keys)

    async def _names(self, names: Sequence[bytes], num_tokens: int, sources: Sequence[PageSource]) -> None:
        """Restores a piece of a chain, which would save the computing of so many tokens."""
        for source in sources:
            if not (missing := await self._mover.missing(names)):
                return
            first = missing[0]
            await self._from(source, names[first - 1] if first else b"", names[first:], num_tokens)

    async def _from(self, source: PageSource, parent: bytes, names: Sequence[bytes], num_tokens: int) -> None:
        worth_s = self._pace.worth_s(num_tokens)
        began, num = time.monotonic(), 0
        if source.page_s * len(names) > worth_s or not source.rests_until <= began < self._ends_s:
            return
        batch: list[Page] = []
        num_bytes = 0
        try:
            async with asyncio.timeout(min(max(_LEAST_S, worth_s), self._ends_s - began)):
                async for page in source.store.fetch(self._scope, names):
                    batch.append(page)
                    num_bytes += len(page.content)
                    if num_bytes >= self._mover.batch_bytes:
                        num += await self._mover.put(batch, parent)
                        parent, batch, num_bytes = batch[-1].key, [], 0
                num += await self._mover.put(batch, parent)
        except (StoreFailed, TimeoutError) as error:
            self._failed(source, error, rests=not (num or batch))
        took_s = time.monotonic() - began
        if num:
            source.page_s = _mean(source.page_s, took_s / num)
            self._metrics.restored(source.name, num)
            self.num_restored += num
            log.info("pages restored", source=source.name, pages=num, took_s=round(took_s, 3))


def _mean(mean: float, value: float) -> float:
    return _KEEP * mean + (1 - _KEEP) * value if mean else value
