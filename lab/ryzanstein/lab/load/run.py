"""A load: conversations one after another on a number of streams, or at times that do not depend on the answers.

Every token's index is checked when it arrives, and every answer is compared with the first one to the same question.
"""

from __future__ import annotations

import asyncio
import random
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import count

from ryzanstein.errors import Code, RyzansteinError
from ryzanstein.lab.clients.client import TRANSPORTS, LoadClient
from ryzanstein.lab.clients.judge import Verdict, judge
from ryzanstein.lab.clients.question import LoadQuestion
from ryzanstein.lab.clients.reading import AnswerReading
from ryzanstein.lab.clients.transport import Request, RouterAddress
from ryzanstein.lab.load.outcome import Outcome, Times, outcome_of
from ryzanstein.lab.load.workload import Shape, probe

_PROBES = (40, 240)


@dataclass(frozen=True, slots=True)
class LoadBounds:
    """When a load ends and what it may have open. `waits`: clients ask again when a refusal says when. `compares`: answers
    to the same question have to be equal. `num_users`: after so many, a conversation is of an earlier user."""

    seconds: float | None = None
    num_requests: int | None = None
    most_open: int = 1000
    waits: bool = True
    compares: bool = True
    num_users: int = 2**31


@dataclass(slots=True)
class LoadRun:
    """One load. What ended is in `outcomes`, in the order of its end; tokens by second after the start in `token_seconds`."""

    routers: Sequence[RouterAddress]
    bounds: LoadBounds
    seed: int = 0
    outcomes: list[Outcome] = field(default_factory=list)
    token_seconds: Counter[int] = field(default_factory=Counter)
    num_came: int = 0
    num_open: int = 0
    num_tokens: int = 0
    num_refused: int = 0
    num_wrong: int = 0
    started: float = 0.0
    ended: float = 0.0
    _idle: list[LoadClient] = field(default_factory=list)
    _expected: dict[tuple[str, int], AnswerReading] = field(default_factory=dict)
    _numbers: Iterator[int] = field(default_factory=count)

    async def measure(self, shape: Shape) -> Shape:
        """Returns the shape with the model's tokens per word: from the prompt tokens of two short requests.

        Raises RyzansteinError if one is refused: nothing of this load could be served.
        """
        counted = []
        for num_words in _PROBES:
            question = probe(shape, num_words)
            reading = AnswerReading(question.kind, model=question.model)
            client = self._client(question)
            try:
                await client.read(Request(question, 0, "", "load"), reading, lambda: None)
            finally:
                await client.close()
            if reading.failure:
                raise RyzansteinError(reading.failure, Code.FAILED_PRECONDITION, "LOAD_REFUSED")
            counted.append(reading.prompt_tokens)
        per_word = (counted[1] - counted[0]) / (_PROBES[1] - _PROBES[0])
        return replace(shape, tokens_per_word=max(0.1, per_word))

    async def closed(self, questions: Iterator[LoadQuestion], num_streams: int) -> None:
        """Asks on so many streams, one conversation after another on each. Returns when the last one has ended."""
        self._start()

        async def stream() -> None:
            while self._goes_on(time.monotonic()) and (question := next(questions, None)) is not None:
                self.num_came += 1
                await self._converse(question, time.monotonic())

        try:
            async with asyncio.TaskGroup() as streams:
                for _ in range(num_streams):
                    streams.create_task(stream())
        finally:
            await self._end()

    async def open(self, questions: Iterator[LoadQuestion], times: Iterator[float]) -> None:
        """Asks at these times, in seconds after the start, whatever happens. Returns when the last answer has ended."""
        self._start()
        places = asyncio.Semaphore(self.bounds.most_open)
        try:
            async with asyncio.TaskGroup() as conversations:
                for question, after_s in zip(questions, times, strict=False):
                    came = self.started + after_s
                    if not self._goes_on(came):
                        break
                    await asyncio.sleep(max(0.0, came - time.monotonic()))
                    self.num_came += 1
                    conversations.create_task(self._converse(question, came, places))
        finally:
            await self._end()

    def _start(self) -> None:
        self.started = time.monotonic()

    async def _end(self) -> None:
        self.ended = time.monotonic()
        idle, self._idle = self._idle, []
        for client in idle:
            await client.close()

    def _goes_on(self, came: float) -> bool:
        seconds, most = self.bounds.seconds, self.bounds.num_requests
        return (seconds is None or came < self.started + seconds) and (most is None or self.num_came < most)

    async def _converse(self, question: LoadQuestion, came: float, places: asyncio.Semaphore | None = None) -> None:
        """Asks all turns. A turn that fails ends the conversation: what follows could not be right."""
        self.num_open += 1
        try:
            if places is None:
                return await self._ask_all(question, came)
            async with places:
                return await self._ask_all(question, came)
        finally:
            self.num_open -= 1

    async def _ask_all(self, question: LoadQuestion, came: float) -> None:
        client = self._idle.pop() if self._idle else self._client(question)
        number = next(self._numbers)
        user = f"user-{number % self.bounds.num_users}"
        session_id = f"load-{self.seed}-{number}-{time.time_ns():x}" if question.in_session else ""
        router, node_before = number % len(self.routers), None
        try:
            for turn in range(len(question.turns)):
                reading = AnswerReading(question.kind, turn, router=router, model=question.model)
                sent = time.monotonic()
                came = came if turn == 0 else sent
                await client.read(Request(question, turn, session_id, user), reading, lambda: None)
                times = Times(came, sent, time.monotonic())
                outcome = outcome_of(reading, self._judged(question, reading), times, node_before)
                self._count(outcome, reading)
                if reading.failure:
                    break
                router, node_before = reading.router, (outcome.nodes[-1] if outcome.nodes else None)
        except BaseException:
            await client.close()
            raise
        self._idle.append(client)

    def _judged(self, question: LoadQuestion, reading: AnswerReading) -> Verdict:
        key = (question.kind, reading.turn)
        if not self.bounds.compares or key not in self._expected:
            if reading.complete and self.bounds.compares:
                self._expected[key] = reading
            return Verdict(reading.num_lost, reading.num_repeated, bool(reading.failure))
        return judge(self._expected[key], reading)

    def _count(self, outcome: Outcome, reading: AnswerReading) -> None:
        self.outcomes.append(outcome)
        self.num_tokens += outcome.num_tokens
        self.num_refused += outcome.refused
        self.num_wrong += not outcome.refused and not outcome.verdict.flawless
        for arrival in reading.arrivals:
            self.token_seconds[int(arrival.at - self.started)] += arrival.num_tokens

    def _client(self, question: LoadQuestion) -> LoadClient:
        rng = random.Random(f"{self.seed}/{next(self._numbers)}")
        transport = TRANSPORTS[question.face](self.routers)
        return LoadClient(transport, len(self.routers), rng, waits=self.bounds.waits)
