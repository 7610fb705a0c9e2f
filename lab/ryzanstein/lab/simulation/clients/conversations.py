"""Checks a client's answers and sessions against what the scripted model says without faults."""

from __future__ import annotations

import asyncio
import random
from dataclasses import replace

import grpc

from ryzanstein.generation.prompts import Message
from ryzanstein.generation.tokens import FinishReason
from ryzanstein.lab.simulation import services
from ryzanstein.lab.simulation.access.key_ring import metadata
from ryzanstein.lab.simulation.checks import BrokenPromise, Checks
from ryzanstein.lab.simulation.clients.asking import Asking
from ryzanstein.lab.simulation.clients.questions import ClientQuestion, Conversation
from ryzanstein.lab.simulation.cluster import Cluster
from ryzanstein.lab.simulation.planning.plan import FIRST_MODEL
from ryzanstein.lab.simulation.scripted.answers import ChoiceExpected
from ryzanstein.lab.simulation.scripted.model import ScriptedModel, demo_text
from ryzanstein.lab.simulation.strikes import STORE
from ryzanstein.rpc.client import open_channel
from ryzanstein.v1 import inference_pb2 as pb
from ryzanstein.v1.inference_pb2_grpc import SessionServiceStub
from ryzanstein.wire.requests import messages_from_wire

_SPEAKS_S = 120  # how long a client checks whether its last answer still runs
_WIRE = {
    FinishReason.STOP: pb.FINISH_REASON_STOP,
    FinishReason.LENGTH: pb.FINISH_REASON_LENGTH,
    FinishReason.CANCELLED: pb.FINISH_REASON_CANCELLED,
}


class ConversationChecks:
    """The checks of one client's answers and sessions."""

    def __init__(self, cluster: Cluster, checks: Checks, client: int) -> None:
        self._cluster, self._checks, self._client = cluster, checks, client
        self._models = {
            model: ScriptedModel.demo() if model == FIRST_MODEL else ScriptedModel.named(model) for model in cluster.plan.models
        }

    async def compare(self, asking: Asking, conversation: Conversation | None) -> None:
        """Compares the answer with the one without faults.

        If the turn before may have been stored, the answer that follows that turn is right too.
        """
        question = asking.question
        differences = asking.answer.differences(self._expected(question))
        if not differences or conversation is None or conversation.doubtful is None:
            for difference in differences:
                self._checks.violated(BrokenPromise.CHANGED, difference, key=question.key, sent=asking.sent)
            return
        stored = await self.stored(conversation)
        history = () if stored is None else stored[: len(question.history) + 2]
        if len(history) == len(question.history) + 2:
            self.check(conversation, history)
            self._checks.reach("answered after a turn that was cut off")
            for difference in asking.answer.differences(self._expected(replace(question, history=history))):
                self._checks.violated(BrokenPromise.CHANGED, difference, key=question.key, sent=asking.sent)
            conversation.history = history
        elif stored is None or self._checks.is_struck(STORE):
            conversation.given_up = True
        else:
            self._checks.violated(BrokenPromise.CHANGED, differences[0], key=question.key, stored=len(stored))

    def _expected(self, question: ClientQuestion) -> list[ChoiceExpected]:
        text = demo_text()
        prompt_ids = question.prompt_ids()
        model = self._models[question.model]
        answers = (model.expected(prompt_ids, question.sampling, 10**9, text, choice) for choice in range(question.sampling.n))
        return [ChoiceExpected(tuple(answer.token_ids), answer.text, _WIRE[answer.reason]) for answer in answers]

    async def settle(self, conversation: Conversation, rng: random.Random) -> None:
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
        message, answer = turn
        whole = self._expected(question)[0].text
        visible = self._cluster.plan.unread_turns == "keep" and whole.startswith(answer.content)
        return message == question.messages[0] and (answer.content == whole or visible)

    async def stored(self, conversation: Conversation) -> tuple[Message, ...] | None:
        """Returns the session's messages, or None if no router can answer now."""
        for router in self._cluster.routers:
            async with open_channel(router.address) as channel:
                request = pb.GetSessionRequest(session_id=conversation.session_id)
                key = self._cluster.keys.key_of(self._client)
                try:
                    response = await SessionServiceStub(channel).GetSession(request, timeout=5.0, metadata=metadata(key))
                except grpc.aio.AioRpcError as failure:
                    if failure.code() is grpc.StatusCode.NOT_FOUND:
                        return ()
                    continue
                return messages_from_wire(response.session.messages)
        return None
