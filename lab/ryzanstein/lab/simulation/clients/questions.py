"""What a simulated client asks, and in which session.

The draws of a question depend only on the seed, the client and the question's number.
"""

from __future__ import annotations

import asyncio
import random
from dataclasses import dataclass

from ryzanstein.generation.prompts import ChatPrompt, Message, Role
from ryzanstein.generation.request import SamplingParams
from ryzanstein.lab.simulation.planning.plan import FIRST_MODEL, ClientPlan, SimulationPlan
from ryzanstein.lab.simulation.scripted.answers import SeenAnswer
from ryzanstein.lab.simulation.scripted.model import demo_text
from ryzanstein.v1 import inference_pb2 as pb
from ryzanstein.wire.requests import message_to_wire, sampling_to_wire

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
    model: str = FIRST_MODEL

    def chat(self) -> pb.ChatRequest:
        messages = [message_to_wire(message) for message in self.messages]
        sampling = sampling_to_wire(self.sampling)
        return pb.ChatRequest(
            model=self.model, messages=messages, sampling=sampling, session_id=self.session_id, request_id=self.key
        )

    def prompt_ids(self) -> list[int]:
        return demo_text().encode_prompt(ChatPrompt((*self.history, *self.messages)))


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

    def remember(self, question: ClientQuestion, answer: SeenAnswer, *, complete: bool) -> None:
        """Adds the turn of a complete answer; any other turn is in doubt."""
        turn = (*question.messages, Message(Role.ASSISTANT, "".join(answer.choices[0].text)))
        if complete:
            self.history, self.doubtful = (*self.history, *turn), None
        elif self.doubtful is not None:
            self.given_up = True
        else:
            self.doubtful = question


class Questions:
    """The questions of one client, and the conversations they belong to.

    Each question begins with `next_rng`, whose random numbers decide it.
    """

    def __init__(self, client: ClientPlan, plan: SimulationPlan) -> None:
        self._client, self._plan = client, plan
        self._asked = 0
        self.conversations: list[Conversation] = []

    def next_rng(self, chance: float) -> random.Random:
        """Counts a question and returns its random numbers."""
        rng = random.Random(f"{self._plan.seed} {self._client.number} {self._asked} {chance}")
        self._asked += 1
        return rng

    def conversation(self) -> Conversation | None:
        """Returns the session for a request. Each concurrent request of a burst has its own."""
        if not self._client.session:
            return None
        last = self.conversations[-1] if self.conversations else None
        if self._client.burst > 1 or last is None or last.given_up or _is_long(last.history):
            self.conversations.append(Conversation(f"s-{self._client.number}-{self._asked}"))
        return self.conversations[-1]

    def draw(self, rng: random.Random, conversation: Conversation | None) -> ClientQuestion:
        """Returns the next question, after the conversation's history."""
        client = self._client
        least, most = client.tokens
        model = self._model(f"question {self._asked}" if conversation is None else conversation.session_id)
        max_tokens = min(round(least * (most / least) ** rng.random()), self._room(model))
        short = rng.random() < client.short_deadline
        lasts_s = rng.uniform(0.05, 5.0) if short else client.deadline_s
        longest = client.longest_words if conversation is None else 8
        wording = (Message(Role.USER, " ".join(rng.choices(_WORDS, k=rng.randint(1, longest)))),)
        return ClientQuestion(
            f"q-{client.number}-{self._asked}",
            wording,
            () if conversation is None else conversation.history,
            "" if conversation is None else conversation.session_id,
            SamplingParams(
                temperature=rng.choice((0.0, 1.0)),
                seed=rng.getrandbits(32),
                max_tokens=max(1, max_tokens),
                n=1 if conversation is not None else client.choices,
                ignore_eos=rng.random() < 0.5,
                stop=("red",) if rng.random() < 0.1 else (),
            ),
            asyncio.get_running_loop().time() + lasts_s,
            model,
        )

    def _model(self, of: str) -> str:
        """Returns the model of a question without a session, or of all questions of a session."""
        if not self._plan.more_models:
            return FIRST_MODEL
        return random.Random(f"{self._plan.seed} {self._client.number} {of} model").choice(self._plan.models)

    def _room(self, model: str) -> int:
        """Returns how many tokens fit the model's largest context besides any prompt of this client."""
        return self._plan.largest_context(model) - _LONGEST_PROMPT

    def interrupts(self) -> bool:
        """Returns whether the client asks without finding out what became of the last turn."""
        chance = random.Random(f"{self._plan.seed} {self._client.number} {self._asked} asks at once").random()
        return chance < self._client.interrupts


def _is_long(history: tuple[Message, ...]) -> bool:
    """Returns whether a further request might not fit a small node, or take too long to check."""
    if not history or len(history) > 12:
        return bool(history)
    if sum(len(message.content) for message in history) > _LONGEST_HISTORY_CHARS:
        return True
    return len(demo_text().encode_prompt(ChatPrompt(history))) > _LONGEST_HISTORY
