"""How many generations may have a backup beside their first attempt at once.

A slow node makes each of its generations ask for a backup. Without a bound a slow cluster would be given twice its work at
the moment at which it can bear it least (Dean and Barroso, The Tail at Scale, 2013, bound their hedges for the same reason).
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass

from ryzanstein.router.telemetry import RouterTelemetry

# A node that is late now may be punctual at its next beat.
_SOON_S = 0.05


@dataclass(frozen=True, slots=True)
class HedgePolicy:
    """At most `share` of the running generations, and always `least`."""

    share: float = 0.25
    least: int = 8


@dataclass(frozen=True, slots=True)
class _Waiter:
    wanted: Callable[[], bool]
    again: Callable[[], None]


class HedgeBudget:
    """The hedges of one router. `take` one, `give` it back; who was refused may `wait`."""

    def __init__(self, policy: HedgePolicy, running: Callable[[], int], telemetry: RouterTelemetry) -> None:
        self._policy = policy
        self._running = running
        self._telemetry = telemetry
        self._taken = 0
        self._waiting: dict[object, _Waiter] = {}
        self._timer: asyncio.TimerHandle | None = None

    @property
    def room(self) -> int:
        return max(self._policy.least, int(self._policy.share * self._running())) - self._taken

    def take(self) -> bool:
        if self.room <= 0:
            self._telemetry.hedges.labels("over_budget").inc()
            return False
        self._set(self._taken + 1)
        return True

    def give(self) -> None:
        """Whoever waits longest and still wants it is told to look again."""
        self._set(self._taken - 1)
        self._tell()

    def _tell(self) -> None:
        notified = 0
        while self._waiting and notified < self.room:
            waiter = self._waiting.pop(next(iter(self._waiting)))
            if waiter.wanted():
                notified += 1
                waiter.again()

    def wait(self, key: object, wanted: Callable[[], bool], again: Callable[[], None]) -> None:
        """`again` is called once, when there is room and `wanted` says so. One wait for each key."""
        self._waiting[key] = _Waiter(wanted, again)

    def wait_for_node(self, key: object, wanted: Callable[[], bool], again: Callable[[], None]) -> None:
        """The same for one that found no node to be its backup: it looks again soon. One timer serves all who wait."""
        self.wait(key, wanted, again)
        if self._timer is None:
            self._timer = asyncio.get_running_loop().call_later(_SOON_S, self._on_timer)

    def _on_timer(self) -> None:
        self._timer = None
        self._tell()

    def forget(self, key: object) -> None:
        self._waiting.pop(key, None)

    def _set(self, taken: int) -> None:
        self._taken = taken
        self._telemetry.hedges_running.set(taken)
