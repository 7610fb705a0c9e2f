"""Takes pages out of the ranks and puts pages into them, a bounded number between two steps.

One request at a time uses the slab. The ranks copy between two steps, so the size of a request is
what delays answers: while something runs, it follows the length of the last step.
"""

from __future__ import annotations

import asyncio
import mmap
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import dataclass, field
from itertools import count
from typing import Any, TypeVar

from ryzanstein.worker.agent.pages.page import Page, PageSizes
from ryzanstein.worker.engine.messages import ExportPages, FindPages, ImportPages
from ryzanstein.worker.supervision.group import EngineGroup
from ryzanstein.worker.supervision.messages import PageRequest, PagesAnswer

SLAB_BYTES = 32 * 2**20
IDLE_BYTES = 8 * 2**20  # at once, while nothing runs that could be delayed
STEP_SHARE = 0.05  # of a step's time, for copying before the next one
_COPY_BYTES_S = 2e9

_Result = TypeVar("_Result")


class PagesLost(Exception):
    """The ranks are gone, and their pages with them, or there is no memory for the slab."""


@dataclass(slots=True)
class _Pending:
    answer: asyncio.Future[list[int]]
    num_ranks: int
    ranks: set[int] = field(default_factory=set)
    places: list[int] = field(default_factory=list)


class PageMover:
    """The pages of one group of ranks. The slab takes memory from the first page on.

    `busy` returns whether something runs that waits for steps.
    """

    def __init__(self, group: EngineGroup, num_ranks: int, sizes: PageSizes, busy: Callable[[], bool]) -> None:
        self.sizes = sizes
        self._busy = busy
        self._group, self._num_ranks = group, num_ranks
        self._num_places = max(1, SLAB_BYTES // sizes.largest)  # each has room for the largest page
        self._slab: mmap.mmap | None = None
        self._using = asyncio.Lock()
        self._numbers = count(1)
        self._pending: dict[int, _Pending] = {}
        self._gone = False

    @property
    def batch_bytes(self) -> int:
        """The bytes that one request is to move now."""
        step_s = max((rank.last_step_s for rank in self._group.progress()), default=0.0)
        return int(STEP_SHARE * step_s * _COPY_BYTES_S) if self._busy() else IDLE_BYTES

    def fits(self, keys: Sequence[bytes]) -> int:
        """Returns how many of these pages, from the first on, one request moves now: at least one, if there are any."""
        return self.sizes.fit(keys[: self._num_places], self.batch_bytes)

    async def missing(self, keys: Sequence[bytes]) -> list[int]:
        """Returns the places in `keys` of pages that the ranks do not have. Raises PagesLost."""
        return await self._ask(FindPages(next(self._numbers), list(keys)), num_ranks=1)

    async def take(self, keys: Sequence[bytes]) -> list[Page]:
        """Returns the pages that the ranks have of these keys, at most as many as the slab holds. Raises PagesLost."""
        return await self._whole(self._take(keys))

    async def _take(self, keys: Sequence[bytes]) -> list[Page]:
        async with self._using:
            self._memory()
            places = await self._ask(ExportPages(next(self._numbers), list(keys[: self._num_places])), self._num_ranks)
            return [Page(keys[place], self._read(place, self.sizes.of(keys[place]))) for place in places]

    async def put(self, pages: Sequence[Page], parent: bytes) -> int:
        """Puts pages of one chain, after the page `parent`, into the ranks; returns how many they took.

        Raises PagesLost.
        """
        taken = 0
        while pages:
            size = self.fits([page.key for page in pages[: self._num_places]])
            taken += await self._whole(self._put(pages[:size], parent))
            parent, pages = pages[size - 1].key, pages[size:]
        return taken

    async def _put(self, pages: Sequence[Page], parent: bytes) -> int:
        async with self._using:
            for place, page in enumerate(pages):
                start = place * self.sizes.largest
                self._memory()[start : start + len(page.content)] = page.content
            request = ImportPages(next(self._numbers), [page.key for page in pages], parent)
            return len(await self._ask(request, self._num_ranks))

    def on_answer(self, answer: PagesAnswer) -> None:
        """Takes the answer of one rank."""
        if (pending := self._pending.get(answer.number)) is None:
            return
        pending.ranks.add(answer.rank)
        pending.places += answer.places
        if len(pending.ranks) == pending.num_ranks and not pending.answer.done():
            pending.answer.set_result(pending.places)

    def on_gone(self) -> None:
        """Fails what waits for the ranks: they are gone."""
        self._gone = True
        for pending in self._pending.values():
            if not pending.answer.done():
                pending.answer.set_exception(PagesLost("the ranks are gone"))

    def _memory(self) -> mmap.mmap:
        """Returns the slab. The ranks look for it when the first page is moved."""
        if self._slab is None:
            try:
                self._slab = self._group.slab(self._num_places * self.sizes.largest)
            except OSError as error:
                raise PagesLost(f"no memory for pages: {error}") from None
        return self._slab

    def _read(self, place: int, num_bytes: int) -> bytes:
        start = place * self.sizes.largest
        return self._memory()[start : start + num_bytes]

    async def _whole(self, use: Coroutine[Any, Any, _Result]) -> _Result:
        """Runs a use of the slab to its end, also when the caller is cancelled: the ranks go on."""
        task = asyncio.ensure_future(use)
        task.add_done_callback(_retrieve)
        return await asyncio.shield(task)

    async def _ask(self, request: PageRequest, num_ranks: int) -> list[int]:
        """Sends a request and returns rank 0's answer when so many ranks have answered."""
        if self._gone:
            raise PagesLost("the ranks are gone")
        future: asyncio.Future[list[int]] = asyncio.get_running_loop().create_future()
        self._pending[request.number] = _Pending(future, num_ranks)
        try:
            self._group.send(request)
            return await future
        finally:
            del self._pending[request.number]


def _retrieve(task: asyncio.Task[Any]) -> None:
    """Marks the error of a use whose caller has left as seen."""
    if not task.cancelled():
        task.exception()
