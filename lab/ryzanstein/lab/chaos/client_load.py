"""A steady load: clients that ask one question after another, until they are stopped.

Each draws from a seeded mix.

`width` is how many of them ask; the others finish their answer and wait. An `Aim` is notified when
a stream is in its middle: that is when a fault strikes.
"""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import count

from ryzanstein.lab.clients.client import TRANSPORTS, LoadClient
from ryzanstein.lab.clients.question import LoadQuestion
from ryzanstein.lab.clients.reading import AnswerReading
from ryzanstein.lab.clients.transport import Request, RouterAddress

_POLL_S = 0.01
_MOST = "grpc"


@dataclass(slots=True, eq=False)
class Aim:
    """A target for a strike.

    It is the first reading of `kind` (empty: any) with enough tokens that satisfies `fits`.
    """

    kind: str
    after_tokens: int
    fits: Callable[[AnswerReading], bool]
    hit: asyncio.Future[AnswerReading]

    def look(self, reading: AnswerReading) -> None:
        if self.hit.done() or reading.num_tokens < self.after_tokens or reading.complete:
            return
        if self.kind in ("", reading.kind) and self.fits(reading):
            self.hit.set_result(reading)


def next_question(
    questions: Sequence[LoadQuestion], rng: random.Random, aimed_at: str, under_way: Sequence[AnswerReading]
) -> LoadQuestion:
    """Returns the next question of a client.

    It is one of its mix, or of the aimed kind if the mix has it and no stream of it is in progress.

    A strike waits for the aimed kind.
    """
    drawn = rng.choice(questions)  # drawn even if it is not asked, so that the rest of the schedule stays the same
    if any(reading.kind == aimed_at for reading in under_way):
        return drawn
    return next((question for question in questions if question.kind == aimed_at), drawn)


class ClientLoad:
    """The load of all clients. `run` it as a task.

    Readings that ended collect in `ended` until taken.
    """

    def __init__(
        self, routers: Sequence[RouterAddress], questions: Sequence[LoadQuestion], num_clients: int, seed: str
    ) -> None:
        self._routers = routers
        self._most = [question for question in questions if question.face == _MOST]
        self._others = [question for question in questions if question.face != _MOST]
        self._rng = random.Random(f"{seed}/clients")
        self._sessions = (f"chaos-{seed}-{number}" for number in count())
        self._aim: Aim | None = None
        self._readers: dict[AnswerReading, LoadClient] = {}
        self._changed = asyncio.Event()
        self.num_clients = num_clients
        self.width = 0
        self.ended: list[AnswerReading] = []

    @property
    def under_way(self) -> list[AnswerReading]:
        return list(self._readers)

    def client_of(self, reading: AnswerReading) -> LoadClient:
        """Returns the client that reads it now. Raises KeyError if it has ended."""
        return self._readers[reading]

    def set_width(self, width: int) -> None:
        """Sets how many clients ask from now on."""
        self.width = width
        self._changed.set()
        self._changed = asyncio.Event()

    def take_ended(self) -> list[AnswerReading]:
        ended, self.ended = self.ended, []
        return ended

    async def run(self) -> None:
        """Runs until cancelled."""
        async with asyncio.TaskGroup() as clients:
            for number in range(self.num_clients):
                clients.create_task(self._ask_on(number))

    async def aim(self, kind: str, after_tokens: int, fits: Callable[[AnswerReading], bool], timeout_s: float) -> AnswerReading:
        """Returns the reading that is in its middle now. Raises TimeoutError if there was none."""
        self._aim = Aim(kind, after_tokens, fits, asyncio.get_running_loop().create_future())
        try:
            async with asyncio.timeout(timeout_s):
                return await self._aim.hit
        finally:
            self._aim = None

    async def until_ended(self, readings: Sequence[AnswerReading], timeout_s: float) -> bool:
        """Returns whether all of them end within the timeout."""
        deadline = time.monotonic() + timeout_s
        while any(reading in self._readers for reading in readings):
            if time.monotonic() > deadline:
                return False
            await asyncio.sleep(_POLL_S)
        return True

    async def ask(self, question: LoadQuestion, number: int = 0) -> list[AnswerReading]:
        """Asks all turns of one question, once, outside of the mix."""
        client = self._client(question, random.Random(number))
        try:
            return await self._converse(client, question, f"alone-{number}", number % len(self._routers))
        finally:
            await client.close()

    async def _ask_on(self, number: int) -> None:
        """Asks questions until cancelled.

        The last client asks over the other faces if there are such questions.
        """
        rng = random.Random(self._rng.random())
        questions = self._others if self._others and number == self.num_clients - 1 else self._most
        clients: dict[str, LoadClient] = {}
        try:
            while True:
                while number >= self.width:
                    await self._changed.wait()
                router = rng.randrange(len(self._routers))
                aimed_at = self._aim.kind if self._aim is not None else ""
                question = next_question(questions, rng, aimed_at, self.under_way)
                if question.face not in clients:
                    clients[question.face] = self._client(question, rng)
                user = f"user-{rng.randrange(10**6)}"
                readings = await self._converse(clients[question.face], question, user, router)
                self.ended.extend(readings)  # after the await: the list may be another one by then
        finally:
            for client in clients.values():
                await client.close()

    async def _converse(self, client: LoadClient, question: LoadQuestion, user: str, router: int) -> list[AnswerReading]:
        """Asks all turns of a question.

        A failed turn ends the conversation: what follows could not be right.
        """
        session_id = next(self._sessions) if question.in_session else ""
        readings: list[AnswerReading] = []
        for turn in range(len(question.turns)):
            reading = AnswerReading(question.kind, turn, question.sampling.get("n", 1), router=router, model=question.model)
            readings.append(reading)
            self._readers[reading] = client
            try:
                await client.read(Request(question, turn, session_id, user), reading, partial(self._look, reading))
            finally:
                del self._readers[reading]
            router = reading.router
            if reading.failure:
                break
        return readings

    def _client(self, question: LoadQuestion, rng: random.Random) -> LoadClient:
        return LoadClient(TRANSPORTS[question.face](self._routers), len(self._routers), rng)

    def _look(self, reading: AnswerReading) -> None:
        if self._aim is not None:
            self._aim.look(reading)
