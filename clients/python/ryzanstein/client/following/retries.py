"""When a client tries again, at which router, and when it gives up."""

from __future__ import annotations

import random
from dataclasses import dataclass

from ryzanstein.client import errors
from ryzanstein.client.following.reasons import Action, Rule, rule_of
from ryzanstein.client.following.routers import RouterChoice
from ryzanstein.errors import Code, RyzansteinError

_FIRST_WAIT_S, _LONGEST_WAIT_S = 0.05, 2.0
_DOUBLINGS = 6


@dataclass(frozen=True, slots=True)
class Bounds:
    """What ends a call. `deadline` is of the monotonic clock, other values are seconds.

    `patience_s`: how long no router may answer and, without a deadline, how long refusals may follow one another.
    `busy_wait_s`: how long another request in the same session may take. `stall_s`: how long a router may be silent in the
    middle of an answer, where there is another one.
    """

    deadline: float | None = None
    patience_s: float = 30.0
    busy_wait_s: float = 10.0
    stall_s: float = 10.0


class Retries:
    """The failures of one call. Waits are drawn between nothing and a bound that doubles with each failure in a row
    ("full jitter"), and are never below what the server asks for."""

    def __init__(self, routers: RouterChoice, bounds: Bounds, rng: random.Random) -> None:
        self._routers, self._bounds, self._rng = routers, bounds, rng
        self._in_a_row = 0
        self._trouble_since = self._silent_since = self._busy_since = -1.0
        self._tried_once = False
        self._unknown_to: set[str] = set()

    def heard(self, router: str) -> None:
        """A router answered with what was asked for: all is well."""
        if self._in_a_row:
            self._in_a_row = 0
            self._trouble_since = self._silent_since = self._busy_since = -1.0
            self._unknown_to.clear()
        self._routers.answered(router)

    def failed(self, error: RyzansteinError, router: str, now: float, *, begun: bool) -> float:
        """Returns the seconds after which to try again, at `routers.current`.

        Raises the error as one of the client's where it is not to be tried again. The reason is empty where the transport
        failed.
        """
        rule = rule_of(error)
        action = rule.attach if begun else rule.begin
        if self._trouble_since < 0:
            self._trouble_since = now
        if rule.error is errors.RouterUnreachable:
            self._note_silence(error, router, now)
        else:
            self._silent_since = -1.0
            self._routers.answered(router)
        self._may_go_on(action, error, rule, router, now)
        if action in (Action.NEXT, Action.LOST):
            self._routers.leave(router, now)
        wait_s = self._wait(error)
        if self._bounds.deadline is not None and now + wait_s >= self._bounds.deadline:
            raise rule.error.of(error)
        return wait_s

    def _wait(self, error: RyzansteinError) -> float:
        longest_s = min(_LONGEST_WAIT_S, _FIRST_WAIT_S * 2 ** min(self._in_a_row, _DOUBLINGS))
        self._in_a_row += 1
        return max(error.retry_after_s or 0.0, self._rng.uniform(0.0, longest_s))

    def _note_silence(self, error: RyzansteinError, router: str, now: float) -> None:
        self._routers.failed(router, now, error.message)
        if self._silent_since < 0:
            self._silent_since = now
        if now - self._silent_since >= self._bounds.patience_s:
            failures = "; ".join(f"{address}: {why}" for address, why in sorted(self._routers.failures.items()))
            raise errors.RouterUnreachable(f"no router answers: {failures}"[:1024], Code.UNAVAILABLE, Code.UNAVAILABLE.name)

    def _may_go_on(self, action: Action, error: RyzansteinError, rule: Rule, router: str, now: float) -> None:
        match action:
            case Action.RAISE:
                gives_up = True
            case Action.LOST:
                self._unknown_to.add(router)
                gives_up = set(self._routers.addresses) - set(self._routers.failures) <= self._unknown_to
            case Action.BUSY:
                self._busy_since = now if self._busy_since < 0 else self._busy_since
                gives_up = now - self._busy_since >= self._bounds.busy_wait_s
            case Action.ONCE:
                gives_up, self._tried_once = self._tried_once or not self._in_time(error, now), True
            case Action.SAME | Action.NEXT:
                impatient = now - self._trouble_since >= self._bounds.patience_s
                gives_up = impatient and self._bounds.deadline is None and rule.error is not errors.RouterUnreachable
        if gives_up:
            raise rule.error.of(error)

    def _in_time(self, error: RyzansteinError, now: float) -> bool:
        deadline = self._bounds.deadline
        expected_s = float(error.metadata.get("expected_s", "inf"))
        return deadline is None or now + (error.retry_after_s or 0.0) + expected_s < deadline
