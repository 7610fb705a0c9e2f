"""How long each stage of an attempt takes on a node, and what the ranks spend its steps on."""

from __future__ import annotations

import time
from dataclasses import dataclass

from ryzanstein.worker.supervision.group import RankProgress
from ryzanstein.worker.telemetry.attempt_metrics import AttemptMetrics


@dataclass(slots=True)
class AttemptTimes:
    """The times of one attempt, in monotonic seconds; 0: not yet.

    It began in the queue, was computed from the begin of its first step on, and had its first token. It moved last when it was
    accepted, a part of its prompt was computed, or a token came. `first_step` is the first step's number, `lead` what rank 0
    had done when it ended.
    """

    metrics: AttemptMetrics
    began_s: float = 0.0
    computed_s: float = 0.0
    first_token_s: float = 0.0
    moved_s: float = 0.0
    num_prefilled: int = 0
    first_step: int = 0
    lead: RankProgress | None = None

    def __post_init__(self) -> None:
        self.began_s = self.began_s or time.monotonic()

    def computed(self, step: int, step_s: float, lead: RankProgress | None) -> None:
        """Records the first step in which a part of it was computed. That step is over."""
        self.computed_s = max(self.began_s, time.monotonic() - step_s)
        self.first_step, self.lead = step, lead
        self.metrics.queue.observe(self.computed_s - self.began_s)

    def moved(self) -> None:
        """Records that something of it went on."""
        self.moved_s = time.monotonic()

    def prefilled(self, num_computed: int) -> None:
        """Records that so many tokens of its prompt are computed."""
        self.num_prefilled = num_computed
        self.moved()

    def first_token(self) -> None:
        self.first_token_s = time.monotonic()
        self.metrics.first_token.observe(self.first_token_s - self.began_s)
        self.metrics.prefill.observe(self.first_token_s - self.computed_s)

    def ended(self, step: int, lead: RankProgress | None) -> dict[str, float]:
        """Observes the rest at the attempt's end. Returns what its time was spent on, as fields of a log line.

        Its steps are those that the ranks ran from its first one on, with or without it.
        """
        now = time.monotonic()
        fields = {"duration_s": now - self.began_s, "queue_s": (self.computed_s or now) - self.began_s}
        if self.computed_s:
            fields["prefill_s"] = (self.first_token_s or now) - self.computed_s
        if self.first_token_s:
            fields["decode_s"] = now - self.first_token_s
            self.metrics.decode.observe(now - self.first_token_s)
        if (share := _collective_share(self.lead, lead)) is not None:
            fields["collective_share"] = share
        rounded = {name: round(value, 6) for name, value in fields.items()}
        return {**rounded, "steps": step - self.first_step + 1} if self.computed_s else rounded


def _collective_share(before: RankProgress | None, now: RankProgress | None) -> float | None:
    """Returns the share of rank 0's steps in between that it spent in collectives; None: it cannot be known."""
    if before is None or now is None or before.pid != now.pid:
        return None
    in_collectives_s = now.collectives_s - before.collectives_s
    in_steps_s = in_collectives_s + now.compute_s - before.compute_s + now.tail_s - before.tail_s
    return in_collectives_s / in_steps_s if in_steps_s > 0 and in_collectives_s >= 0 else None
