"""Where a request is that has not ended: what a service finds when it is asked. No prompts, no answers."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from enum import Enum

MAX_FOUND = 1000


class RequestStage(Enum):
    """How far a request has come; the numbers are those of the wire."""

    WAITING = 1
    """No node has it."""
    SENT = 2
    """A node has it and has not accepted it."""
    QUEUED = 3
    """The node has it and has not begun it."""
    PREFILL = 4
    """Accepted; its attempt has no token."""
    DECODE = 5
    STORING = 6
    """All tokens are there; its turn in the session is being stored."""
    PAUSED = 7
    """Nobody reads it."""
    ADMITTING = 8
    """It is no generation yet: it waits for what its tenant may use, for its key, or for its session."""
    EMBEDDING = 9
    """Nodes make its vectors."""


@dataclass(frozen=True, slots=True)
class FoundRequest:
    """Where a request is. `age_s` is since it came, `silent_s` since it moved last; `tokens` of all choices.

    `prefilled` tokens of its prompt were computed; `ahead` queued requests came before it; `step` is the
    one that the ranks began last.
    """

    request_id: str
    generation_id: str
    model: str
    stage: RequestStage
    age_s: float
    silent_s: float
    attempt: int
    node_id: str
    tokens: int
    prompt_tokens: int = 0
    prefilled: int = 0
    ahead: int = 0
    step: int = 0


@dataclass(frozen=True, slots=True)
class RequestQuery:
    """Which requests to find. An empty id stands for all; one of the HTTP API ends with its generation's."""

    id: str = ""
    older_than_s: float = 0.0

    def finds(self, found: FoundRequest) -> bool:
        named = not self.id or self.id in (found.request_id, found.generation_id) or self.id.endswith(found.generation_id)
        return named and found.age_s >= self.older_than_s

    def of(self, requests: Iterable[FoundRequest]) -> list[FoundRequest]:
        """Returns the oldest of those that it finds, oldest first."""
        found = sorted((each for each in requests if self.finds(each)), key=lambda each: -each.age_s)
        return found[:MAX_FOUND]
