"""Where a prompt can be resumed in a model whose layers all have windows: after which of its pages, given which are there.

Pure functions. A prompt resumes after its page m - 1 if in each group the pages are there that its next
token sees: the last ones, and those that last.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from itertools import accumulate, chain

from ryzanstein.worker.engine.extents import Extents

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
