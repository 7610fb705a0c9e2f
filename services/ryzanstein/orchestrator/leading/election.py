"""Decides whether this orchestrator leads. Plain Python on an injected clock.

Safety does not rest on it: nodes, routers and the store compare epochs. It keeps two leaders from
acting at one time while clocks run at rates that differ by no more than 15 %. It knows no wall clock,
and no clock of another machine: a standby measures for how long it has seen no change.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from enum import Enum

from ryzanstein.leaders.epochs import LeaderEpoch
from ryzanstein.orchestrator.leading.lease import LeaseRecord, LeaseTimes

_MOST_DOUBTS = 5
_DOUBT_S = 60.0


@dataclass(slots=True)
class Tenure:
    """The time for which this orchestrator leads. It acts until `acts_until`, which renewals move."""

    leader: LeaderEpoch
    keeps_until: float
    acts_until: float


class _Kind(Enum):
    ACQUIRE = "acquire"
    RENEW = "renew"
    RAISE = "raise"
    RISE = "rise"
    """As RAISE, by one who leads and goes on."""


@dataclass(frozen=True, slots=True)
class LeaseWrite:
    """A record to write in place of the one that was seen."""

    seen: LeaseRecord
    record: LeaseRecord
    kind: _Kind

    @property
    def renews(self) -> bool:
        return self.kind in (_Kind.RENEW, _Kind.RISE)


class Election:
    """The candidacy of one orchestrator.

    Whoever drives it asks the provider for what `wanted` returns, and reports what came of it with
    `written` or `read`. `now` includes the time in which this process did not run.
    """

    def __init__(self, leader_id: str, address: str, now: Callable[[], float], times: LeaseTimes | None = None) -> None:
        self.leader_id, self._address, self._now = leader_id, address, now
        self.times = times or LeaseTimes()
        self.seen = LeaseRecord()
        """The record as it was last read or written."""
        self._unchanged_since: float | None = None
        self._highest = 0
        self._raises = self._resigned = False
        self._rises_above = 0
        self._doubts = 0.0
        self._doubted_at = now()
        self._tenure: Tenure | None = None

    @property
    def tenure(self) -> Tenure | None:
        """The present tenure; None: this orchestrator does not lead, or may not act any more. One that is over stays so."""
        if self._tenure is not None and self._now() >= self._tenure.acts_until:
            self._tenure = None
        return self._tenure

    @property
    def highest(self) -> int:
        """The highest epoch that was heard of."""
        return self._highest

    @property
    def runs_out_in_s(self) -> float:
        """After how many seconds the lease may be taken if nothing changes."""
        since = self._now() if self._unchanged_since is None else self._unchanged_since
        return max(0.0, since + self.times.lease_s - self._now())

    def wanted(self) -> LeaseWrite | None:
        """Returns what to write now; None: read the record."""
        if self._unchanged_since is None or self._resigned:
            return None
        if self.tenure is not None:
            if self._rises_above:
                return LeaseWrite(self.seen, replace(self.seen, epoch=self._rises_above + 1), _Kind.RISE)
            return LeaseWrite(self.seen, self.seen, _Kind.RENEW)
        if self._raises:
            return LeaseWrite(self.seen, replace(self.seen, epoch=max(self.seen.epoch, self._highest)), _Kind.RAISE)
        if self._is_released or self._now() - self._unchanged_since >= self.times.lease_s:
            epoch = max(self.seen.epoch, self._highest) + 1
            return LeaseWrite(self.seen, LeaseRecord("", self.leader_id, self._address, epoch), _Kind.ACQUIRE)
        return None

    def written(self, write: LeaseWrite, record: LeaseRecord, started: float) -> None:
        """Notes that a record was written, by a call that started then, and its version."""
        released = self._is_released
        self._note(record)
        tenure, acts_until = self.tenure, started + self.times.act_s
        if write.kind is _Kind.RAISE:
            self._raises = False
        elif write.kind is _Kind.RISE and tenure is not None:
            self._rises_above = 0
            keeps_until = self._now() + self.times.keep_released_s
            self._tenure = Tenure(LeaderEpoch(record.epoch, self.leader_id), keeps_until, acts_until)
        elif write.renews and tenure is not None and tenure.leader.epoch == record.epoch:
            tenure.acts_until = acts_until
        elif write.kind is _Kind.ACQUIRE and not self._resigned:
            if self._highest > record.epoch:
                self._raises = True  # a peer told of a later leader meanwhile
                return
            keeps_until = self._now() + (self.times.keep_released_s if released else self.times.keep_s)
            self._rises_above = 0
            self._tenure = Tenure(LeaderEpoch(record.epoch, self.leader_id), keeps_until, acts_until)

    def read(self, record: LeaseRecord) -> None:
        """Notes the record as it is now. A leader that finds another one, or none, leads no more."""
        tenure = self._tenure
        risen = record.epoch == self._rises_above + 1  # by a write whose answer was lost
        if tenure is not None and (record.holder != self.leader_id or not (risen or record.epoch == tenure.leader.epoch)):
            self._tenure = None
            self._rises_above = 0
        self._note(record)

    def doubted(self, known: LeaderEpoch) -> None:
        """A peer says that it knows a later leader: the provider lost writes, or the peer errs, or lies.

        The next renewal finds out whether this one still leads. If so, a new tenure begins above that epoch, which lets nodes
        keep what they have at first. Peers can do that a few times, then once a minute.
        """
        now = self._now()
        self._doubts = max(0.0, self._doubts - (now - self._doubted_at) / _DOUBT_S)
        self._doubted_at = now
        if self._doubts <= _MOST_DOUBTS - 1 and self._tenure is not None and known.epoch >= self._tenure.leader.epoch:
            self._doubts += known.epoch > self._rises_above
            self._rises_above = max(self._rises_above, known.epoch)

    def outranked(self, known: LeaderEpoch) -> None:
        """Ends the tenure: a later leader has written to the store. The next epoch must be above that one."""
        self._highest = max(self._highest, known.epoch)
        if self._tenure is not None:
            self._tenure = None
            self._raises = self.seen.holder == self.leader_id

    def resign(self) -> LeaseWrite | None:
        """Stands no more. Returns what to write so that no standby needs to wait; None: there is nothing to give back."""
        tenure, self._tenure, self._resigned = self.tenure, None, True
        return None if tenure is None else LeaseWrite(self.seen, replace(self.seen, holder="", address=""), _Kind.RAISE)

    def step_down(self) -> None:
        """Ends the tenure: this orchestrator cannot do what a leader must. It stands again after the length of a lease."""
        self._tenure = None
        self._unchanged_since = self._now()

    @property
    def _is_released(self) -> bool:
        return bool(self.seen.version) and not self.seen.holder

    def _note(self, record: LeaseRecord) -> None:
        if self._unchanged_since is None or record != self.seen:
            self.seen, self._unchanged_since = record, self._now()
        self._raises = self._raises and record.holder == self.leader_id
        self._highest = max(self._highest, record.epoch)
