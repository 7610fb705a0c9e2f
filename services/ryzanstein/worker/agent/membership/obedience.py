"""Which answers of an orchestrator a node may obey.

A leader that was stopped and runs again does not know yet that another leads. What it answered before
may lie in a socket meanwhile, so the age of an answer counts from the beat that it answers, by the
node's own clock, which includes the time in which the node did not run.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable

from ryzanstein.clock import boot_s

VOID_AFTER_S = 3.0
_MOST_OPEN = 1024


class LateAnswers:
    """The beats of one stream that are not answered yet, and when each was made."""

    def __init__(self, now: Callable[[], float] = boot_s) -> None:
        self._now = now
        self._last = 0
        self._sent: OrderedDict[int, float] = OrderedDict()

    def sent(self) -> int:
        """Records a beat and returns its number, from 1."""
        self._last += 1
        self._sent[self._last] = self._now()
        if len(self._sent) > _MOST_OPEN:
            self._sent.popitem(last=False)
        return self._last

    def are_void(self, sequence: int) -> bool:
        """Returns whether an answer comes too late, or answers nothing. 0: an older orchestrator, which does not say."""
        if not sequence:
            return False
        sent_at = self._sent.get(sequence)
        while self._sent and next(iter(self._sent)) <= sequence:
            self._sent.popitem(last=False)
        return sent_at is None or self._now() - sent_at > VOID_AFTER_S
