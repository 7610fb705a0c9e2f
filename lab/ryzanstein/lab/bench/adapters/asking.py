"""Asks questions at random times, whatever has been answered, and compares answers with those that a quiet cluster gave."""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import grpc

from ryzanstein.lab.bench.adapters.questions import AdapterQuestion
from ryzanstein.lab.load.arrivals import poisson
from ryzanstein.rpc.client import open_channel
from ryzanstein.v1 import inference_pb2 as pb
from ryzanstein.v1.inference_pb2_grpc import InferenceServiceStub

if TYPE_CHECKING:
    from ryzanstein.v1.inference_pb2_grpc import InferenceServiceAsyncStub

_CALL_S = 120.0


@dataclass(frozen=True, slots=True)
class AdapterAnswer:
    """The tokens of an answer, and when the first came, in seconds after the question. `failure`: why it has no end."""

    question: AdapterQuestion
    token_ids: tuple[int, ...] = ()
    first_s: float = 0.0
    failure: str = ""


@dataclass(slots=True)
class Asked:
    """The answers so far. `known` are the right tokens of some questions; `wrong` the answers that differ."""

    known: Mapping[AdapterQuestion, tuple[int, ...]]
    answers: list[AdapterAnswer] = field(default_factory=list)
    wrong: list[AdapterAnswer] = field(default_factory=list)
    num_compared: int = 0

    def take(self, answer: AdapterAnswer) -> None:
        self.answers.append(answer)
        right = self.known.get(answer.question)
        if right is not None and not answer.failure:
            self.num_compared += 1
            if answer.token_ids != right:
                self.wrong.append(answer)

    @property
    def failures(self) -> list[str]:
        return [each.failure for each in self.answers if each.failure]


class Asker:
    """A client of one router. Answers are greedy, of `tokens` tokens."""

    def __init__(self, router: str, tokens: int) -> None:
        self._router, self._tokens = router, tokens

    async def alone(self, questions: Iterator[AdapterQuestion]) -> Asked:
        """Asks one question after the other."""
        asked = Asked({})
        async with open_channel(self._router) as channel:
            for question in questions:
                asked.take(await self._ask(InferenceServiceStub(channel), question))
        return asked

    async def load(
        self, questions: Iterator[AdapterQuestion], rate: float, seconds: float, asked: Asked, seed: int = 0
    ) -> None:
        """Asks `rate` questions a second on average, for so many seconds; returns when all are answered."""
        began, running = time.monotonic(), set[asyncio.Task[None]]()
        async with open_channel(self._router) as channel:
            stub = InferenceServiceStub(channel)

            async def ask(question: AdapterQuestion) -> None:
                asked.take(await self._ask(stub, question))

            for at_s, question in zip(poisson(rate, random.Random(seed)), questions, strict=False):
                if at_s >= seconds:
                    break
                await asyncio.sleep(began + at_s - time.monotonic())
                task = asyncio.create_task(ask(question))
                running.add(task)
                task.add_done_callback(running.discard)
            await asyncio.gather(*running)

    async def _ask(self, stub: InferenceServiceAsyncStub, question: AdapterQuestion) -> AdapterAnswer:
        chat = pb.ChatRequest(
            model=question.model,
            messages=[pb.Message(role=pb.ROLE_USER, content=question.prompt)],
            sampling=pb.SamplingParams(temperature=0, max_tokens=self._tokens, ignore_eos=True),
        )
        began, first_s, ids = time.monotonic(), 0.0, list[int]()
        try:
            async for response in stub.StreamChat(pb.StreamChatRequest(chat=chat), timeout=_CALL_S):
                if response.event.HasField("delta"):
                    first_s = first_s or time.monotonic() - began
                    ids += response.event.delta.token_ids
        except grpc.aio.AioRpcError as error:
            return AdapterAnswer(question, failure=f"{question.model}: {error.code().name}: {error.details()}"[:300])
        short = "" if len(ids) == self._tokens else f"{question.model}: {len(ids)} of {self._tokens} tokens"
        return AdapterAnswer(question, tuple(ids), first_s, short)
