"""From silence to levels: what this router's own slowness must not be taken for."""

from __future__ import annotations

import asyncio
import time

import pytest

from ryzanstein.cluster import Beat, Load, NodeState
from ryzanstein.router.detector import Thresholds
from ryzanstein.router.watch import SILENCE, Level, Watch

WORKING = Beat(state=NodeState.READY, load=Load(running=1))


async def beating(levels: list[tuple[Level, str]]) -> Watch:
    """A watch after a second of punctual beats."""
    watch = Watch(Thresholds(dead_phi=12.0, grace_s=60.0), lambda level, cause: levels.append((level, cause)))
    watch.start()
    for _ in range(20):
        watch.beat(WORKING)
        await asyncio.sleep(0.05)
    watch.beat(WORKING)
    return watch


@pytest.mark.parametrize("blocked_beyond_s", [0.02, 0.04, 0.3])
async def test_a_beat_that_is_read_late_because_this_router_did_not_run_is_no_silence(blocked_beyond_s: float) -> None:
    levels: list[tuple[Level, str]] = []
    watch = await beating(levels)
    due = watch._next_change()
    time.sleep(due + blocked_beyond_s - asyncio.get_running_loop().time())  # noqa: ASYNC251 - nothing of this process runs
    asyncio.get_running_loop().call_later(0.01, watch.beat, WORKING)
    await asyncio.sleep(0.1)
    assert levels == []
    watch.close()


async def test_silence_is_told_within_a_second_and_its_end_at_once() -> None:
    levels: list[tuple[Level, str]] = []
    watch = await beating(levels)
    began = time.monotonic()
    async with asyncio.timeout(5):
        while not levels:  # noqa: ASYNC110 - the watch calls back
            await asyncio.sleep(0.005)
    assert levels == [(Level.SUSPECT, SILENCE)]
    assert time.monotonic() - began < 1.0
    assert not watch.punctual
    watch.beat(WORKING)
    assert levels[1:] == [(Level.FINE, "")]
    assert watch.punctual
    watch.close()
