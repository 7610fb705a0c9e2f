"""Distinguishes an attempt that its node has forgotten from one that waits its turn.

A node may beat, step and answer all other requests while one request never returns: its submit was
lost, or its sequence is stuck. No failure detector for nodes sees that. Waiting in a queue is
different: while others wait at the node, an attempt without a token is forgotten only when attempts
that were sent after it have begun. An attempt that ran and was preempted has been overtaken before,
which means nothing: it waits as long as the node has a queue. Plain logic, called with each attempt
from time to time.
"""

from __future__ import annotations

from dataclasses import dataclass

from ryzanstein.bounds import PositiveSeconds
from ryzanstein.cluster import Load

_PREFILL_TOKEN_S = 0.05  # for each token of a prompt that is computed slowly


@dataclass(frozen=True, slots=True)
class Quiet:
    """An attempt that has produced nothing since `since` (monotonic seconds).

    `num_uncomputed` tokens come before its next one, at most; None when it is not even accepted.
    `overtaken` means that an attempt that was sent to the node later has begun. `preempted` means
    that it ran and its node made it wait again.
    """

    since: float
    num_uncomputed: int | None
    load: Load
    overtaken: bool = False
    preempted: bool = False


@dataclass(frozen=True, slots=True)
class AttemptPatience:
    """How long an attempt may produce nothing, in seconds."""

    accept_s: PositiveSeconds = 5.0
    """Until the node has accepted it."""
    silence_s: PositiveSeconds = 20.0
    """Until a token, and between tokens, on a node without a queue that works for others."""

    def bound_s(self, quiet: Quiet) -> float:
        """Returns how long such an attempt may produce nothing.

        The time is longer with a queue, and for a prompt that is not computed yet.
        """
        if quiet.num_uncomputed is None:
            return self.accept_s
        queue = quiet.load.waiting / max(1, quiet.load.capacity)
        return self.silence_s * (1 + queue) + _PREFILL_TOKEN_S * quiet.num_uncomputed

    def waits(self, quiet: Quiet) -> bool:
        """Returns whether the attempt was preempted and its node has a queue."""
        return quiet.preempted and quiet.load.waiting > 0

    def left_s(self, quiet: Quiet, now: float) -> float:
        """Returns the seconds until the next check. 0 or less: the attempt is forgotten."""
        left_s = quiet.since + self.bound_s(quiet) - now
        queued = quiet.num_uncomputed is not None and quiet.load.waiting > 0 and not quiet.overtaken
        return max(left_s, self.accept_s) if queued else left_s
