"""The queue of pages to one store: in order, what is missing there, bounded, and a failure drops it."""

from __future__ import annotations

import time
from dataclasses import replace

from ryzanstein.worker.agent.pages.outbox import Outbox, RateLimit
from ryzanstein.worker.agent.pages.page import PageSizes
from ryzanstein.worker.agent.pages.store import StoreFailed
from ryzanstein.worker.agent.pages.tiers.host_tier import HostTier


class Store(HostTier):
    """A host tier that records in which pieces pages came, and fails when it is told to."""

    def __init__(self) -> None:
        super().__init__(2**30, lambda size: None, lambda: None)
        self.pieces, self.fails = [], ""

    async def missing(self, scope, keys):
        if self.fails:
            raise StoreFailed(self.fails, 60)
        return await super().missing(scope, keys)

    async def send(self, scope, parent, batches):
        batches = [pages async for pages in batches]
        self.pieces.append((parent, [page.key for pages in batches for page in pages]))

        async def again():
            for pages in batches:
                yield pages

        return await super().send(scope, parent, again())


def outbox_of(store, counted, **given):
    return Outbox("t", store, given.pop("rate", RateLimit(0)), counted.metrics, **given)


async def test_only_what_is_missing_is_sent_with_what_is_before_it(chain, scope, new_mover, counted) -> None:
    pages, store = chain(10), Store()
    mover, keys = new_mover(pages), [page.key for page in pages]
    outbox = outbox_of(store, counted)
    assert outbox.add(mover, scope, b"", keys[4:6])
    await outbox.run()
    assert outbox.add(mover, scope, b"", keys)
    assert not outbox.add(mover, scope, keys[-1], keys[:2]), "it runs already"
    await outbox.run()
    assert store.pieces == [(b"", keys[4:6]), (b"", keys[:4]), (keys[5], keys[6:])]
    assert counted("pages_sent_total") == 10
    assert counted("page_bytes_sent_total") == 10 * scope.sizes.block_bytes
    assert len(outbox) == 0
    assert outbox.empty.is_set()


async def test_large_pages_go_in_several_calls(chain, scope, new_mover, counted) -> None:
    pages, store = chain(10), Store()
    keys, large = [page.key for page in pages], replace(scope, sizes=PageSizes(8 * 2**20))
    outbox = outbox_of(store, counted)
    outbox.add(new_mover(pages), large, b"", keys)
    await outbox.run()
    assert store.pieces == [(b"", keys[:4]), (keys[3], keys[4:8]), (keys[7], keys[8:])]


async def test_pages_that_were_evicted_meanwhile_are_skipped(chain, scope, new_mover, counted) -> None:
    pages, store = chain(8), Store()
    mover = new_mover(pages[:3] + pages[5:])
    outbox = outbox_of(store, counted)
    outbox.add(mover, scope, b"", [page.key for page in pages])
    await outbox.run()
    assert counted("pages_sent_total") == 6
    assert counted("pages_dropped_total", cause="gone") == 2


async def test_ranks_that_are_lost_lose_only_their_own_pages(chain, scope, new_mover, counted) -> None:
    store, lost, alive = Store(), new_mover(chain(2, 1)), new_mover(chain(2, 2))
    lost.lost = True
    outbox = outbox_of(store, counted)
    outbox.add(lost, scope, b"", [page.key for page in chain(2, 1)])
    outbox.add(alive, scope, b"", [page.key for page in chain(2, 2)])
    await outbox.run()
    assert counted("pages_dropped_total", cause="gone") == 2
    assert counted("pages_sent_total") == 2


async def test_the_oldest_are_dropped_when_too_many_wait(chain, scope, new_mover, counted) -> None:
    pages, store = chain(10), Store()
    outbox = outbox_of(store, counted, max_queued=4)
    outbox.add(new_mover(pages), scope, b"", [page.key for page in pages])
    await outbox.run()
    assert [key for _, keys in store.pieces for key in keys] == [page.key for page in pages[6:]]
    assert counted("pages_dropped_total", cause="queue_full") == 6


async def test_a_store_that_fails_rests_and_its_pages_are_dropped_and_counted(chain, scope, new_mover, counted) -> None:
    pages, store = chain(3), Store()
    outbox = outbox_of(store, counted)
    store.fails = "unimplemented"
    outbox.add(new_mover(pages), scope, b"", [page.key for page in pages])
    await outbox.run()
    assert outbox.rests
    assert not outbox.add(new_mover(pages), scope, b"", [pages[0].key])
    assert counted("pages_dropped_total", cause="resting") == 1
    assert counted("pages_dropped_total", cause="unimplemented") == 3


async def test_the_rate_bounds_bytes_a_second(chain, scope, new_mover, counted) -> None:
    pages, store = chain(12), Store()
    outbox = outbox_of(store, counted, rate=RateLimit(20 * scope.sizes.block_bytes))
    outbox.add(new_mover(pages), scope, b"", [page.key for page in pages])
    began = time.monotonic()
    await outbox.run()
    assert time.monotonic() - began >= 12 / 20 - 0.1


async def test_a_call_ends_in_time_at_a_low_rate(chain, scope, new_mover, counted, monkeypatch) -> None:
    async def at_once(self: RateLimit, num_bytes: int) -> None: ...

    monkeypatch.setattr(RateLimit, "spend", at_once)
    pages, store = chain(10), Store()
    outbox = outbox_of(store, counted, rate=RateLimit(scope.sizes.block_bytes // 5))  # a page in five seconds
    outbox.add(new_mover(pages), scope, b"", [page.key for page in pages])
    await outbox.run()
    assert {len(keys) for _, keys in store.pieces[:-1]} == {2}
    assert RateLimit(0).most(100, 1.0) == 100
