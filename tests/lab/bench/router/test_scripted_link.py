"""A scripted node continues where an earlier attempt was lost, as every node does."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

from ryzanstein.lab.bench.router.scripted.engine import ScriptedEngine
from ryzanstein.lab.bench.router.scripted.link import ScriptedLink
from ryzanstein.lab.bench.router.scripted.script import Script
from ryzanstein.v1 import worker_pb2 as worker


async def submits(*frames: worker.ConnectRequest) -> AsyncIterator[worker.ConnectRequest]:
    for frame in frames:
        yield frame


def submit(tokens: int, generated: int = 0) -> worker.ConnectRequest:
    chat = Script(tokens).request().chat
    frame = worker.ConnectRequest(submit=worker.Submit(handle=7, messages={"messages": chat.messages}, sampling=chat.sampling))
    if generated:
        frame.submit.generated.add(choice=0, token_ids=range(generated))
    return frame


async def indices(frame: worker.ConnectRequest) -> list[int]:
    link, rows = ScriptedLink(ScriptedEngine()), []
    await link.read(submits(frame))
    async with asyncio.timeout(10):
        async for sent in link.frames():
            rows += sent.output.index
            if sent.output.finished:
                return rows
    return rows


async def test_an_answer_has_every_index_once() -> None:
    assert await indices(submit(tokens=20)) == list(range(20))


async def test_it_goes_on_after_what_was_generated() -> None:
    assert await indices(submit(tokens=20, generated=13)) == list(range(13, 20))
