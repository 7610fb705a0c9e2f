"""Pages that come back before a prompt is computed: from the first source that has them, if that is worth it."""

from __future__ import annotations

import asyncio
import time
from itertools import pairwise
from types import SimpleNamespace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ryzanstein.worker.agent.pages.mover import PagesLost
from ryzanstein.worker.agent.pages.page import Page
from ryzanstein.worker.agent.pages.restoring import PageSource, PrefillPace, Restoring, last_resumable
from ryzanstein.worker.agent.pages.store import StoreFailed
from ryzanstein.worker.agent.pages.tiers.pieces import MAX_KEYS
from ryzanstein.worker.engine.extents import Extents, Lasting
from ryzanstein.worker.engine.memory.travel import name_of

BLOCK = 16


class Store:
    """Pages with a price, and a way to fail."""

    def __init__(self, pages, *, page_s=0.0, fails_after=None) -> None:
        self.pages = {page.key: page for page in pages}
        self.page_s, self.fails_after, self.asked = page_s, fails_after, []

    async def missing(self, scope, keys):
        assert len(keys) <= MAX_KEYS
        return [place for place, key in enumerate(keys) if key not in self.pages]

    async def fetch(self, scope, keys):
        self.asked.append(list(keys))
        for number, key in enumerate(keys):
            if number == self.fails_after:
                raise StoreFailed("unavailable", 2)
            if key not in self.pages:
                return
            await asyncio.sleep(self.page_s)
            yield self.pages[key]


def restoring(mover, scope, counted, token_s=0.0):
    pace = PrefillPace()
    pace.token_s = token_s
    return Restoring(mover, scope, Extents((None,), BLOCK), pace, counted.metrics)


def soon(most_s: float = 3.0) -> float:
    """When restoring must end."""
    return time.monotonic() + most_s


async def test_the_rest_of_a_chain_comes_from_the_next_source(chain, scope, new_mover, counted) -> None:
    pages = chain(20)
    mover, keys = new_mover(pages[:3]), [page.key for page in pages]
    disk, node = PageSource("disk", Store(pages[:9])), PageSource("node", Store(pages))
    await restoring(mover, scope, counted).run([key[:-1] for key in keys], [disk, node], soon())
    assert [mover.pages[key] for key in keys] == pages
    assert (disk.store.asked, node.store.asked) == ([keys[3:]], [keys[9:]])
    assert counted("pages_restored_total", source="disk") == 6
    assert counted("pages_restored_total", source="node") == 11
    assert all(mover.parents[key] == before for before, key in pairwise(keys[2:]))
    assert disk.page_s > 0


async def test_a_few_tokens_are_computed_at_once(chain, scope, new_mover, counted) -> None:
    pages = chain(10)
    source = PageSource("node", Store(pages))
    await restoring(new_mover(pages[:4]), scope, counted).run([page.key[:-1] for page in pages], [source], soon())
    assert source.store.asked == []


async def test_a_source_that_is_known_to_cost_more_than_computing_is_not_asked(chain, scope, new_mover, counted) -> None:
    pages = chain(20)
    source = PageSource("disk", Store(pages), page_s=0.1)
    await restoring(new_mover(), scope, counted, token_s=0.001).run([page.key[:-1] for page in pages], [source], soon())
    assert source.store.asked == []
    await restoring(new_mover(), scope, counted, token_s=0.1).run([page.key[:-1] for page in pages], [source], soon())
    assert len(source.store.asked) == 1


async def test_a_source_that_fails_half_way_leaves_what_came_and_is_counted(chain, scope, new_mover, counted) -> None:
    pages = chain(20)
    mover = new_mover()
    failing, slow = PageSource("disk", Store(pages, fails_after=7)), PageSource("node", Store(pages, page_s=0.1))
    await restoring(mover, scope, counted, token_s=0.001).run([page.key[:-1] for page in pages], [failing, slow], soon())
    assert 6 <= len(mover.pages) < 20
    assert counted("page_restore_failures_total", source="disk") == 1
    assert counted("page_restore_failures_total", source="node") == 1


async def test_a_source_that_hangs_delays_one_prompt_for_less_than_a_router_waits_and_then_none(
    chain, scope, new_mover, counted
) -> None:
    pages = chain(20)
    keys, hangs = [page.key[:-1] for page in pages], PageSource("node", Store(pages, page_s=3600))
    began = time.monotonic()
    for _ in range(3):
        await restoring(new_mover(), scope, counted, token_s=1.0).run(keys, [hangs, PageSource("node", Store([]))], soon(0.5))
    assert 0.5 <= time.monotonic() - began < 1.0
    assert len(hangs.store.asked) == 1


async def test_ranks_that_answer_late_are_not_waited_for(chain, scope, new_mover, counted) -> None:
    mover, source = new_mover(), PageSource("node", Store(chain(20)))
    mover.missing = lambda names: asyncio.sleep(3600)
    async with asyncio.timeout(5):
        await restoring(mover, scope, counted).run([page.key[:-1] for page in chain(20)], [source], soon())
    assert (source.store.asked, mover.pages) == ([], {})


async def test_the_ranks_are_not_asked_about_a_short_prompt(chain, scope, counted) -> None:
    mover, source = SimpleNamespace(), PageSource("node", Store(chain(7)))
    await restoring(mover, scope, counted).run([page.key[:-1] for page in chain(7)], [source], soon())
    assert source.store.asked == []


async def test_ranks_that_are_lost_meanwhile_end_it_quietly(chain, scope, new_mover, counted) -> None:
    mover = new_mover()
    mover.lost = True
    with pytest.raises(PagesLost):
        await mover.missing([])
    await restoring(mover, scope, counted).run(
        [page.key[:-1] for page in chain(20)], [PageSource("node", Store(chain(20)))], soon()
    )


async def test_of_windows_and_of_hot_pages_the_last_ones_come_after_all_others(chain, scope, new_mover, counted) -> None:
    keys = [page.key[:-1] for page in chain(20)]
    whole, window, hot = ([Page(key + bytes([group]), b"x" * 10) for key in keys] for group in range(3))
    source, mover = PageSource("node", Store([*whole[:18], *window, *hot[15:]])), new_mover()
    it = Restoring(mover, scope, Extents((None, 40), BLOCK, hot_tokens=16), PrefillPace(), counted.metrics)
    await it.run(keys, [source], soon())
    assert list(mover.pages.values()) == [*whole[:18], *window[15:18], *hot[17:18]]


def test_the_pace_is_learned_from_steps_that_computed_prompts() -> None:
    pace = PrefillPace()

    def step(before, after, step_s) -> None:
        events = SimpleNamespace(stats=SimpleNamespace(prefill_tokens=after), step_s=step_s)
        pace.step(events, SimpleNamespace(prefill_tokens=before))

    step(0, 8, 1.0)
    assert pace.token_s == 0
    step(8, 108, 1.0)
    assert pace.token_s == pytest.approx(0.01)
    step(108, 208, 2.0)
    assert 0.01 < pace.token_s < 0.02


def page_of(page: Page, group: int) -> Page:
    return Page(page.key[:-1] + bytes([group]), page.content)


def resumes_after(extents: Extents, num: int, there: set[tuple[int, int]]) -> bool:
    """By the definition: what the next token reads of each group is there."""
    return all(
        (group, page) in there
        for group, (window, lasting) in enumerate(extents.traveling)
        for page in range(num)
        if window is None or page >= extents.first_seen(window, num * extents.block_size) or extents.lasts(lasting, page)
    )


@given(st.data())
def test_a_prompt_resumes_after_the_last_page_for_which_all_is_there(data) -> None:
    windows = tuple(data.draw(st.lists(st.integers(1, 80), min_size=1, max_size=3)))
    lasting = tuple(data.draw(st.none() | st.builds(Lasting, st.integers(0, 40), st.integers(0, 4))) for _ in windows)
    extents = Extents(windows, BLOCK, lasting=lasting, hot_tokens=data.draw(st.none() | st.integers(0, 40)))
    num = data.draw(st.integers(0, 12))
    every = [(group, page) for group in range(len(extents.traveling)) for page in range(num)]
    there = set(every) - set(data.draw(st.lists(st.sampled_from(every), max_size=4))) if every else set()
    expected = max((m for m in range(1, num + 1) if resumes_after(extents, m, there)), default=0)
    assert last_resumable(extents, num, lambda group, page: (group, page) in there) == expected


async def test_a_model_of_windows_alone_resumes_where_an_earlier_turn_ended(chain, scope, new_mover, counted) -> None:
    pages, extents = chain(40), Extents((48, 32), BLOCK, lasting=(Lasting(16, 0), None))
    keys = [page.key[:-1] for page in pages]
    # A turn ended after 30 pages: its windows were sent, and the first page, which lasts.
    sent = [page_of(pages[page], 0) for page in (0, 27, 28, 29)] + [page_of(pages[page], 1) for page in (28, 29)]
    empty, node = PageSource("disk", Store([])), PageSource("node", Store(sent))
    mover = new_mover()
    await Restoring(mover, scope, extents, PrefillPace(), counted.metrics).run(keys, [empty, node], soon())
    assert last_resumable(extents, 40, lambda group, page: name_of(keys[page], group) in mover.pages) == 30
    assert empty.store.asked == []
    assert counted("pages_restored_total", source="node") == len(mover.pages) <= len(sent)


async def test_a_model_of_windows_alone_that_resumes_here_as_late_fetches_nothing(chain, scope, new_mover, counted) -> None:
    pages, extents = chain(40), Extents((48,), BLOCK)
    here = [page_of(page, 0) for page in pages[20:26]]
    node = PageSource("node", Store([page_of(page, 0) for page in pages[22:30]]))
    mover = new_mover(here)
    await Restoring(mover, scope, extents, PrefillPace(), counted.metrics).run([p.key[:-1] for p in pages], [node], soon())
    assert node.store.asked == []
    node.store.pages |= {page_of(page, 0).key: page_of(page, 0) for page in pages[30:36]}
    await Restoring(mover, scope, extents, PrefillPace(), counted.metrics).run([p.key[:-1] for p in pages], [node], soon())
    assert [key[-1] for key in node.store.asked[0]] == [0] * 3


async def test_a_source_that_does_not_say_what_it_lacks_rests(chain, scope, new_mover, counted) -> None:
    class Silent(Store):
        async def missing(self, scope, keys):
            raise StoreFailed("draining", 2)

    source = PageSource("node", Silent([]))
    run = Restoring(new_mover(), scope, Extents((48,), BLOCK), PrefillPace(), counted.metrics)
    await run.run([page.key[:-1] for page in chain(40)], [source], soon())
    assert source.rests_until > time.monotonic()
    assert counted("page_restore_failures_total", source="node") == 1
