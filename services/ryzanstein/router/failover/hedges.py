"""Limits how many generations may have a hedge at once.

Each generation on a slow node requests a hedge. Without a bound a slow cluster would get twice its
work when it can bear it least (Dean and Barroso, The Tail at Scale, 2013, bound their hedges for
the same reason).
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass
from typing import Annotated

from pydantic import Field

from ryzanstein.bounds import Size
from ryzanstein.router.telemetry import RouterTelemetry

# A node that is late now may be on time at its next beat.
_SOON_S = 0.05


@dataclass(frozen=True, slots=True)
class HedgePolicy:
    """How many hedges may run at once. Both 0: none."""

    share: Annotated[float, Field(ge=0, le=1)] = 0.25
    """Of the running generations."""
    least: Size = 8
    """Hedges that may always run."""


@dataclass(frozen=True, slots=True)
class _Waiter:
    wanted: Callable[[], bool]
    again: Callable[[], None]


class HedgeBudget:
    """The hedges of one router. `take` one, `give` it back; a refused caller may `wait`."""

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
        """Gives a hedge back. The longest waiter that still wants one is notified to look again."""
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
        """Calls `again` once, when there is room and `wanted` returns True.

        Each key has one wait.
        """
        self._waiting[key] = _Waiter(wanted, again)

    def wait_for_node(self, key: object, wanted: Callable[[], bool], again: Callable[[], None]) -> None:
        """Waits like `wait`, for a caller that found no node for its hedge: it looks again soon.

        One timer serves all waiters.
        """
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
