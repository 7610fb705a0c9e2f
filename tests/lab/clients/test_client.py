"""What a good client does when its stream breaks, and when it stops trying."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable

import pytest

from ryzanstein import errors
from ryzanstein.errors import Code, RyzansteinError
from ryzanstein.lab.chaos.questions import QUESTIONS
from ryzanstein.lab.clients import client as clients
from ryzanstein.lab.clients.client import LoadClient
from ryzanstein.lab.clients.reading import AnswerReading, Piece
from ryzanstein.lab.clients.transport import Request

REQUEST = Request(QUESTIONS[0], 0, "", "user")
BROKEN = RyzansteinError("connection reset", Code.UNAVAILABLE, "UNAVAILABLE")


class Script:
    """A transport that brings so many tokens on each call, then fails as told, or finishes."""

    def __init__(self, *calls: tuple[int, RyzansteinError | None]) -> None:
        self._calls = list(calls)
        self.routers: list[int] = []
        self.began = 0

    async def follow(self, request: Request, reading: AnswerReading, progress: Callable[[], None]) -> None:
        tokens, failure = self._calls.pop(0)
        self.routers.append(reading.router)
        self.began += not reading.generation_id
        first = reading.next_index.get(0, 0)
        if tokens:
            reading.generation_id = "g"
            reading.take(Piece(0, first, list(range(first, first + tokens))))
            progress()
        if failure is not None:
            raise failure
        reading.finished(0, "stop")

    async def leave(self) -> None:
        return


async def read(script: Script, num_routers: int = 1) -> AnswerReading:
    reading = AnswerReading("greedy")
    await LoadClient(script, num_routers, random.Random(0)).read(REQUEST, reading, lambda: None)
    return reading


async def test_a_broken_stream_is_continued_at_the_next_index_of_another_router() -> None:
    script = Script((3, BROKEN), (0, BROKEN), (2, None))
    reading = await read(script, num_routers=2)
    assert not reading.failure
    assert reading.choices[0].tokens == [0, 1, 2, 3, 4]
    assert (script.began, script.routers, reading.calls) == (1, [0, 1, 0], 3)
    assert reading.troubles == ["UNAVAILABLE", "UNAVAILABLE"]


async def test_a_refusal_before_anything_began_is_asked_again_when_it_says(monkeypatch: pytest.MonkeyPatch) -> None:
    slept: list[float] = []

    async def sleep(seconds: float) -> None:
        slept.append(seconds)

    monkeypatch.setattr(asyncio, "sleep", sleep)
    script = Script((0, errors.no_nodes("m", "none")), (2, None))
    reading = await read(script)
    assert not reading.failure
    assert script.began == 2
    assert slept == [1.0]
    assert reading.troubles == ["UNAVAILABLE NO_NODES"]


@pytest.mark.parametrize("failure", [errors.invalid("n", "is wrong"), errors.internal("a bug"), errors.deadline_exceeded()])
async def test_an_error_of_its_own_is_final(failure: RyzansteinError) -> None:
    failure.reason = failure.reason if failure.reason != failure.code.name else "A_REASON"
    reading = await read(Script((0, failure)))
    assert reading.failure.startswith(failure.code.name)


async def test_a_generation_that_ended_for_want_of_nodes_is_resumed_as_announced(monkeypatch: pytest.MonkeyPatch) -> None:
    slept: list[float] = []

    async def sleep(seconds: float) -> None:
        slept.append(seconds)

    monkeypatch.setattr(asyncio, "sleep", sleep)
    script = Script((3, errors.no_nodes("m", "none")), (0, errors.no_nodes("m", "none")), (2, None))
    reading = await read(script)
    assert not reading.failure
    assert reading.choices[0].tokens == [0, 1, 2, 3, 4]
    assert (script.began, slept) == (1, [1.0, 1.0])


async def test_a_generation_that_ended_for_good_is_not_attached_to() -> None:
    reading = await read(Script((3, errors.attempts_exhausted(5, "link_lost"))))
    assert "ATTEMPTS_EXHAUSTED" in reading.failure


async def test_it_does_not_try_for_ever(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(clients, "PATIENCE_S", 0.1)
    monkeypatch.setattr(clients, "_LONGEST_BACKOFF_S", 0.02)
    reading = await read(Script((1, BROKEN), *[(0, BROKEN)] * 200))
    assert reading.failure.startswith("UNAVAILABLE")
    assert 2 < reading.calls < 100


async def test_a_stream_that_ends_without_its_end_is_broken() -> None:
    class Silent(Script):
        async def follow(self, request: Request, reading: AnswerReading, progress: Callable[[], None]) -> None:
            if self.routers:
                await super().follow(request, reading, progress)
            self.routers.append(0)
            reading.generation_id = "g"

    reading = await read(Silent((2, None)))
    assert reading.troubles == ["UNKNOWN"]
    assert reading.complete


async def test_who_has_every_token_but_not_the_usage_attaches_for_it() -> None:
    class Cut(Script):
        async def follow(self, request: Request, reading: AnswerReading, progress: Callable[[], None]) -> None:
            await super().follow(request, reading, progress)
            if reading.calls == 1:
                raise BROKEN
            reading.completion_tokens = 2

    reading = await read(Cut((2, None), (0, None)))
    assert (reading.complete, reading.completion_tokens, reading.failure, reading.calls) == (True, 2, "", 2)


async def test_who_goes_away_learns_it_and_comes_back() -> None:
    class Leaving(Script):
        async def leave(self) -> None:
            self.left = True

    script = Leaving((2, BROKEN), (1, None))
    client = LoadClient(script, 1, random.Random(0))
    await client.go_away(0.05)
    reading = AnswerReading("greedy")
    began = asyncio.get_running_loop().time()
    await client.read(REQUEST, reading, lambda: None)
    assert asyncio.get_running_loop().time() - began >= 0.05
    assert reading.troubles == ["disconnected"]
    assert script.left
