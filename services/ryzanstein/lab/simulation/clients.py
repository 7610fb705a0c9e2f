"""Clients of the simulated cluster.

They send requests, read, lose their streams, come back, give up, and check what they receive. They
speak gRPC with the generated stubs and follow the documentation: they attach again where a stream
broke, wait as long as RetryInfo says, and name a request so that it is not answered twice.
"""

from __future__ import annotations

import asyncio
import contextlib
import random
from collections.abc import AsyncGenerator
from dataclasses import dataclass, field, replace
from typing import Any

import grpc

from ryzanstein.errors import Code, RyzansteinError
from ryzanstein.generation import ChatPrompt, FinishReason, Message, Role, SamplingParams
from ryzanstein.lab.simulation import services
from ryzanstein.lab.simulation.answers import ChoiceExpected, SeenAnswer
from ryzanstein.lab.simulation.checks import BrokenPromise, Checks
from ryzanstein.lab.simulation.cluster import Cluster
from ryzanstein.lab.simulation.plan import ClientPlan
from ryzanstein.lab.simulation.scripted_model import ScriptedModel, demo_text
from ryzanstein.lab.simulation.strikes import JOURNAL, STORE
from ryzanstein.rpc.client import open_channel
from ryzanstein.rpc.status import error_from_rpc
from ryzanstein.v1 import inference_pb2 as pb
from ryzanstein.v1.inference_pb2_grpc import InferenceServiceStub, SessionServiceStub
from ryzanstein.wire import message_to_wire, messages_from_wire, sampling_to_wire

MODEL = "demo"
_FIRST_PAUSE_S = 0.1
_LONGEST_PAUSE_S = 2.0
_AWAY_S = (0.05, 8.0)
_SPEAKS_S = 120  # how long a client checks whether its last answer still runs
_LONGEST_PROMPT = 2048
_LONGEST_HISTORY = 1536
_LONGEST_HISTORY_CHARS = 16_384
_WORDS = ("red", "count", "name", "tea", "why", "again", "blue", "seven", "tell", "me")


@dataclass(frozen=True, slots=True)
class ClientQuestion:
    """One request. `deadline` is virtual time."""

    key: str
    messages: tuple[Message, ...]
    history: tuple[Message, ...]
    session_id: str
    sampling: SamplingParams
    deadline: float

    def chat(self) -> pb.ChatRequest:
        messages = [message_to_wire(message) for message in self.messages]
        sampling = sampling_to_wire(self.sampling)
        return pb.ChatRequest(
            model=MODEL, messages=messages, sampling=sampling, session_id=self.session_id, request_id=self.key
        )


@dataclass(slots=True)
class Conversation:
    """A session as its client knows it.

    `doubtful`: the question whose turn may or may not have been stored, in full or as far as it was
    shown. `given_up`: the client knows so little about it that it uses another session.
    """

    session_id: str
    history: tuple[Message, ...] = ()
    doubtful: ClientQuestion | None = None
    given_up: bool = False


@dataclass(slots=True)
class ClientTally:
    """How requests ended."""

    complete: int = 0
    tokens: int = 0
    by_outcome: dict[str, int] = field(default_factory=dict)

    def count(self, outcome: str) -> None:
        self.by_outcome[outcome] = self.by_outcome.get(outcome, 0) + 1


class SimulatedClient:
    """A simulated client. `run` it in its own process until the plan's duration is over."""

    def __init__(self, plan: ClientPlan, cluster: Cluster, checks: Checks, tally: ClientTally) -> None:
        self.plan, self._cluster, self._checks, self._tally = plan, cluster, checks, tally
        self._rng = cluster.rng(f"client {plan.number}")
        self._asked = self._asking = 0
        self._answered = asyncio.Event()
        self._model = ScriptedModel.demo()
        self.conversations: list[Conversation] = []

    async def run(self) -> None:
        loop = asyncio.get_running_loop()
        await asyncio.sleep(3.0 + self._rng.random())
        async with asyncio.TaskGroup() as asking:
            while loop.time() < self._cluster.plan.duration_s and self._tally.tokens < self._cluster.plan.max_tokens:
                for _ in range(self.plan.burst if self._rng.random() < 0.1 else 1):
                    self._asking += 1
                    asking.create_task(self._ask(self._rng.random())).add_done_callback(self._one_less)
                await self._idle()
                await asyncio.sleep(self._rng.expovariate(1 / self.plan.think_s) + 0.01)
                await self._while_idle()

    async def _idle(self) -> None:
        """Returns when everything is answered.

        Otherwise requests would pile up while nothing comes back.
        """
        while self._asking:
            await self._answered.wait()
            self._answered.clear()

    def _one_less(self, _: object) -> None:
        self._asking -= 1
        self._answered.set()

    async def _while_idle(self) -> None:
        now = asyncio.get_running_loop().time()
        for begins, ends in self._cluster.plan.idle:
            if begins <= now < ends:
                await asyncio.sleep(ends - now + self._rng.random())

    async def _ask(self, chance: float) -> None:
        rng = random.Random(f"{self._cluster.plan.seed} {self.plan.number} {self._asked} {chance}")
        self._asked += 1
        conversation = self._conversation(rng)
        if conversation is not None and conversation.doubtful is not None and not self._interrupts():
            await self._settle(conversation, rng)
            conversation = self._conversation(rng)
        asking = _Asking(self, self._question(rng, conversation), rng)
        outcome = await asking.run()
        if outcome == "complete":
            await self._compare(asking, conversation)
        self._tally.count(outcome)
        self._tally.tokens += asking.answer.num_tokens
        self._cluster.record.say(
            "answered", client=self.plan.number, key=asking.question.key, outcome=outcome, tokens=asking.answer.num_tokens
        )
        if conversation is not None:
            self._remember(conversation, asking, outcome)

    def _conversation(self, rng: random.Random) -> Conversation | None:
        """Returns the session for a request. Each concurrent request of a burst has its own."""
        if not self.plan.session:
            return None
        last = self.conversations[-1] if self.conversations else None
        if self.plan.burst > 1 or last is None or last.given_up or _is_long(last.history):
            self.conversations.append(Conversation(f"s-{self.plan.number}-{self._asked}"))
        return self.conversations[-1]

    def _question(self, rng: random.Random, conversation: Conversation | None) -> ClientQuestion:
        least, most = self.plan.tokens
        max_tokens = min(round(least * (most / least) ** rng.random()), self._room)
        short = rng.random() < self.plan.short_deadline
        lasts_s = rng.uniform(0.05, 5.0) if short else self.plan.deadline_s
        said = (Message(Role.USER, " ".join(rng.choices(_WORDS, k=rng.randint(1, 8)))),)
        return ClientQuestion(
            f"q-{self.plan.number}-{self._asked}",
            said,
            () if conversation is None else conversation.history,
            "" if conversation is None else conversation.session_id,
            SamplingParams(
                temperature=rng.choice((0.0, 1.0)),
                seed=rng.getrandbits(32),
                max_tokens=max(1, max_tokens),
                n=1 if conversation is not None else self.plan.choices,
                ignore_eos=rng.random() < 0.5,
                stop=("red",) if rng.random() < 0.1 else (),
            ),
            asyncio.get_running_loop().time() + lasts_s,
        )

    @property
    def _room(self) -> int:
        """Returns how many tokens fit the largest node besides any prompt of this client."""
        return max(node.context_length for node in self._cluster.plan.nodes) - _LONGEST_PROMPT

    def _interrupts(self) -> bool:
        return (
            random.Random(f"{self._cluster.plan.seed} {self.plan.number} {self._asked} asks at once").random()
            < self.plan.interrupts
        )

    async def _compare(self, asking: _Asking, conversation: Conversation | None) -> None:
        """Compares the answer with the one without faults.

        If the turn before may have been stored, the answer that follows that turn is right too.
        """
        question = asking.question
        differences = asking.answer.differences(self.expected(question))
        if not differences or conversation is None or conversation.doubtful is None:
            for difference in differences:
                self._checks.violated(BrokenPromise.CHANGED, difference, key=question.key, sent=asking.sent)
            return
        stored = await self.stored(conversation)
        history = () if stored is None else stored[: len(question.history) + 2]
        if len(history) == len(question.history) + 2:
            self.check(conversation, history)
            self._checks.reach("answered after a turn that was cut off")
            for difference in asking.answer.differences(self.expected(replace(question, history=history))):
                self._checks.violated(BrokenPromise.CHANGED, difference, key=question.key, sent=asking.sent)
            conversation.history = history
        elif stored is None or self._checks.is_struck(STORE):
            conversation.given_up = True
        else:
            self._checks.violated(BrokenPromise.CHANGED, differences[0], key=question.key, stored=len(stored))

    def expected(self, question: ClientQuestion) -> list[ChoiceExpected]:
        text = demo_text()
        prompt_ids = text.encode_prompt(ChatPrompt((*question.history, *question.messages)))
        answers = (
            self._model.expected(prompt_ids, question.sampling, 10**9, text, choice) for choice in range(question.sampling.n)
        )
        return [ChoiceExpected(tuple(answer.token_ids), answer.text, _WIRE[answer.reason]) for answer in answers]

    def _remember(self, conversation: Conversation, asking: _Asking, outcome: str) -> None:
        answer = asking.answer
        turn = (*asking.question.messages, Message(Role.ASSISTANT, "".join(answer.choices[0].text)))
        if outcome == "complete":
            conversation.history, conversation.doubtful = (*conversation.history, *turn), None
        elif conversation.doubtful is not None:
            conversation.given_up = True
        else:
            conversation.doubtful = asking.question

    async def _settle(self, conversation: Conversation, rng: random.Random) -> None:
        """Finds out whether the doubtful turn was stored, before the client continues."""
        await asyncio.sleep(rng.uniform(1.0, 40.0))
        for _ in range(_SPEAKS_S):
            if not services.speaks_in(conversation.session_id):
                break
            await asyncio.sleep(1.0)
        speaks = services.speaks_in(conversation.session_id)
        stored = None if speaks else await self.stored(conversation)
        if stored is None:
            conversation.given_up = True
            return
        self.check(conversation, stored)
        if stored != conversation.history:
            conversation.history, conversation.doubtful = stored, None

    def check(self, conversation: Conversation, stored: tuple[Message, ...]) -> None:
        """Checks that the cluster stored what the client received, each turn once."""
        known = conversation.history
        if stored == known or conversation.session_id in services.LOST_TURNS:
            return
        more = stored[len(known) :]
        if stored[: len(known)] == known and conversation.doubtful is not None and len(more) == 2:  # noqa: SIM102
            if self._is_turn(conversation.doubtful, more):
                return
        twice = len(stored) >= 4 and stored[-2] == stored[-4]
        self._checks.violated(
            BrokenPromise.TURN, "a turn was stored twice" if twice else "the session differs from its client's answers",
            session=conversation.session_id, known=len(known), stored=len(stored),
        )  # fmt: skip

    def _is_turn(self, question: ClientQuestion, turn: tuple[Message, ...]) -> bool:
        """Returns whether a stored turn is the question with its answer.

        The answer is complete or, if unread turns are kept, the part of it that was shown.
        """
        said, answer = turn
        whole = self.expected(question)[0].text
        shown = self._cluster.plan.unread_turns == "keep" and whole.startswith(answer.content)
        return said == question.messages[0] and (answer.content == whole or shown)

    async def stored(self, conversation: Conversation) -> tuple[Message, ...] | None:
        """Returns the session's messages, or None if no router can answer now."""
        for router in self._cluster.routers:
            async with open_channel(router.address) as channel:
                request = pb.GetSessionRequest(session_id=conversation.session_id)
                try:
                    response = await SessionServiceStub(channel).GetSession(request, timeout=5.0)
                except grpc.aio.AioRpcError as failure:
                    if failure.code() is grpc.StatusCode.NOT_FOUND:
                        return ()
                    continue
                return messages_from_wire(response.session.messages)
        return None


def _is_long(history: tuple[Message, ...]) -> bool:
    """Returns whether a further request might not fit a small node, or take too long to check."""
    if not history or len(history) > 12:
        return bool(history)
    if sum(len(message.content) for message in history) > _LONGEST_HISTORY_CHARS:
        return True
    return len(demo_text().encode_prompt(ChatPrompt(history))) > _LONGEST_HISTORY


_WIRE = {
    FinishReason.STOP: pb.FINISH_REASON_STOP,
    FinishReason.LENGTH: pb.FINISH_REASON_LENGTH,
    FinishReason.CANCELLED: pb.FINISH_REASON_CANCELLED,
}


class _Asking:
    """One request until its answer, its error or its end."""

    def __init__(self, client: SimulatedClient, question: ClientQuestion, rng: random.Random) -> None:
        self._client, self._rng = client, rng
        self._cluster, self._checks = client._cluster, client._checks
        self.question = question
        self.answer = SeenAnswer(question.sampling.n)
        self._router = rng.randrange(len(self._cluster.routers))
        self._loop = asyncio.get_running_loop()
        self._connected_at = self._loop.time()
        self._retry_reason = ""
        self._retries = self.sent = 0
        self._lost = False
        self._pause_s = _FIRST_PAUSE_S
        self._leaves_at = rng.randint(1, 200) if rng.random() < client.plan.leaves else None
        self._cancels_at = rng.randint(1, 200) if rng.random() < client.plan.cancels else None
        self._loses = rng.random() < client.plan.loses_stream
        self._loses_at = rng.choice((0, 0, rng.randint(1, 100))) if self._loses else None

    async def run(self) -> str:
        """Runs the request and returns how it ended."""
        outcome = ""
        while not outcome:
            outcome = await self._once()
        for problem in self.answer.problems:
            self._checks.violated(BrokenPromise.INDEX, problem, key=self.question.key)
        return outcome

    async def _once(self) -> str:
        """Reads one stream. Returns an empty string if another one is needed."""
        left_s = self.question.deadline - self._loop.time()
        if left_s <= 0:
            return "deadline"
        try:
            async with open_channel(self._cluster.routers[self._router].address) as channel:
                outcome = await self._read(InferenceServiceStub(channel), left_s)
        except grpc.aio.AioRpcError as failure:
            return await self._failed(failure)
        return outcome or await self._again(self._rng.uniform(*_AWAY_S), move=True)

    async def _read(self, stub: Any, left_s: float) -> str:
        """Reads until the stream ends or the client abandons it."""
        self._lost = False
        call = self._call(stub, left_s)
        async with contextlib.aclosing(self._events(call)) as events:
            async for event in events:
                self._connected_at = self._loop.time()
                self._retry_reason, self._retries, self._pause_s = "", 0, _FIRST_PAUSE_S
                self.answer.event(event, self._connected_at)
                if (outcome := await self._had_enough(stub)) is not None:
                    call.cancel()
                    return outcome
        if not self.answer.complete:
            if not self._lost:
                self._checks.violated(BrokenPromise.LOST, "the stream ended before its answer", key=self.question.key)
            return ""
        cancelled = [choice for choice in self.answer.choices if choice.reason == pb.FINISH_REASON_CANCELLED]
        if cancelled:
            self._checks.violated(
                BrokenPromise.CANCELLED, "an answer that nobody cancelled was cancelled", key=self.question.key
            )
            return "cancelled"
        self._client._tally.complete += 1
        return "complete"

    def _call(self, stub: Any, left_s: float) -> Any:
        if self.answer.generation_id:
            self.answer.reattached()
            request = pb.AttachGenerationRequest(generation_id=self.answer.generation_id, from_index=self.answer.from_index)
            return stub.AttachGeneration(request, timeout=left_s)
        self.sent += 1
        return stub.StreamChat(pb.StreamChatRequest(chat=self.question.chat()), timeout=left_s)

    async def _events(self, call: Any) -> AsyncGenerator[pb.GenerationEvent, None]:
        lost = self._loses_at == 0 and not self.answer.generation_id
        if lost:
            # The connection breaks before anything arrives.
            self._loses_at, self._lost = None, True
            await asyncio.sleep(self._rng.uniform(0.001, 0.3))
            call.cancel()
            return
        async for response in call:
            yield response.event

    async def _had_enough(self, stub: Any) -> str | None:
        """Returns how the client abandons the stream, or None if it reads on."""
        seen = self.answer.num_tokens
        if self._leaves_at is not None and seen >= self._leaves_at:
            return "left"
        if self._cancels_at is not None and seen >= self._cancels_at:
            with contextlib.suppress(grpc.aio.AioRpcError):
                await stub.CancelGeneration(pb.CancelGenerationRequest(generation_id=self.answer.generation_id), timeout=5.0)
            return "cancelled"
        if self._loses_at is not None and seen >= self._loses_at:
            self._loses_at = None
            return ""
        return None

    async def _failed(self, failure: grpc.aio.AioRpcError) -> str:
        if failure.code() is grpc.StatusCode.DEADLINE_EXCEEDED:
            return "deadline"
        error = error_from_rpc(failure)
        now = self._loop.time()
        if "DEADLINE" in error.reason:
            if error.retry_after_s is None and now < self.question.deadline - 1.0:
                self._checks.violated(BrokenPromise.GAVE_UP, f"{error.reason} before the deadline", key=self.question.key)
            return "deadline"
        if error.reason == failure.code().name and failure.code() in (
            grpc.StatusCode.UNAVAILABLE,
            grpc.StatusCode.CANCELLED,
        ):
            return await self._again(self._pause_s, move=True)
        self._cluster.record.say(
            "refused", key=self.question.key, reason=error.reason, retry_after_s=error.retry_after_s, message=error.message,
            tokens=self.answer.num_tokens, router=self._router,
        )  # fmt: skip
        return await self._refused(error)

    @property
    def _num_tokens(self) -> int:
        """Returns how many tokens a node's context must hold for this question."""
        question = self.question
        prompt = demo_text().encode_prompt(ChatPrompt((*question.history, *question.messages)))
        return len(prompt) + (question.sampling.max_tokens or 0)

    async def _refused(self, error: RyzansteinError) -> str:
        now, key = self._loop.time(), self.question.key
        if error.reason == "GENERATION_NOT_FOUND":
            return await self._not_found()
        if error.reason == "JOURNAL_UNAVAILABLE" and not self._checks.is_struck(JOURNAL, _ODD_FOR_S):
            self._checks.violated(BrokenPromise.RETRY, "JOURNAL_UNAVAILABLE while every disk works", key=key)
        not_here = error.retry_after_s is not None and error.reason in _NOT_HERE
        ended = self.answer.generation_id or error.reason in ("RANK_LOST", "RANK_STALLED", "LINK_DOWN")
        if ended and not not_here:
            self._checks.gave_up(error, self.answer.progress_at or self._connected_at, key, self._num_tokens)
        if error.retry_after_s is not None:
            self._retry_reason = error.reason
            self._retries += 1
            if error.code is not Code.RESOURCE_EXHAUSTED and self._retries > _MANY_RETRIES and self._checks.somebody_serves:
                self._checks.violated(BrokenPromise.RETRY, f"{error.reason} asked {self._retries} times for a retry", key=key)
                return "gave up"
            return await self._again(error.retry_after_s, move=False)
        if error.reason == "SESSION_FULL":
            return "session_full"
        if error.code is Code.INTERNAL and self._checks.is_struck(STORE, _ODD_FOR_S):
            return "internal"  # as intended: the store raised an unexpected exception
        self._checks.violated(BrokenPromise.BLAMED, f"{error.reason}: {error.message}", key=key, at=round(now, 3))
        return error.reason.lower()

    async def _not_found(self) -> str:
        """Checks that a generation is found within its window, on any router."""
        away_s = self._loop.time() - self._connected_at
        if self._retry_reason:
            self._checks.violated(
                BrokenPromise.RETRY, f"not found after {self._retry_reason} asked for a retry", key=self.question.key
            )
        elif away_s < _WINDOW_S and self._cluster.plan.session_store != "memory":
            self._checks.violated(BrokenPromise.LOST, f"not found {away_s:.1f} s after it was read", key=self.question.key)
        return "not_found"

    async def _again(self, pause_s: float, *, move: bool) -> str:
        """Waits, then lets the client retry, at another router if the last one seems to be gone."""
        await asyncio.sleep(pause_s)
        self._pause_s = min(2 * self._pause_s, _LONGEST_PAUSE_S)
        if move:
            self._router = (self._router + 1) % len(self._cluster.routers)
        if not self.answer.generation_id and not self._client.plan.resubmits and move:
            return "left"
        return ""


_WINDOW_S = 25.0
_MANY_RETRIES = 30
# These do not end a generation: it is elsewhere, and the client retries.
_NOT_HERE = ("JOURNAL_UNAVAILABLE", "GENERATION_MOVED", "QUEUE_FULL")
_ODD_FOR_S = 5.0
