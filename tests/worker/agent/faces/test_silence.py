"""A router that is silent for too long, and what is no silence."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from types import SimpleNamespace
from typing import Any, cast

import pytest

from ryzanstein.errors import RyzansteinError
from ryzanstein.process.awake import AwakeClock
from ryzanstein.v1 import worker_pb2 as pb
from ryzanstein.worker.agent.faces.stream import ReadAhead, RouterStream
from ryzanstein.worker.agent.routers import RouterLink
from ryzanstein.worker.tuning import LinkBounds

SILENCE_S = 0.2
BEAT_S = 0.01


class Reading:
    """A link that is read, from a router whose frames the test sends."""

    def __init__(self, ahead: ReadAhead) -> None:
        self.link = RouterLink("router-t", LinkBounds(), quiet_s=0.5)
        self.awake = AwakeClock()
        tuning = SimpleNamespace(router_silence_s=SILENCE_S)
        node = cast(Any, SimpleNamespace(awake=self.awake, settings=SimpleNamespace(tuning=tuning)))
        self._frames: asyncio.Queue[pb.ConnectRequest] = asyncio.Queue()
        self._reader = asyncio.create_task(RouterStream(node, self.link).read(self._sent(), BEAT_S, ahead))

    async def _sent(self) -> AsyncIterator[pb.ConnectRequest]:
        while True:
            yield await self._frames.get()

    def send(self, frame: pb.ConnectRequest) -> None:
        self._frames.put_nowait(frame)

    async def error(self) -> str:
        """Returns why the link ended, when it has."""
        try:
            async for _ in self.link.frames():
                pass
        except RyzansteinError as error:
            return error.reason
        return ""

    def close(self) -> None:
        self._reader.cancel()
        self.awake.close()


def beat(sequence: int) -> pb.ConnectRequest:
    return pb.ConnectRequest(beat=pb.RouterBeat(sequence=sequence))


@pytest.fixture
async def reading() -> AsyncIterator[Reading]:
    reading = Reading(ReadAhead())
    yield reading
    reading.close()


async def test_a_silent_router_is_given_up_and_not_before_its_time(reading: Reading) -> None:
    began = time.monotonic()
    async with asyncio.timeout(10):
        assert await reading.error() == "ROUTER_SILENT"
    assert time.monotonic() - began >= SILENCE_S - 0.005  # a timer of the loop may be a millisecond early


async def test_a_router_that_beats_is_not_silent(reading: Reading) -> None:
    for sequence in range(1, 30):
        reading.send(beat(sequence))
        await asyncio.sleep(SILENCE_S / 10)
    assert not reading.link.closed


async def test_a_quiet_link_may_be_silent_for_several_of_its_beats(reading: Reading) -> None:
    reading.link.quiet, reading.link.quiet_s = True, SILENCE_S / 2
    began = time.monotonic()
    async with asyncio.timeout(20):
        assert await reading.error() == "ROUTER_SILENT"
    assert time.monotonic() - began >= 3.9 * reading.link.quiet_s, "4, but a loop rounds its timers"


async def test_a_frame_that_waits_for_room_is_no_silence() -> None:
    ahead = ReadAhead(max_bytes=10)
    reading = Reading(ahead)
    for handle in (1, 2):
        reading.send(pb.ConnectRequest(submit=pb.Submit(handle=handle)))
    await asyncio.sleep(2 * SILENCE_S)
    assert not reading.link.closed
    await ahead.get()
    await ahead.get()
    async with asyncio.timeout(10):
        assert await reading.error() == "ROUTER_SILENT"
    reading.close()


async def test_time_in_which_the_node_stood_still_is_no_silence(reading: Reading) -> None:
    await asyncio.sleep(0)
    reading.send(beat(1))
    time.sleep(4 * SILENCE_S)  # noqa: ASYNC251 (the loop stands still)
    await asyncio.sleep(0.01)
    assert not reading.link.closed
