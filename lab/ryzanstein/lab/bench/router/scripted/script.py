"""What a scripted node generates, and what a client can check about it on its own.

Token i of every answer has the index i, the text `WORD` and, as its id, the time at which the node
generated it. So a client detects a lost or repeated token from the indices and the text, and gets
each token's delay from the id: node and client read the same clock of the same machine.
"""

from __future__ import annotations

import time
from dataclasses import dataclass

from ryzanstein.v1 import inference_pb2 as inference

MODEL = "scripted"
WORD = " word"
_CLOCK_US = 2**32  # token ids are 32 bits: the clock wraps after 71 minutes, a difference of two readings does not


def stamp() -> int:
    """Returns the monotonic clock in microseconds, as a token id."""
    return time.monotonic_ns() // 1000 % _CLOCK_US


def age_s(token_id: int, now: int) -> float:
    """Returns how long before `now`, also a stamp, the token was generated."""
    return (now - token_id) % _CLOCK_US / 1e6


@dataclass(frozen=True, slots=True)
class Script:
    """One answer: `tokens` tokens, the first at once, then one every `step_s` seconds.

    `model` may be empty where there is only one.
    """

    tokens: int
    step_s: float = 0.001
    model: str = ""

    def request(self) -> inference.StreamChatRequest:
        """Returns a request for this answer, for any system: the message is the pace."""
        return inference.StreamChatRequest(
            chat=inference.ChatRequest(
                model=self.model,
                messages=[inference.Message(role=inference.ROLE_USER, content=repr(self.step_s))],
                sampling=inference.SamplingParams(max_tokens=self.tokens),
            )
        )

    @classmethod
    def read(cls, message: inference.Message, sampling: inference.SamplingParams) -> Script:
        """Returns the script that a request describes. Raises ValueError if it is invalid."""
        return cls(sampling.max_tokens, float(message.content))
