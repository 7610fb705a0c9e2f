"""One answer as the load generator reads it: every token is counted and checked.

The first token and the delays are timed.
"""

from __future__ import annotations

import time
from collections.abc import Callable

from google.protobuf.message import DecodeError

from ryzanstein.lab.bench.router.scripted.script import WORD, Script, age_s, stamp
from ryzanstein.v1 import inference_pb2 as inference

_PREFIX_BYTES = 5


class AnswerStream:
    """A `Stream` of one scripted answer.

    `problem` is empty exactly when it had every token once, in order, and its end; otherwise "reason: details".
    """

    def __init__(self, script: Script, on_end: Callable[[AnswerStream], None]) -> None:
        self.opened_at = time.monotonic()
        self.first_token_at: float | None = None
        self.tokens = 0
        self.messages = 0
        self.delays_s: list[float] = []
        self.problem = ""
        self._script = script
        self._on_end = on_end
        self._unread = b""
        self._finished = False

    def data(self, payload: bytes) -> None:
        """Takes gRPC messages (a flag, a length, the message) in pieces as they arrive."""
        unread, at = self._unread + payload, 0
        while len(unread) - at >= _PREFIX_BYTES:
            end = at + _PREFIX_BYTES + int.from_bytes(unread[at + 1 : at + _PREFIX_BYTES])
            if end > len(unread):
                break
            self._message(unread[at + _PREFIX_BYTES : end])
            at = end
        self._unread = unread[at:]

    def ended(self, problem: str) -> None:
        if not self.problem:
            self.problem = f"{problem}, after {self.tokens} tokens" if problem and self.tokens else problem or self._missing()
        self._on_end(self)

    def _missing(self) -> str:
        if self.tokens != self._script.tokens:
            return f"tokens are missing: {self.tokens} of {self._script.tokens} received"
        return "" if self._finished else "no final message"

    def _message(self, message: bytes) -> None:
        try:
            event = inference.StreamChatResponse.FromString(message).event
        except DecodeError:
            self.problem = self.problem or "a message cannot be decoded"
            return
        if event.HasField("delta"):
            self._delta(event.delta)
        elif event.HasField("finished"):
            self._finished = True

    def _delta(self, delta: inference.GenerationDelta) -> None:
        if delta.first_index != self.tokens:
            self.problem = self.problem or f"a wrong index: {delta.first_index} came after {self.tokens} tokens"
        if delta.text != WORD * len(delta.token_ids):
            self.problem = self.problem or f"a wrong text: at index {delta.first_index}"
        if self.first_token_at is None:
            self.first_token_at = time.monotonic()
        self.tokens += len(delta.token_ids)
        self.messages += 1
        self.delays_s.append(age_s(delta.token_ids[0], stamp()))
