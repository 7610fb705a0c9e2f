"""What both clients return of sessions and structured answers."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Generic, TypeVar

from ryzanstein.client.answer import Answer
from ryzanstein.v1 import inference_pb2 as pb

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Parsed(Generic[T]):
    """A structured answer, and what it says."""

    value: T
    answer: Answer


@dataclass(frozen=True, slots=True)
class SessionView:
    """A session. `messages` is empty in lists; `node` is empty before the first answer."""

    session: str
    model: str
    created: datetime
    updated: datetime
    messages: Sequence[pb.Message]
    node: str

    @classmethod
    def of(cls, session: pb.Session) -> SessionView:
        created, updated = (each.ToDatetime(UTC) for each in (session.create_time, session.update_time))
        return cls(session.session_id, session.model, created, updated, list(session.messages), session.node_id)


def new_session_id() -> str:
    return f"session-{os.urandom(16).hex()}"
