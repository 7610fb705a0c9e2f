"""How long a server may send nothing before it counts as hung. Plain logic.

Its health says nothing: servers whose engine hangs answer 200. What it computes does not show either,
so two measurements stand for it: the time between an answer's tokens, and that of prompts by their
length. While a prompt computes, other answers may wait for it.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable

from ryzanstein.worker.supervision.watchdog import StallBounds

_GAPS = 512
_PROMPTS = 64
_SLOWER = 4.0
"""Prompts may take so many times as long as the slowest of the last ones, token by token."""
_TOKEN_S = 0.002
"""A token of a prompt may take so long at least: the last prompts may all have been cached."""
_KNOWN = 3
"""From so many prompts on their pace is known."""


class Silence:
    """The silence of a server. Call `observe` a few times a second."""

    def __init__(self, bounds: StallBounds, prefill_s: float, interval_s: float) -> None:
        self._bounds, self._prefill_s, self._interval_s = bounds, prefill_s, interval_s
        self._gaps: deque[float] = deque(maxlen=_GAPS)
        self._prompts: deque[float] = deque(maxlen=_PROMPTS)
        self._seen = -1
        self._observed_s: float | None = None
        self.silent_s = 0.0

    def token(self, gap_s: float) -> None:
        """Records a token that came so long after the one before it in its answer."""
        self._gaps.append(gap_s)

    def prompt(self, duration_s: float, num_tokens: int) -> None:
        """Records a first token. What the server had cached of its prompt may not be known: that makes it look fast."""
        self._prompts.append(duration_s / max(1, num_tokens))

    def bound_s(self, prompts: Iterable[int]) -> float:
        """Returns how long nothing may come while prompts of so many tokens are computed."""
        decode_s = max(self._bounds.min_s, self._bounds.factor * _p99(self._gaps))
        longest = max(prompts, default=0)
        if not longest:
            return decode_s
        least_s = self._prefill_s if len(self._prompts) < _KNOWN else _TOKEN_S * longest
        return max(decode_s, least_s, _SLOWER * max(self._prompts, default=0.0) * longest)

    def observe(self, now: float, num_parts: int, prompts: Iterable[int], *, pending: bool) -> bool:
        """Returns whether the silence is too long. `num_parts` were received so far; `pending`: more are due.

        Time without observation, because this process stood still, does not count.
        """
        passed_s = 0.0 if self._observed_s is None else min(now - self._observed_s, 2 * self._interval_s)
        self._observed_s = now
        if num_parts != self._seen or not pending:
            self._seen, self.silent_s = num_parts, 0.0
            return False
        self.silent_s += passed_s
        return self.silent_s >= self.bound_s(prompts)


def _p99(values: deque[float]) -> float:
    return sorted(values)[int(0.99 * (len(values) - 1))] if values else 0.0
