"""From silence to levels: what this router's own slowness must not be taken for."""

from __future__ import annotations

import asyncio
import time
from dataclasses import replace
from itertools import count

import pytest

from ryzanstein.cluster import Beat, Load, NodeState
from ryzanstein.process.awake import AwakeClock
from ryzanstein.router.nodes.links.phi_detector import PhiThresholds
from ryzanstein.router.nodes.links.suspicion import DEAF, SILENCE, SuspicionLevel, SuspicionWatch

pytestmark = pytest.mark.long

WORKING = Beat(state=NodeState.READY, load=Load(running=1))
IDLE = Beat(state=NodeState.READY)


async def beating(levels: list[tuple[SuspicionLevel, str]]) -> SuspicionWatch:
    """A watch after a second of punctual beats."""
    watch = SuspicionWatch(
        PhiThresholds(dead_phi=12.0, grace_s=60.0), lambda level, cause: levels.append((level, cause)), AwakeClock()
    )
    watch.start()
    for _ in range(20):
        watch.beat(WORKING)
        await asyncio.sleep(0.05)
    watch.beat(WORKING)
    return watch


@pytest.mark.parametrize("blocked_beyond_s", [0.02, 0.04, 0.3])
async def test_a_beat_that_is_read_late_because_this_router_did_not_run_is_no_silence(blocked_beyond_s: float) -> None:
    levels: list[tuple[SuspicionLevel, str]] = []
    watch = await beating(levels)
    due = watch._next_change()
    time.sleep(due + blocked_beyond_s - asyncio.get_running_loop().time())  # noqa: ASYNC251 - nothing of this process runs
    asyncio.get_running_loop().call_later(0.01, watch.beat, WORKING)
    await asyncio.sleep(0.1)
    assert levels == []
    watch.close()


async def test_silence_is_reported_within_a_second_and_its_end_at_once() -> None:
    levels: list[tuple[SuspicionLevel, str]] = []
    watch = await beating(levels)
    began = time.monotonic()
    async with asyncio.timeout(5):
        while not levels:  # noqa: ASYNC110 - the watch calls back
            await asyncio.sleep(0.005)
    assert levels == [(SuspicionLevel.SUSPECT, SILENCE)]
    assert time.monotonic() - began < 1.0
    assert not watch.punctual
    watch.beat(WORKING)
    assert levels[1:] == [(SuspicionLevel.FINE, "")]
    assert watch.punctual
    watch.close()


async def hearing(levels: list[tuple[SuspicionLevel, str]], thresholds: PhiThresholds) -> SuspicionWatch:
    """A watch of a node that works, and answered a few beats."""
    watch = SuspicionWatch(thresholds, lambda level, cause: levels.append((level, cause)), AwakeClock())
    watch.start()
    for sequence in range(1, 21):
        watch.beat(WORKING)
        watch.asked(sequence)
        await asyncio.sleep(0.01)
        watch.answered(sequence)
    return watch


async def beat_until(watch: SuspicionWatch, levels: list[tuple[SuspicionLevel, str]], count: int) -> None:
    """The node beats and sends tokens until so many levels were told."""
    async with asyncio.timeout(5):
        while len(levels) < count:
            watch.beat(WORKING)
            watch.frame()
            await asyncio.sleep(0.02)


async def test_beats_and_tokens_do_not_clear_a_node_that_answers_nothing_and_its_answer_does() -> None:
    levels: list[tuple[SuspicionLevel, str]] = []
    watch = await hearing(levels, PhiThresholds(grace_s=60.0))
    began = time.monotonic()
    watch.asked(21)
    await beat_until(watch, levels, 1)
    assert levels == [(SuspicionLevel.SUSPECT, DEAF)]
    assert 0.3 < time.monotonic() - began < 1.0
    for _ in range(10):
        watch.beat(WORKING)
        watch.frame()
        await asyncio.sleep(0.02)
    assert (watch.level, watch.cause, len(levels)) == (SuspicionLevel.SUSPECT, DEAF, 1)
    watch.answered(21)
    assert levels[1:] == [(SuspicionLevel.FINE, "")]
    watch.close()


async def test_a_node_that_says_nothing_either_is_silent_and_not_deaf() -> None:
    levels: list[tuple[SuspicionLevel, str]] = []
    watch = await hearing(levels, PhiThresholds(grace_s=0.1))
    watch.beat(IDLE)
    watch.asked(21)
    await asyncio.sleep(2.5)
    assert levels == [(SuspicionLevel.SUSPECT, SILENCE), (SuspicionLevel.DEAD, SILENCE)]
    watch.close()


async def test_a_node_that_stays_deaf_is_given_up_though_it_beats() -> None:
    levels: list[tuple[SuspicionLevel, str]] = []
    watch = await hearing(levels, PhiThresholds(grace_s=0.1))
    watch.asked(21)
    await beat_until(watch, levels, 2)
    assert levels == [(SuspicionLevel.SUSPECT, DEAF), (SuspicionLevel.DEAD, DEAF)]
    watch.close()


async def test_an_answer_that_is_read_late_and_behind_other_frames_because_this_router_did_not_run_is_no_deafness() -> None:
    levels: list[tuple[SuspicionLevel, str]] = []
    watch = await hearing(levels, PhiThresholds(grace_s=60.0))
    watch.asked(21)
    loop = asyncio.get_running_loop()
    time.sleep(1.0)  # noqa: ASYNC251 - nothing of this process runs
    for frame in (lambda: watch.beat(WORKING), watch.frame, lambda: watch.answered(21)):
        loop.call_later(0.01, frame)
    await asyncio.sleep(0.3)
    assert [cause for _, cause in levels if cause == DEAF] == []
    watch.close()


async def test_a_node_that_never_answers_is_judged_by_its_beats_alone() -> None:
    levels: list[tuple[SuspicionLevel, str]] = []
    watch = SuspicionWatch(PhiThresholds(grace_s=0.0), lambda level, cause: levels.append((level, cause)), AwakeClock())
    watch.start()
    for sequence in range(1, 60):
        watch.asked(sequence)
        watch.beat(WORKING)
        await asyncio.sleep(0.02)
    assert levels == []
    watch.close()


async def test_an_answer_behind_what_a_node_sent_while_this_router_stood_still_is_no_deafness() -> None:
    """The node sent thousands of frames meanwhile; they are read on time, and the answer comes after all of them."""
    levels: list[tuple[SuspicionLevel, str]] = []
    watch = await hearing(levels, PhiThresholds(grace_s=60.0))
    time.sleep(1.0)  # noqa: ASYNC251 - nothing of this process runs
    watch.asked(21)
    loop = asyncio.get_running_loop()
    until = loop.time() + 3.0
    for step in count(1):
        watch.beat(replace(WORKING, step=step))
        watch.frame()
        await asyncio.sleep(0.02)
        if loop.time() > until:
            break
    assert [cause for _, cause in levels if cause == DEAF] == []
    watch.answered(21)
    watch.asked(22)
    await beat_until(watch, levels, len(levels) + 1)
    assert levels[-1] == (SuspicionLevel.SUSPECT, DEAF), "once the answers are read, they are waited for as ever"
    watch.close()
