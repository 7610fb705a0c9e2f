"""One request of the laboratory, or several in a session, whatever the face."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from ryzanstein.lab.clients.forms import AnswerForm


@dataclass(frozen=True, slots=True)
class LoadQuestion:
    """One request.

    `turns` are the user's messages in one session, in order; a single one has no session.
    `sampling` are fields of SamplingParams. `face` is "grpc", "sse" (server-sent events) or "websocket".
    `call_s`: the client's timeout for a stream. `model` is empty where nodes have one model. `form` is
    what the answer has to look like.
    """

    kind: str
    turns: tuple[str, ...]
    sampling: Mapping[str, Any] = field(default_factory=dict)
    face: str = "grpc"
    call_s: float = 60.0
    model: str = ""
    form: AnswerForm | None = None

    @property
    def in_session(self) -> bool:
        return len(self.turns) > 1

    def to(self, model: str) -> LoadQuestion:
        """Returns the same question to another model, as another kind."""
        return replace(self, kind=f"{model}-{self.kind}", model=model)
