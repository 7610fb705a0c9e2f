"""What a client needs of a protocol: begin a generation or attach to it, on its own connection."""

from __future__ import annotations

import ssl
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Protocol

from ryzanstein.lab.clients.question import LoadQuestion
from ryzanstein.lab.clients.reading import AnswerReading


@dataclass(frozen=True, slots=True)
class RouterAddress:
    """Both faces of a router, and the key that it asks for, if any. `roots`: its CA in PEM form; empty: it has no TLS."""

    grpc: str
    http_host: str
    http_port: int
    key: str = field(default="", repr=False)
    roots: bytes = field(default=b"", repr=False)

    @property
    def credential(self) -> dict[str, str]:
        """Returns the headers, or metadata, of a request."""
        return {"authorization": f"Bearer {self.key}"} if self.key else {}

    @property
    def tls(self) -> ssl.SSLContext | None:
        """Returns what HTTP and WebSockets connect with; None: nothing."""
        return ssl.create_default_context(cadata=self.roots.decode()) if self.roots else None


@dataclass(frozen=True, slots=True)
class Request:
    """One turn of a question, ready to send."""

    question: LoadQuestion
    turn: int
    session_id: str
    user: str

    @property
    def text(self) -> str:
        return self.question.turns[self.turn]


class Transport(Protocol):
    """One client's connection to the routers."""

    async def follow(self, request: Request, reading: AnswerReading, progress: Callable[[], None]) -> None:
        """Begins the generation, or attaches to it if the reading has its id.

        Returns when the stream ends.

        Fills the reading and calls `progress` after each event. Raises RyzansteinError with the
        router's error, or if the connection failed (the reason is then the code's name).
        """
        ...

    async def leave(self) -> None:
        """Closes the connection, even in mid-stream: `follow` then raises."""
        ...
