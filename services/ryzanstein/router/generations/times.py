"""When a generation passed each stage of its way, and how long it paused between tokens."""

from __future__ import annotations

import time
from dataclasses import dataclass

STAGES = ("admission", "session", "choose", "accept", "first_token")


@dataclass(slots=True)
class GenerationTimes:
    """Times are seconds of `time.monotonic`; 0: not yet.

    It arrived at the core, was admitted, was submitted when its turn in the session was open, was first sent to a node, was
    first accepted by one, and had its first token and its last one so far. `longest_pause_s` is the longest time between two
    tokens, while it ran.
    """

    arrived_at: float = 0.0
    admitted_at: float = 0.0
    submitted_at: float = 0.0
    sent_at: float = 0.0
    accepted_at: float = 0.0
    first_token_at: float = 0.0
    last_token_at: float = 0.0
    longest_pause_s: float = 0.0

    def __post_init__(self) -> None:
        self.arrived_at = self.arrived_at or time.monotonic()

    def submitted(self) -> None:
        """Records that all before the nodes is done. A generation of another router arrives, so to speak, here."""
        self.submitted_at = self.last_token_at = time.monotonic()
        self.admitted_at = self.admitted_at or self.arrived_at

    def stages_s(self) -> dict[str, float]:
        """Returns how long each stage took that is over, in order. They add up to the wait for the first token."""
        began_at, stages = self.arrived_at, {}
        ends = (self.admitted_at, self.submitted_at, self.sent_at, self.accepted_at, self.first_token_at)
        for stage, ended_at in zip(STAGES, ends, strict=True):
            if not ended_at:
                break
            stages[stage] = ended_at - began_at
            began_at = ended_at
        return stages
