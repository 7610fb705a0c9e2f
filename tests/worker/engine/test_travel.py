"""Pages that leave an engine and arrive in another: found there, never too many, and answers stay whole."""

from __future__ import annotations

import time

import pytest

from ryzanstein.worker.engine.extents import Lasting
from ryzanstein.worker.engine.memory.blocks import BlockPool
from ryzanstein.worker.engine.memory.prefix import chain_keys
from ryzanstein.worker.engine.memory.travel import ARRIVED_SHARE, TravelingPages, name_of

SIZE = 4


def keys_of(tokens, num_groups=1):
    return [name_of(key, group) for key in chain_keys(tokens, SIZE) for group in range(num_groups)]


def engine(run, **given):
    return run(**{"num_blocks": 40, "block_size": SIZE, "max_sequences": 8, "token_budget": 16, **given})


def moved(source, target, keys):
    places = source.engine.export_pages(1, keys)
    target.ranks.slab = {i: source.ranks.slab[place] for i, place in enumerate(places)}
    return target.engine.import_pages(1, [keys[place] for place in places], b"")


def reported(source, message):
    """Answers a message. Returns the names of pages in the order in which they are reported as full."""
    source.engine.submit(message)
    names = []
    while source.engine.has_work:
        names += [name for _, own in source.step().sealed for name in own]
    return names


def assert_continues(target, message, expected, num_known):
    """The answer goes on as it would have, and only what follows the `num_known` first tokens is computed."""
    (generated,) = message.generated
    target.engine.submit(message)
    target.drain()
    assert target.tokens[message.group, 0] == expected[len(generated) :]
    assert target.engine.stats().prefill_tokens == len(message.prompt_ids) + len(generated) - num_known


def test_an_engine_continues_from_pages_of_another_and_computes_only_the_rest(run, group, answer) -> None:
    one, two = engine(run), engine(run)
    prompt = [(5 * i) % 90 for i in range(42)]
    sealed = reported(one, group(1, prompt, max_tokens=8, reports_pages=True))
    whole = prompt + one.tokens[1, 0]
    assert sealed == keys_of(whole[:-1]), "each full page is reported once, in order"
    assert len(moved(one, two, sealed)) == len(sealed)
    failed_over = group(7, prompt, max_tokens=12, generated=[one.tokens[1, 0]])
    assert_continues(two, failed_over, answer(failed_over, 0)[0], SIZE * len(sealed))


def test_pages_found_in_the_cache_are_reported_too(run, group) -> None:
    it = engine(run)
    prompt = [3] * 4 + [(7 * i) % 90 for i in range(30)]
    it.engine.submit(group(1, prompt, max_tokens=2))
    it.drain()
    it.engine.submit(group(2, prompt, max_tokens=2, reports_pages=True))
    sealed = []
    while it.engine.has_work:
        sealed += it.step().sealed
    assert [key for _, keys in sealed for key in keys] == keys_of(prompt)
    assert {group for group, _ in sealed} == {2}


def test_a_paused_sequence_reports_no_page_twice(run, group) -> None:
    it = engine(run, num_blocks=12, max_sequences=4)
    for i in range(3):
        it.engine.submit(group(i, [i] * 12, max_tokens=20, reports_pages=True))
    sealed = []
    while it.engine.has_work:
        sealed += it.step().sealed
    assert it.engine.stats().preemptions > 0
    reported = [(group, key) for group, keys in sealed for key in keys]
    assert len(reported) == len(set(reported))


def test_pages_that_arrive_are_evictable_and_never_more_than_their_share(run, group, answer) -> None:
    source, target = engine(run), engine(run, num_blocks=15)
    prompt = list(range(60))
    source.engine.submit(group(1, prompt, max_tokens=1))
    source.drain()
    keys = keys_of(prompt)
    admitted = moved(source, target, keys)
    stats = target.engine.stats()
    assert stats.blocks_cached == len(admitted) == int(15 * ARRIVED_SHARE) < len(keys), "the beginning, not the end"
    assert stats.blocks_held == 0
    source.engine.submit(group(2, [7] * 60, max_tokens=1))
    source.drain()
    assert len(moved(source, target, keys_of([7] * 60))) == len(admitted), "an older chain makes way"
    assert target.engine.stats().blocks_cached == int(15 * ARRIVED_SHARE)
    messages = [group(i, [i] * 12, max_tokens=20) for i in range(5)]
    for message in messages:
        target.engine.submit(message)
    target.drain()
    assert target.tokens == {(m.group, 0): answer(m, 0)[0] for m in messages}


def test_a_full_pool_takes_no_page_and_cached_ones_are_not_taken_again(run, group) -> None:
    source, target = engine(run), engine(run, num_blocks=10)
    source.engine.submit(group(1, list(range(16)), max_tokens=1))
    source.drain()
    target.engine.submit(group(1, [9] * 36, max_tokens=5))
    target.step()
    target.step()
    target.step()
    assert len(moved(source, target, keys_of(list(range(16))))) <= 1
    target.engine.cancel(1)
    target.step()
    assert moved(source, target, keys_of(list(range(16))))[-1] == 3
    assert moved(source, target, keys_of(list(range(16)))) == []


def test_the_beginning_of_a_chain_outlives_its_end() -> None:
    pool = BlockPool(8)
    pages = TravelingPages(pool)
    keys = [name_of(bytes([i]), 0) for i in range(3)]
    pages.admit(keys[:2], b"")
    pages.admit(keys[2:], keys[1])
    pool.allocate(6)
    assert [(key[:-1], 0) in pool for key in keys] == [True, True, False]


def test_a_page_in_use_is_not_dropped_for_another() -> None:
    pool = BlockPool(4)
    pages = TravelingPages(pool)
    ((_, block),) = pages.admit([b"a\0"], b"").blocks
    pool.share(block)
    pages.admit([b"b\0"], b"")
    pages.admit([b"c\0"], b"")
    pages.admit([b"d\0"], b"")
    assert (b"a", 0) in pool
    assert pool.is_held(block)
    assert pages.missing([b"a\0", b"x\0", b"d\0"]) == [1]


def test_groups_with_a_window_send_what_a_sequence_resumes_with_and_the_others_everything(run, group, answer) -> None:
    windows = (None, 10)
    given = {"num_blocks": 400, "windows": windows, "token_budget": 32}
    one, two = engine(run, **given), engine(run, **given)
    prompt = [(5 * i) % 90 for i in range(200)]
    sealed = reported(one, group(1, prompt, max_tokens=12, reports_pages=True))
    whole = prompt + one.tokens[1, 0]
    chain = chain_keys(whole[:-1], SIZE)
    assert [name[:-1] for name in sealed if name[-1] == 0] == chain
    assert 0 < sum(name[-1] for name in sealed) < 12, "the window at the prompt's end, and the answer"
    moved(one, two, sealed)
    failed_over = group(7, prompt, max_tokens=20, generated=[one.tokens[1, 0]])
    assert_continues(two, failed_over, answer(failed_over, 0)[0], SIZE * len(chain))


def test_pages_that_arrive_lie_next_to_what_is_before_them() -> None:
    pool = BlockPool(64)
    pages = TravelingPages(pool, 2)
    names = [name_of(bytes([page]), group) for page in range(9) for group in range(2)]
    pages.admit(names[:6], b"")
    pages.admit(names[6:], names[5])
    for group in range(2):
        blocks = [pool.block_of((bytes([page]), group)) for page in range(9)]
        assert blocks == list(range(blocks[0], blocks[0] + 9))


def test_a_page_that_was_evicted_may_arrive_again() -> None:
    pool = BlockPool(4)
    pages = TravelingPages(pool)
    pages.admit([b"a\0"], b"")
    pool.allocate(4)
    assert (b"a", 0) not in pool
    pool = BlockPool(4)
    pages = TravelingPages(pool)
    assert pages.admit([b"a\0", b"a\0"], b"").places == [0]


def test_a_page_that_arrives_in_a_large_full_pool_takes_a_time_that_does_not_grow_with_it() -> None:
    pool = BlockPool(40_000)
    pages = TravelingPages(pool)
    for start in range(0, 40_000, 1_000):
        pages.admit([name_of(number.to_bytes(16), 0) for number in range(start, start + 1_000)], b"")
    newest = [name_of(number.to_bytes(16), 0) for number in range(50_000, 50_064)]
    began = time.process_time()
    assert len(pages.admit(newest, b"").places) == len(newest), "others make way"
    assert time.process_time() - began < 0.1, "between two steps: it delays every answer"


def test_a_long_chain_that_grows_costs_no_more_than_what_arrives() -> None:
    pages = TravelingPages(BlockPool(20_000))
    names = [name_of(number.to_bytes(16), 0) for number in range(16_000)]
    for start in range(0, 15_000, 500):
        pages.admit(names[start : start + 500], names[start - 1] if start else b"")
    began = time.process_time()
    for start in range(15_000, 15_100):
        assert pages.admit(names[start : start + 1], names[start - 1]).places == [0]
    assert time.process_time() - began < 0.1, "walking the chain would take seconds"


def test_the_end_of_the_oldest_chain_makes_way_for_another_one() -> None:
    pool = BlockPool(20)
    pages = TravelingPages(pool)
    chains = [[name_of(bytes([chain, page]), 0) for page in range(8)] for chain in range(3)]
    for names in chains[:2]:
        pages.admit(names[:4], b"")
        pages.admit(names[4:], names[3])
    pages.missing(chains[0])
    assert len(pages.admit(chains[2], b"").places) == 8
    assert [len(pages.missing(names)) for names in chains] == [0, 5, 0], "the second was used least recently"
    assert pages.missing(chains[1]) == [3, 4, 5, 6, 7]


def test_a_group_that_there_is_not_gets_no_block() -> None:
    pool = BlockPool(8)
    pages = TravelingPages(pool, 2)
    assert pages.admit([b"a\0", b"a\2", b"a\1"], b"\7").places == [0, 2]
    assert pages.missing([b"a\0", b"a\2"]) == [1]
    assert pages.find([b"a\2"]).places == []


@pytest.mark.parametrize("hot_tokens", [0, 6, 16])
def test_compressed_pages_go_on_elsewhere_with_their_hot_pages(run, group, answer, hot_tokens) -> None:
    given = {"num_blocks": 200, "token_budget": 32, "hot_tokens": hot_tokens, "hot_pages": 100}
    one, two = engine(run, **given), engine(run, **given)
    prompt = [(5 * i) % 90 for i in range(120)]
    sealed = reported(one, group(1, prompt, max_tokens=14, reports_pages=True))
    whole = prompt + one.tokens[1, 0]
    chain = chain_keys(whole[:-1], SIZE)
    assert [name[:-1] for name in sealed if name[-1] == 0] == chain
    num_hot = sum(name[-1] == 1 for name in sealed)
    assert 0 < num_hot < len(chain) / 2, "those at the prompt's end, and of the answer"
    parent = b""
    for name in sealed:
        assert one.engine.export_pages(1, [name]) in ([0], [] if name[-1] else [0])
        two.ranks.slab = dict(one.ranks.slab)
        two.engine.import_pages(1, [name], parent)
        parent = name
    failed_over = group(7, prompt, max_tokens=24, generated=[one.tokens[1, 0]])
    assert_continues(two, failed_over, answer(failed_over, 0)[0], SIZE * len(chain))


def test_hot_pages_that_newer_ones_superseded_make_way_first() -> None:
    hot = BlockPool(8)
    pages = TravelingPages(BlockPool(40), 1, hot, hot_kept=2)
    names = [name_of(bytes([page]), group) for page in range(4) for group in range(2)]
    other = [name_of(bytes([9]), group) for group in range(2)]
    pages.admit(other, b"")
    pages.admit(names[:4], b"")
    pages.admit(names[4:], names[3])
    hot.allocate(5)
    assert [name[-1] == 0 or (name[:-1], 1) in hot for name in (*other, *names)] == [True] * 2 + [True, False] * 2 + [True] * 4


def test_pages_that_last_travel_with_the_last_ones_of_a_window(run, group, answer) -> None:
    """Those in between do not: another engine continues without them."""
    sparse = {"windows": (None, 8), "lasting": (None, Lasting(4, 3))}
    one, two = engine(run, num_blocks=80, **sparse), engine(run, num_blocks=80, **sparse)
    prompt = [(5 * i) % 90 for i in range(64)]
    sealed = reported(one, group(1, prompt, max_tokens=4, reports_pages=True))
    keys = chain_keys(prompt + one.tokens[1, 0], SIZE)
    sent = [number for number, key in enumerate(keys) if name_of(key, 1) in sealed]
    assert sent[:5] == [0, 3, 6, 9, 12]
    assert sent[5:] == [13, 14, 15]
    assert len(moved(one, two, sealed)) == len(sealed)
    failed_over = group(7, prompt, max_tokens=9, generated=[one.tokens[1, 0]])
    two.engine.submit(failed_over)
    two.drain()
    assert two.tokens[7, 0] == answer(failed_over, 0)[0][4:]
    assert two.engine.stats().prefill_tokens <= 4 + SIZE
