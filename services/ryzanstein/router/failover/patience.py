"""Distinguishes an attempt that its node has forgotten from one that waits its turn.

A node may beat, step and answer all other requests while one request never returns: its submit was
lost, or its sequence is stuck. No failure detector for nodes sees that. Waiting in a queue is
different: while others wait at the node, an attempt without a token is forgotten only when attempts
that were sent after it have begun. Plain logic, called with each attempt from time to time.
"""

from __future__ import annotations

from dataclasses import dataclass

from ryzanstein.cluster import Load

_PREFILL_TOKEN_S = 0.05  # for each token of a prompt that is computed slowly


@dataclass(frozen=True, slots=True)
class Quiet:
    """An attempt that has produced nothing since `since` (monotonic seconds).

    `prompt_tokens` is None when it is not even accepted. `begun` means that it had produced a token
    before. `overtaken` means that an attempt that was sent to the node later has begun.
    """

    since: float
    prompt_tokens: int | None
    begun: bool
    overtaken: bool
    load: Load


@dataclass(frozen=True, slots=True)
class Patience:
    """How long an attempt may produce nothing.

    `accept_s` is the time until the node has accepted it. `silence_s` is the time until a token,
    and between tokens, on a node without a queue.
    """

    accept_s: float = 5.0
    silence_s: float = 20.0

    def bound_s(self, quiet: Quiet) -> float:
        """Returns how long such an attempt may produce nothing.

        The time is longer with a queue, and for a prompt that is not computed yet.
        """
        if quiet.prompt_tokens is None:
            return self.accept_s
        queue = quiet.load.waiting / max(1, quiet.load.capacity)
        prompt_s = 0.0 if quiet.begun else _PREFILL_TOKEN_S * quiet.prompt_tokens
        return self.silence_s * (1 + queue) + prompt_s

    def left_s(self, quiet: Quiet, now: float) -> float:
        """Returns the seconds until the next check. 0 or less: the attempt is forgotten."""
        left_s = quiet.since + self.bound_s(quiet) - now
        queued = quiet.prompt_tokens is not None and quiet.load.waiting > 0 and not quiet.overtaken
        return max(left_s, self.accept_s) if queued else left_s
