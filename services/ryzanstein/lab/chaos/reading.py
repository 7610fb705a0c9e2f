"""What one client saw of one answer, with every index checked on arrival: the laboratory's evidence.

Knows no transport. A gap in the indices is a lost token, an index that was there already a repeated one; both are counted where
they happen, so that a later stream cannot hide them.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class Piece:
    """What one message brought of one choice. `node_id` empty: the protocol does not say."""

    choice: int
    first_index: int
    tokens: Sequence[int | str]
    text: str = ""
    logprobs: Sequence[float] = ()
    node_id: str = ""


@dataclass(slots=True)
class ChoiceRead:
    """One choice as it arrived. `tokens` are ids over gRPC; the tokens' strings over HTTP, which has no ids."""

    tokens: list[int | str] = field(default_factory=list)
    text: str = ""
    logprobs: list[float] = field(default_factory=list)
    reason: str = ""


@dataclass(frozen=True, slots=True)
class TokenArrival:
    """When tokens came (time.monotonic()), from which node (empty: the protocol does not say) and on which call."""

    at: float
    node_id: str
    call: int


@dataclass(slots=True, eq=False)
class AnswerReading:
    """One answer. `num_choices` are expected. `troubles` is what the client saw besides tokens, in order."""

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
    _next: dict[int, int] = field(default_factory=dict)

    @property
    def age_s(self) -> float:
        """Since its first token; 0 before."""
        return time.monotonic() - self.arrivals[0].at if self.arrivals else 0.0

    @property
    def complete(self) -> bool:
        return len(self.choices) == self.num_choices and all(choice.reason for choice in self.choices.values())

    @property
    def num_tokens(self) -> int:
        return sum(len(choice.tokens) for choice in self.choices.values())

    @property
    def next_index(self) -> dict[int, int]:
        """The first index that was not seen, by choice: where a client attaches."""
        return dict(self._next)

    def take(self, piece: Piece) -> None:
        """Takes what arrived and judges its index."""
        expected = self._next.get(piece.choice, 0)
        self.num_lost += max(0, piece.first_index - expected)
        repeated = min(len(piece.tokens), max(0, expected - piece.first_index))
        self.num_repeated += repeated
        read = self.choices.setdefault(piece.choice, ChoiceRead())
        read.tokens += piece.tokens[repeated:]
        read.logprobs += piece.logprobs[repeated:]
        read.text += piece.text
        self._next[piece.choice] = max(expected, piece.first_index + len(piece.tokens))
        self.node_id = piece.node_id or self.node_id
        if piece.tokens:
            self.arrivals.append(TokenArrival(time.monotonic(), piece.node_id, self.calls))

    def finished(self, choice: int, reason: str) -> None:
        """A choice that finishes again, otherwise than before, is a repetition too."""
        read = self.choices.setdefault(choice, ChoiceRead())
        if read.reason and read.reason != reason:
            self.num_repeated += 1
        read.reason = reason

    def broke(self, what: str) -> None:
        """The stream ended before the answer did."""
        self.troubles.append(what)
        self.broken_at.append(time.monotonic())
