"""The memory of a system: per idle connection, per running stream, and for readers that stop."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Callable
from dataclasses import dataclass

from ryzanstein.lab.bench.router.load.connections import StreamLoad, connections, connections_for
from ryzanstein.lab.bench.router.scripted.script import Script
from ryzanstein.lab.bench.router.systems import System

_WARM_STREAMS = 64
_SETTLE_S = 0.5
_SMALLEST_WINDOW = 65_535
_END_S = 120.0
_WAVE = 250


@dataclass(frozen=True, slots=True)
class Held:
    """Growth of a system's resident memory, per idle connection and per running stream."""

    idle_connection_bytes: float
    active_stream_bytes: float


@dataclass(frozen=True, slots=True)
class SlowReaders:
    """The result for readers that stop reading.

    `readers` read nothing while the node generates `tokens` for each. `peak_bytes`: how much the
    system grew by then. Then they continue: `problems` are those that did not get the complete
    answer.
    """

    readers: int
    tokens: int
    peak_bytes: int
    problems: list[str]


@dataclass(frozen=True, slots=True)
class ManyStreams:
    """The result for many streams.

    `at_once` is the largest number that had begun and not ended at one time.
    """

    streams: int
    at_once: int
    tokens_per_s: float
    problems: list[str]


async def held(system: System, idle: int, active: int) -> Held:
    """Measures memory per connection and stream. A load before it takes the one-time costs."""
    await _warm(system)
    before = system.rss_bytes()
    async with connections(system.port, idle):
        await asyncio.sleep(_SETTLE_S)
        idle_bytes = system.rss_bytes() - before
    await asyncio.sleep(_SETTLE_S)
    before = system.rss_bytes()
    async with connections(system.port, connections_for(active)) as opened:
        load = StreamLoad(opened, Script(tokens=100, step_s=0.1))
        load.start(active)
        await _until(lambda: load.begun == active, _END_S)
        active_bytes = system.rss_bytes() - before
    return Held(idle_bytes / idle, active_bytes / active)


async def slow_readers(system: System, readers: int, tokens: int, step_s: float) -> SlowReaders:
    """Measures readers that stop reading. Each has its own connection with a window of 64 KiB.

    They stop after their first token.
    """
    await _warm(system)
    before = system.rss_bytes()
    async with connections(system.port, readers, _SMALLEST_WINDOW) as opened:
        load = StreamLoad(opened, Script(tokens, step_s))
        load.start(readers)
        await _until(lambda: load.begun == readers, _END_S)
        for connection in opened:
            connection.transport.pause_reading()
        await asyncio.sleep(tokens * step_s + _SETTLE_S)
        peak_bytes = system.rss_bytes() - before
        for connection in opened:
            connection.transport.resume_reading()
        tally = await load.stop(_END_S)
    return SlowReaders(readers, tokens, peak_bytes, tally.problems)


async def many_streams(system: System, streams: int, script: Script) -> ManyStreams:
    """Runs many streams that are started in waves, each when the previous one has begun.

    All in one moment would be a burst, which a router refuses beyond its bound on waiting requests. So would be answers
    that follow those of several waves: on a machine that is slow enough these end while the next begin. Each stream is
    one answer, and lasts long enough for all to run at once where they begin soon enough.
    """
    at_once, begun = 0, time.monotonic()
    async with connections(system.port, connections_for(streams)) as opened:
        load = StreamLoad(opened, script, again=False)
        while (wave := min(_WAVE, streams - load.started)) > 0:
            load.start(wave)
            await _until(lambda: load.begun + load.tally.answers >= load.started, _END_S)
            at_once = max(at_once, load.begun)
        ending = asyncio.create_task(load.stop(_END_S))
        while not ending.done():
            at_once = max(at_once, load.begun)
            await asyncio.wait([ending], timeout=0.02)
        tally = ending.result()
    return ManyStreams(streams, at_once, tally.tokens / (time.monotonic() - begun), tally.problems)


async def _warm(system: System) -> None:
    async with connections(system.port, connections_for(_WARM_STREAMS)) as opened:
        load = StreamLoad(opened, Script(tokens=64))
        load.start(_WARM_STREAMS)
        await asyncio.sleep(_SETTLE_S)
        await load.stop(_END_S)
    await asyncio.sleep(_SETTLE_S)


async def _until(condition: Callable[[], bool], timeout_s: float) -> None:
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(timeout_s):
            while not condition():  # noqa: ASYNC110 - it is read off the streams, which tell nobody
                await asyncio.sleep(0.02)
