"""Where a client looks for the orchestrator that leads."""

from __future__ import annotations

import time
from collections.abc import Callable

_PASSED_OVER_S = 10.0


class OrchestratorAddresses:
    """Chooses the orchestrator that a client tries next: the leader that one of them named, else each in turn.

    A silent orchestrator is skipped for a while, even if another names it as the leader. `now` is monotonic seconds.
    """

    def __init__(self, addresses: str, now: Callable[[], float] = time.monotonic) -> None:
        """`addresses` are host:port, with commas between them."""
        self._given = [each.strip() for each in addresses.split(",") if each.strip()] or [addresses]
        self._now = now
        self._at = 0
        self._named = ""
        self._tried: set[str] = set()
        self._silent: dict[str, float] = {}
        self.several = len(self._given) > 1
        """Whether there is more than one, as far as is known."""

    @property
    def current(self) -> str:
        return self._named or self._given[self._at]

    def answered(self) -> None:
        """Notes that the current one leads."""
        self._tried.clear()
        self._silent.pop(self.current, None)

    def failed(self, leader: str = "", *, silent: bool = False) -> bool:
        """Notes that the current one does not lead and names this one, or does not answer. Returns whether to try on now."""
        self._tried.add(self.current)
        if silent:
            self._silent[self.current] = self._now() + _PASSED_OVER_S
        self._silent = {address: until for address, until in self._silent.items() if until > self._now()}
        if leader and leader not in self._tried and leader not in self._silent:
            self._named, self.several = leader, True
            return True
        self._named = ""
        for step in range(1, len(self._given) + 1):
            at = (self._at + step) % len(self._given)
            if self._given[at] not in self._silent:
                break
        self._at = at
        if self._given[at] not in self._tried:
            return True
        self._tried.clear()
        return False
