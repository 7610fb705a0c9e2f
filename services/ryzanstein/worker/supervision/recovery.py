"""The upper rungs of the recovery ladder: what to do when ranks are lost repeatedly.

Plain logic on an injected clock. The engine has the lower rungs: a step is retried smaller, a
request fails alone. The upper rungs concern the whole group. It is restarted, first at once and
then with increasing delays. A node whose ranks are lost too often is put in quarantine, where it
reports FAILED and retries slowly. A node that no quarantine has cured drains and waits for an
operator.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum

from ryzanstein.bounds import PositiveSeconds, PositiveSize, Size
from ryzanstein.worker.supervision.group import RankLoss


class Rung(Enum):
    """The rungs of the ladder, lowest first, as metrics and logs spell them."""

    RETRY_SMALLER = "retry_smaller"
    FAIL_REQUEST = "fail_request"
    RESTART_RANKS = "restart_ranks"
    QUARANTINE = "quarantine"
    DRAIN = "drain"


@dataclass(frozen=True, slots=True)
class RecoveryPolicy:
    """The policy of recovery: restarts, then quarantines, then a drain. Times are in seconds."""

    first_s: PositiveSeconds = 0.25
    """Pause before the second restart in a row, doubled for each further one; the first is at once."""
    longest_s: PositiveSeconds = 30.0
    """The longest pause between restarts."""
    stable_s: PositiveSeconds = 10.0
    """Ranks that lived so long clear the count of restarts and crashes."""
    crash_limit: PositiveSize = 5
    """Crashes in a row that lead to quarantine."""
    loss_limit: PositiveSize = 20
    """Losses within `window_s` that lead to quarantine."""
    window_s: PositiveSeconds = 600.0
    """Of `loss_limit`; so much service without a loss clears everything."""
    quarantine_s: PositiveSeconds = 30.0
    """Length of the first quarantine, doubled for each further one; a crash soon after it leads back at once."""
    longest_quarantine_s: PositiveSeconds = 600.0
    """Length of the longest quarantine."""
    quarantine_limit: Size = 5
    """Quarantines after which the node drains until an operator undrains it."""


@dataclass(frozen=True, slots=True)
class Recovery:
    """The response to a loss: `rung` after `pause_s`.

    A drain does not end on its own. `reason` is for people.
    """

    rung: Rung
    pause_s: float
    reason: str


class Ladder:
    """Decides how to continue after each loss of one node's ranks.

    It must be notified of each start and each loss. `now` is monotonic seconds.
    """

    def __init__(self, policy: RecoveryPolicy, now: Callable[[], float]) -> None:
        self._policy, self._now = policy, now
        self._losses: deque[tuple[float, int]] = deque()
        self._crashes = 0
        self._quarantines = 0
        self._serving_since: float | None = None

    def serves(self) -> None:
        """Records that the ranks are ready."""
        self._serving_since = self._now()

    def reset(self) -> None:
        """Clears the record after an operator repaired the node."""
        self._losses.clear()
        self._crashes = self._quarantines = 0

    def lost(self, loss: RankLoss) -> Recovery:
        """Returns the response to a loss of ranks, whether or not they had served."""
        served_s = self._end_of_service()
        if served_s >= self._policy.window_s:
            self.reset()
        self._crashes = 1 if served_s >= self._policy.stable_s else self._crashes + 1
        self._remember(loss)
        why = self._too_often(served_s)
        if not why:
            return Recovery(Rung.RESTART_RANKS, self._restart_pause_s(), loss.message)
        self._quarantines += 1
        reason = f"{why}; last loss: {loss.message}"
        if self._quarantines > self._policy.quarantine_limit:
            return Recovery(Rung.DRAIN, float("inf"), f"drained after {self._quarantines - 1} quarantines: {reason}")
        pause_s = min(self._policy.longest_quarantine_s, self._policy.quarantine_s * 2.0 ** (self._quarantines - 1))
        self._losses.clear()
        return Recovery(Rung.QUARANTINE, pause_s, f"quarantined for {pause_s:g} s: {reason}")

    def _end_of_service(self) -> float:
        """Returns how long these ranks had served; 0 if they never did."""
        since, self._serving_since = self._serving_since, None
        return 0.0 if since is None else self._now() - since

    def _remember(self, loss: RankLoss) -> None:
        now = self._now()
        self._losses.append((now, loss.rank))
        while self._losses[0][0] < now - self._policy.window_s:
            self._losses.popleft()

    def _too_often(self, served_s: float) -> str:
        if self._quarantines and served_s < self._policy.stable_s:
            return "ranks lost again right after a quarantine"
        if self._crashes >= self._policy.crash_limit:
            return f"{self._crashes} crashes in a row"
        if len(self._losses) >= self._policy.loss_limit:
            ranks = [rank for _, rank in self._losses]
            worst = max(set(ranks), key=lambda rank: (ranks.count(rank), -rank))
            return f"{len(ranks)} losses within {self._policy.window_s:g} s, {ranks.count(worst)} of them of rank {worst}"
        return ""

    def _restart_pause_s(self) -> float:
        return 0.0 if self._crashes <= 1 else min(self._policy.longest_s, self._policy.first_s * 2.0 ** (self._crashes - 2))
