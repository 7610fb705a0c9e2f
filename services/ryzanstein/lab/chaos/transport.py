"""What a client needs of a protocol: begin a generation or attach to it, on one connection of its own."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from ryzanstein.lab.chaos.questions import LoadQuestion
from ryzanstein.lab.chaos.reading import AnswerReading


@dataclass(frozen=True, slots=True)
class RouterAddress:
    """Both faces of a router."""

    grpc: str
    http_host: str
    http_port: int


@dataclass(frozen=True, slots=True)
class Request:
    """One turn of a question, ready to be asked."""

    question: LoadQuestion
    turn: int
    session_id: str
    user: str

    @property
    def text(self) -> str:
        return self.question.turns[self.turn]


class Transport(Protocol):
    """One client's way to the routers."""

    async def follow(self, request: Request, reading: AnswerReading, progress: Callable[[], None]) -> None:
        """Begins the generation, or attaches to it when the reading has its id; returns when the stream ends.

        Fills the reading and calls `progress` after each event. RyzansteinError: what the router said, or that the
        connection failed (its reason is its code's name then).
        """
        ...

    async def leave(self) -> None:
        """Closes the connection, in the middle of a stream too: `follow` raises then."""
        ...
