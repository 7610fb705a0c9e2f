"""Readers with news: all of them, in order, a few at a time."""

from __future__ import annotations

import asyncio

from ryzanstein.router.generations.retained import READERS_PER_TURN, ReaderWakeups


async def turn() -> None:
    await asyncio.sleep(0)


async def test_few_are_woken_in_one_turn_and_all_in_the_end() -> None:
    wakeups, readers = ReaderWakeups(), [asyncio.Event() for _ in range(3 * READERS_PER_TURN + 1)]
    wakeups.add(readers)
    woken = []
    while not all(reader.is_set() for reader in readers):
        await turn()
        woken.append(sum(reader.is_set() for reader in readers))
    assert woken == [READERS_PER_TURN, 2 * READERS_PER_TURN, 3 * READERS_PER_TURN, len(readers)]
    assert [reader.is_set() for reader in readers] == [True] * len(readers)


async def test_the_longest_waiting_is_first_and_news_twice_is_one_wake() -> None:
    wakeups, readers = ReaderWakeups(), [asyncio.Event() for _ in range(2 * READERS_PER_TURN)]
    wakeups.add(readers)
    wakeups.add(readers[:1])
    await turn()
    assert [reader.is_set() for reader in readers] == [True] * READERS_PER_TURN + [False] * READERS_PER_TURN
    readers[0].clear()
    await turn()
    assert not readers[0].is_set()


async def test_news_after_the_wake_is_another_wake() -> None:
    wakeups, reader = ReaderWakeups(), asyncio.Event()
    for _ in range(3):
        wakeups.add([reader])
        await turn()
        assert reader.is_set()
        reader.clear()
