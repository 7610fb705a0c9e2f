"""The right to act: the term of one leader, with the epoch by which nodes, routers and the store fence it."""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import Callable
from typing import Protocol

import structlog

from ryzanstein import errors
from ryzanstein.leaders.epochs import LeaderEpoch
from ryzanstein.orchestrator.leading.election import Election, Tenure
from ryzanstein.orchestrator.state.stored import StateStore, not_leader
from ryzanstein.orchestrator.telemetry import OrchestratorTelemetry

log = structlog.get_logger(__name__)

MOST_AHEAD = 2**20
"""A report of an epoch that is further ahead is refused: a few of them would use up all numbers."""


class Term(Protocol):
    """What a control plane asks before it acts."""

    @property
    def leader(self) -> LeaderEpoch:
        """Who leads in this term."""
        ...

    @property
    def keeping(self) -> bool:
        """Whether nodes must only be told to keep what they have: instructions of a leader before may still reach them."""
        ...

    @property
    def replaceable(self) -> bool:
        """Whether there may be others, so that watchers must notice when this one falls silent."""
        ...

    @property
    def over(self) -> bool:
        """Whether the term has ended."""
        ...

    def check(self) -> None:
        """Raises NOT_LEADER when the term is over."""
        ...

    async def outranked(self, known: LeaderEpoch) -> None:
        """Called when a peer knows a leader after which it may not follow this one. Raises STALE_LEADER, or the epoch."""
        ...


class SoleTerm:
    """The term of an orchestrator that is alone. It ends only if another one writes to its store. Begin it with `begin`."""

    def __init__(self, store: StateStore, telemetry: OrchestratorTelemetry, leader: LeaderEpoch) -> None:
        self._store, self._telemetry = store, telemetry
        self._leader = leader
        self._raising = asyncio.Lock()
        self._over = False
        telemetry.epoch.set(leader.epoch)
        telemetry.leader.set(1)
        telemetry.terms.inc()

    @classmethod
    async def begin(cls, store: StateStore, telemetry: OrchestratorTelemetry) -> SoleTerm:
        """Returns a new term, one epoch after the last."""
        return cls(store, telemetry, LeaderEpoch(await store.next_epoch(), uuid.uuid4().hex))

    @property
    def leader(self) -> LeaderEpoch:
        return self._leader

    @property
    def keeping(self) -> bool:
        return False

    @property
    def replaceable(self) -> bool:
        return False

    @property
    def over(self) -> bool:
        return self._over

    def check(self) -> None:
        if self._over:
            raise not_leader(why="another orchestrator writes to the store")

    def fenced(self, epoch: int) -> None:
        """Ends the term: somebody started a second orchestrator on the same store, without an election."""
        if not self._over:
            log.error(
                "another orchestrator writes to the store, this one serves no more", epoch=self._leader.epoch, other=epoch
            )
        self._over = True
        self._telemetry.leader.set(0)

    async def outranked(self, known: LeaderEpoch) -> None:
        """Raises the epoch above the one that a peer knows: the store was lost, or is an older copy."""
        check_known(known, self._leader)
        async with self._raising:
            if self._leader.is_stale_after(known):
                before = self._leader.epoch
                self._leader = LeaderEpoch(await self._store.next_epoch(known.epoch), self._leader.leader_id)
                self._telemetry.epoch.set(self._leader.epoch)
                log.warning(
                    "a peer knows a later leader, epoch raised", before=before, known=known.epoch, now=self._leader.epoch
                )


class LeasedTerm:
    """The term of a tenure: it ends when the lease is not renewed, or a peer knows a later leader."""

    def __init__(self, election: Election, tenure: Tenure, now: Callable[[], float]) -> None:
        self._election, self._tenure, self._now = election, tenure, now

    @property
    def leader(self) -> LeaderEpoch:
        return self._tenure.leader

    @property
    def keeping(self) -> bool:
        return self._now() < self._tenure.keeps_until

    @property
    def replaceable(self) -> bool:
        return True

    @property
    def over(self) -> bool:
        return self._election.tenure is not self._tenure

    def check(self) -> None:
        if self.over:
            raise not_leader(why="this orchestrator does not lead any more")

    async def outranked(self, known: LeaderEpoch) -> None:
        check_known(known, self._tenure.leader)
        if not self.over:
            log.warning("a peer knows a later leader, asking for the lease again", epoch=self.leader.epoch, known=known.epoch)
            self._election.doubted(known)
        raise errors.failed_precondition("STALE_LEADER", f"epoch {known.epoch} is known, this one is {self.leader.epoch}")


def check_known(known: LeaderEpoch, own: LeaderEpoch) -> None:
    """Checks a report. Raises INVALID_ARGUMENT when no orchestrator of this cluster can have had the epoch."""
    if known.epoch > own.epoch + MOST_AHEAD:
        raise errors.invalid("known_epoch", f"must be at most {MOST_AHEAD} ahead of the leader's, {own.epoch}", known.epoch)
