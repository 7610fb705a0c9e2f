"""Frames that wait for the node to take them."""

import asyncio
import contextlib

import pytest

from ryzanstein.v1 import worker_pb2 as pb
from ryzanstein.worker.agent.faces.stream import ReadAhead


def submit(handle: int, chars: int = 10) -> pb.ConnectRequest:
    return pb.ConnectRequest(submit=pb.Submit(handle=handle, text="x" * chars))


async def test_frames_keep_their_order():
    ahead = ReadAhead()
    for handle in range(1, 50):
        await ahead.put(submit(handle))
    assert [(await ahead.get()).submit.handle for _ in range(1, 50)] == list(range(1, 50))


async def test_a_full_queue_lets_its_writer_wait_until_there_is_room():
    ahead = ReadAhead(max_bytes=2000)
    await ahead.put(submit(1, chars=5000))
    writing = asyncio.create_task(ahead.put(submit(2)))
    await asyncio.sleep(0.02)
    assert not writing.done()
    assert (await ahead.get()).submit.handle == 1
    await asyncio.wait_for(writing, 1)
    assert (await ahead.get()).submit.handle == 2


@pytest.mark.parametrize("chars", [0, 1000])
async def test_what_waits_is_bounded(chars):
    ahead = ReadAhead(max_bytes=10_000)
    taken = 0
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(0.2):
            while taken < 10_000:
                await ahead.put(submit(1, chars))
                taken += 1
    assert 1 <= taken <= 10_000 // 250
