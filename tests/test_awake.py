"""A clock by which nobody is late because this process slept."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator

import pytest

from ryzanstein.process.awake import PAUSE_S, TICK_S, AwakeClock, AwakeQueue


@pytest.fixture
async def pauses() -> list[float]:
    return []


@pytest.fixture
async def clock(pauses: list[float]) -> Iterator[AwakeClock]:
    clock = AwakeClock(on_pause=pauses.append)
    yield clock
    clock.close()


def stand_still(seconds: float) -> None:
    time.sleep(seconds)


async def test_time_passes_while_the_loop_is_on_time(clock: AwakeClock, pauses: list[float]) -> None:
    began, real = clock.now(), time.monotonic()
    await asyncio.sleep(0.5)
    passed, slept = clock.now() - began, clock.slept_since(real)
    assert passed + slept == pytest.approx(time.monotonic() - real, abs=0.02)
    assert passed > 0.2


async def test_a_pause_does_not_count_before_and_after_it_was_noticed(clock: AwakeClock, pauses: list[float]) -> None:
    await asyncio.sleep(2 * TICK_S)
    began, real = clock.now(), time.monotonic()
    stand_still(2.0)
    assert clock.now() - began <= 2 * TICK_S, "nothing of this loop ran since"
    assert clock.slept_since(real) == pytest.approx(2.0, abs=2 * TICK_S + 0.05)
    assert clock.lately_paused
    await asyncio.sleep(2 * TICK_S)
    assert clock.now() - began <= 2 * TICK_S, "what waits in the sockets is being read"
    assert pauses[0] == pytest.approx(2.0, abs=0.2)


async def test_time_goes_on_after_the_sockets_are_read(clock: AwakeClock) -> None:
    await asyncio.sleep(2 * TICK_S)
    began, real = clock.now(), time.monotonic()
    stand_still(1.0)
    async with asyncio.timeout(10):
        while clock.now() - began < 0.5:  # noqa: ASYNC110 - a clock calls nobody
            await asyncio.sleep(0.01)
    assert clock.now() - began + clock.slept_since(real) == pytest.approx(time.monotonic() - real, abs=0.05)


async def test_a_pause_that_follows_another_before_its_backlog_was_read_is_a_pause(
    clock: AwakeClock, pauses: list[float]
) -> None:
    await asyncio.sleep(2 * TICK_S)
    began = clock.now()
    stand_still(1.2)
    await asyncio.sleep(2 * TICK_S)
    stand_still(1.2)
    await asyncio.sleep(2 * TICK_S)
    assert clock.pauses == 2
    assert [round(pause) for pause in pauses] == [1, 1]
    assert clock.lately_paused
    assert clock.now() - began <= 3 * TICK_S


async def test_what_was_slept_before_a_moment_is_not_held_against_it(clock: AwakeClock) -> None:
    stand_still(2 * PAUSE_S)
    async with asyncio.timeout(10):
        while clock.lately_paused or clock.slept_since(0.0) < PAUSE_S:  # noqa: ASYNC110 - a clock calls nobody
            await asyncio.sleep(0.01)
    assert clock.slept_since(time.monotonic()) <= TICK_S
    assert clock.slept_since(0.0) >= PAUSE_S


async def test_a_timer_waits_for_time_that_this_process_ran(clock: AwakeClock) -> None:
    called: list[float] = []
    when = clock.now() + 0.3
    clock.call_at(when, lambda word: called.append(clock.now()), "now")
    stand_still(1.0)
    await asyncio.sleep(0.05)
    assert called == []
    async with asyncio.timeout(10):
        while not called:  # noqa: ASYNC110 - a clock calls nobody
            await asyncio.sleep(0.01)
    assert called[0] >= when


async def test_a_timer_that_is_cancelled_calls_nobody(clock: AwakeClock) -> None:
    called: list[str] = []
    timer = clock.call_at(clock.now() + 0.1, called.append, "no")
    timer.cancel()
    await asyncio.sleep(0.3)
    assert called == []


async def test_names_fall_due_in_order_and_not_early(clock: AwakeClock) -> None:
    due: list[tuple[str, float]] = []
    began = clock.now()
    queue = AwakeQueue(clock, lambda name: due.append((name, clock.now() - began)))
    for number in range(10):
        queue.add(f"{number}", began + 0.1 + 0.02 * number)
    queue.discard("3")
    queue.add("4", began + 0.4)
    async with asyncio.timeout(10):
        while len(due) < 9:  # noqa: ASYNC110 - it calls, and wakes nobody
            await asyncio.sleep(0.01)
    assert [name for name, _ in due] == ["0", "1", "2", "5", "6", "7", "8", "9", "4"]
    assert all(at >= 0.1 + 0.02 * int(name) for name, at in due if name != "4")
    assert due[-1][1] >= 0.4
    assert not queue


async def test_a_name_that_fails_does_not_hold_up_the_others(clock: AwakeClock) -> None:
    due, failed = [], []
    asyncio.get_running_loop().set_exception_handler(lambda loop, context: failed.append(context["exception"]))

    def run_into(name: str) -> None:
        due.append(name)
        if name == "first":
            queue.discard("second")
            raise ZeroDivisionError

    queue = AwakeQueue(clock, run_into)
    for name in ("first", "second", "third"):
        queue.add(name, clock.now())
    async with asyncio.timeout(10):
        while len(due) < 2:  # noqa: ASYNC110 - it calls, and wakes nobody
            await asyncio.sleep(0.01)
    assert due == ["first", "third"]
    assert [type(each) for each in failed] == [ZeroDivisionError]


async def test_a_closed_queue_calls_nobody(clock: AwakeClock) -> None:
    due: list[str] = []
    queue = AwakeQueue(clock, due.append)
    queue.add("late", clock.now() + 0.05)
    queue.close()
    await asyncio.sleep(0.2)
    assert not due
