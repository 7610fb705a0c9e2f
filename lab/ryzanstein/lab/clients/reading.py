"""What one client saw of one answer, with every index checked: the laboratory's evidence.

It knows no transport. A gap in the indices is a lost token, an index that was already there a
repeated one. Both are counted where they happen, so that a later stream cannot hide them.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class CallPiece:
    """A piece of a call of a function. Only the first one has the id and the name."""

    number: int
    call_id: str
    name: str
    arguments: str


@dataclass(slots=True)
class CallRead:
    """A call as it arrived."""

    call_id: str = ""
    name: str = ""
    arguments: str = ""


@dataclass(frozen=True, slots=True)
class Piece:
    """One message's part of one choice. `node_id` is empty if the protocol does not report it."""

    choice: int
    first_index: int
    tokens: Sequence[int | str]
    text: str = ""
    logprobs: Sequence[float] = ()
    node_id: str = ""
    calls: Sequence[CallPiece] = ()


@dataclass(slots=True)
class ChoiceRead:
    """One choice as it arrived.

    `tokens` are ids over gRPC, and the tokens' strings over HTTP, which has no ids.
    """

    tokens: list[int | str] = field(default_factory=list)
    text: str = ""
    logprobs: list[float] = field(default_factory=list)
    reason: str = ""
    calls: dict[int, CallRead] = field(default_factory=dict)

    def take_call(self, piece: CallPiece) -> int:
        """Appends a piece. Returns 1 if it begins a call that has begun before, otherwise 0."""
        again = int(bool(piece.call_id) and piece.number in self.calls)
        call = self.calls.setdefault(piece.number, CallRead())
        call.call_id += piece.call_id
        call.name += piece.name
        call.arguments += piece.arguments
        return again


@dataclass(frozen=True, slots=True)
class TokenArrival:
    """The arrival of tokens: when (time.monotonic()), from which node, on which call, and how many.

    `node_id` is empty if the protocol does not report it.
    """

    at: float
    node_id: str
    call: int
    num_tokens: int = 1


@dataclass(slots=True, eq=False)
class AnswerReading:
    """One answer with `num_choices` expected choices.

    `troubles` is what the client saw besides tokens, in order. `model` is the one that was asked,
    empty where nodes have one. `refused`: it failed before it began, and the router said when to ask again.
    """

    kind: str
    turn: int = 0
    num_choices: int = 1
    generation_id: str = ""
    router: int = 0
    calls: int = 0
    node_id: str = ""
    choices: dict[int, ChoiceRead] = field(default_factory=dict)
    num_lost: int = 0
    num_repeated: int = 0
    prompt_tokens: int = 0
    completion_tokens: int = 0
    arrivals: list[TokenArrival] = field(default_factory=list)
    troubles: list[str] = field(default_factory=list)
    broken_at: list[float] = field(default_factory=list)
    failure: str = ""
    refused: bool = False
    model: str = ""
    _next: dict[int, int] = field(default_factory=dict)

    @property
    def age_s(self) -> float:
        """Returns the time since its first token; 0 before."""
        return time.monotonic() - self.arrivals[0].at if self.arrivals else 0.0

    @property
    def complete(self) -> bool:
        return len(self.choices) == self.num_choices and all(choice.reason for choice in self.choices.values())

    @property
    def num_tokens(self) -> int:
        return sum(len(choice.tokens) for choice in self.choices.values())

    @property
    def next_index(self) -> dict[int, int]:
        """Returns the first unseen index of each choice: where a client attaches."""
        return dict(self._next)

    def take(self, piece: Piece) -> None:
        """Takes what arrived and checks its index."""
        expected = self._next.get(piece.choice, 0)
        self.num_lost += max(0, piece.first_index - expected)
        repeated = min(len(piece.tokens), max(0, expected - piece.first_index))
        self.num_repeated += repeated
        read = self.choices.setdefault(piece.choice, ChoiceRead())
        read.tokens += piece.tokens[repeated:]
        read.logprobs += piece.logprobs[repeated:]
        read.text += piece.text
        self.num_repeated += sum(read.take_call(call) for call in piece.calls)
        self._next[piece.choice] = max(expected, piece.first_index + len(piece.tokens))
        self.node_id = piece.node_id or self.node_id
        if piece.tokens:
            self.arrivals.append(TokenArrival(time.monotonic(), piece.node_id, self.calls, len(piece.tokens)))

    def finished(self, choice: int, reason: str) -> None:
        """Ends a choice. One that ends again with another reason counts as repeated."""
        read = self.choices.setdefault(choice, ChoiceRead())
        if read.reason and read.reason != reason:
            self.num_repeated += 1
        read.reason = reason

    def broke(self, what: str) -> None:
        """Records that the stream ended before the answer did."""
        self.troubles.append(what)
        self.broken_at.append(time.monotonic())
