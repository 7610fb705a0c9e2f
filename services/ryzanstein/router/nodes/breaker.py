"""A circuit breaker per node that distinguishes whose fault a failure is.

A client's mistake and back-pressure show that the node works: they never open the breaker. A death,
a stall or a broken transport opens it at once; other faults of the node open it after a few in a
row. After a pause, one request probes the node. The right to probe expires, so a probe whose
outcome is never reported cannot keep the breaker open.
"""

from __future__ import annotations

from collections.abc import Callable
from enum import Enum

from ryzanstein.errors import CONSTRAINT_FAILED, DEADLINE_UNREACHABLE, LOGITS_NOT_FINITE, OUT_OF_MEMORY, Code

FAULTS_IN_A_ROW = 3
FIRST_PAUSE_S = 0.5
LONGEST_PAUSE_S = 15.0
PROBE_EXPIRES_S = 10.0


class Blame(Enum):
    """Whose fault an attempt's failure is."""

    CLIENT = "client"
    BACK_PRESSURE = "back_pressure"
    REQUEST = "request"
    NODE = "node"


class BreakerState(Enum):
    CLOSED = 0
    HALF_OPEN = 1
    OPEN = 2


_BACK_PRESSURE = frozenset({Code.RESOURCE_EXHAUSTED, Code.UNAVAILABLE, Code.ABORTED})
_REQUEST = frozenset({LOGITS_NOT_FINITE, OUT_OF_MEMORY, CONSTRAINT_FAILED})
_NODE = frozenset({Code.INTERNAL, Code.UNKNOWN})


def blame(code: Code, node_fault: bool, reason: str = "") -> Blame:
    """Returns whose fault a failure is.

    A node that admits a fault is believed; otherwise the reason and the code decide. REQUEST: the
    node is healthy and cannot run this request; one other node may be tried, and no node is blamed.
    """
    if node_fault:
        return Blame.NODE
    if reason in _REQUEST:
        return Blame.REQUEST
    if code in _NODE:
        return Blame.NODE
    if reason == DEADLINE_UNREACHABLE:
        # Not the client's mistake: another node's queue may be shorter.
        return Blame.BACK_PRESSURE
    return Blame.BACK_PRESSURE if code in _BACK_PRESSURE else Blame.CLIENT


class Breaker:
    """A breaker: closed, open or half-open. `now` is any monotonic clock in seconds."""

    def __init__(self, now: Callable[[], float], on_change: Callable[[BreakerState], None]) -> None:
        self._now = now
        self._on_change = on_change
        self._faults = 0
        self._pause_s = FIRST_PAUSE_S
        self._opened_at: float | None = None
        self._probe_expires = 0.0

    @property
    def state(self) -> BreakerState:
        if self._opened_at is None:
            return BreakerState.CLOSED
        return BreakerState.OPEN if self._now() < self._opened_at + self._pause_s else BreakerState.HALF_OPEN

    @property
    def admits(self) -> bool:
        """Whether a request may go to the node now: closed, or half-open with no probe taken."""
        state = self.state
        return state is BreakerState.CLOSED or (state is BreakerState.HALF_OPEN and self._now() >= self._probe_expires)

    def sent(self) -> None:
        """Records that a request goes to the node; in half-open it is the probe."""
        if self.state is BreakerState.HALF_OPEN:
            self._probe_expires = self._now() + PROBE_EXPIRES_S
            self._on_change(BreakerState.HALF_OPEN)

    def withdrawn(self) -> None:
        """Records that a request ended for its own reasons before the node showed anything.

        If it was the probe, another request may probe.
        """
        self._probe_expires = 0.0

    def worked(self) -> None:
        """Records that the node works.

        It sent a token, or an answer that is the client's fault or back-pressure.
        """
        self._faults = 0
        if self._opened_at is not None and self.state is BreakerState.HALF_OPEN:
            self.reset()

    def fault(self) -> None:
        """Records an attempt that failed by the node's fault.

        Opens at the third in a row, or when the probe fails.
        """
        self._faults += 1
        if self._faults >= FAULTS_IN_A_ROW or self.state is BreakerState.HALF_OPEN:
            self.open()

    def open(self) -> None:
        """Opens the breaker: the node died, stalled or was cut off.

        Does nothing while open, because many requests report the same death.
        """
        if self.state is BreakerState.OPEN:
            return
        if self._opened_at is not None:
            self._pause_s = min(2 * self._pause_s, LONGEST_PAUSE_S)
        self._opened_at = self._now()
        self._probe_expires = 0.0
        self._faults = 0
        self._on_change(BreakerState.OPEN)

    def reset(self) -> None:
        """Closes the breaker: a probe succeeded, or the node is a new process."""
        self._faults = 0
        self._pause_s = FIRST_PAUSE_S
        if self._opened_at is not None:
            self._opened_at = None
            self._on_change(BreakerState.CLOSED)
