"""Many sockets that send small frames share each turn of the loop with everything else."""

from __future__ import annotations

import asyncio
import json
from itertools import pairwise

import pytest

from ryzanstein.router.faces.websocket import turns
from ryzanstein.router.faces.websocket.connection import WebSocketConnection
from ryzanstein.router.faces.websocket.turns import ParsingTurns

SOCKETS, FRAMES = 8, 200


@pytest.fixture(autouse=True)
def no_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """One piece is all that fits into a turn."""
    monkeypatch.setattr(turns, "_TURN_S", 0.0)


async def test_each_waits_behind_the_others_and_the_loop_goes_on_in_between() -> None:
    line, seen = ParsingTurns(), []

    def step(name: str, left: int) -> None:
        seen.append(name)
        asyncio.get_running_loop().call_soon(seen.append, "loop")
        if left:
            line.wait(lambda: step(name, left - 1))

    line.wait(lambda: step("a", 2))
    line.wait(lambda: step("b", 1))
    line.wait(lambda: step("c", 0))
    for _ in range(20):
        await asyncio.sleep(0)
    assert [each for each in seen if each != "loop"] == ["a", "b", "c", "a", "b", "a"]
    assert all("loop" in pair for pair in pairwise(seen))


async def test_a_step_that_fails_keeps_no_other_waiting() -> None:
    line, done = ParsingTurns(), asyncio.Event()
    asyncio.get_running_loop().set_exception_handler(lambda loop, context: None)
    line.wait(lambda: 1 / 0)  # type: ignore[arg-type, return-value]
    line.wait(done.set)
    await asyncio.wait_for(done.wait(), 5)
    assert done.is_set()


async def test_frames_of_many_sockets_take_no_more_of_a_turn_than_those_of_one(face, monkeypatch: pytest.MonkeyPatch) -> None:
    loop, parsed = asyncio.get_running_loop(), [0]
    feed = WebSocketConnection._feed

    def counted(connection: WebSocketConnection, piece: bytes) -> None:
        before = connection._allowance
        feed(connection, piece)
        parsed[-1] += round(before - connection._allowance)
        loop.call_soon(parsed.append, 0)

    monkeypatch.setattr(WebSocketConnection, "_feed", counted)
    sockets = [await face.connect(subprotocols=["ryzanstein.v1"]) for _ in range(SOCKETS)]
    message = json.dumps({"type": "credit", "id": "a", "chunks": 1})
    await asyncio.gather(*(socket.send(message) for socket in sockets for _ in range(FRAMES)))
    async with asyncio.timeout(30):
        while sum(parsed) < SOCKETS * FRAMES:  # noqa: ASYNC110 - the face has no event for it
            await asyncio.sleep(0.01)
    assert max(parsed) < 40
    for socket in sockets:
        await socket.close()
