"""The control plane of the orchestrator that leads; none while it stands by.

Each term has a control plane of its own, which reads the store when the term begins. What an earlier
leader wrote later is refused by the store.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Protocol

import structlog

from ryzanstein.errors import RyzansteinError
from ryzanstein.leaders.epochs import LeaderEpoch
from ryzanstein.orchestrator.config import OrchestratorSettings
from ryzanstein.orchestrator.control import ControlPlane
from ryzanstein.orchestrator.leading.campaign import Campaign
from ryzanstein.orchestrator.leading.election import Tenure
from ryzanstein.orchestrator.leading.term import LeasedTerm
from ryzanstein.orchestrator.state.stored import StateStore, not_leader
from ryzanstein.orchestrator.telemetry import OrchestratorTelemetry
from ryzanstein.process.background import STOP

log = structlog.get_logger(__name__)

_LOOK_S = 0.1


class Leadership(Protocol):
    """What serves RPCs. Keep `run` running; cancel and await it before `close`."""

    @property
    def control(self) -> ControlPlane:
        """The control plane. Raises NOT_LEADER, with the leader's address where it is known."""
        ...

    async def run(self) -> None: ...

    async def close(self) -> None: ...


class SoleLeadership:
    """An orchestrator that is alone leads until it ends: also when another one has taken its store."""

    def __init__(self, control: ControlPlane) -> None:
        self.control = control

    async def run(self) -> None:
        await self.control.run()

    async def close(self) -> None:
        await (self.control.abandon() if self.control.over else self.control.close())


class ElectedLeadership:
    """An orchestrator that leads while it holds the lease."""

    def __init__(
        self,
        settings: OrchestratorSettings,
        store: StateStore,
        telemetry: OrchestratorTelemetry,
        campaign: Campaign,
        now: Callable[[], float],
    ) -> None:
        self._settings, self._store, self._telemetry = settings, store, telemetry
        self._campaign, self._now = campaign, now
        self._control: ControlPlane | None = None

    @property
    def control(self) -> ControlPlane:
        if self._control is None or self._control.over:
            seen = self._campaign.election.seen
            raise not_leader(seen.address if seen.holder != self._campaign.election.leader_id else "")
        return self._control

    def fenced(self, epoch: int) -> None:
        """Called when the store refuses a write, because of a later leader's."""
        self._campaign.election.outranked(LeaderEpoch(epoch))
        self._campaign.tell()

    async def run(self) -> None:
        campaigning = self._telemetry.background.supervise("campaign", self._campaign.run, STOP)
        try:
            while True:
                if (tenure := self._campaign.election.tenure) is not None:
                    await self._lead(tenure)
                await self._campaign.changed(_LOOK_S)
        finally:
            campaigning.cancel()
            await asyncio.gather(campaigning, return_exceptions=True)

    async def close(self) -> None:
        control, self._control = self._control, None
        if control is not None:
            await (control.abandon() if control.over else self._closed(control))
        await self._campaign.close()

    async def _closed(self, control: ControlPlane) -> None:
        """Writes what is left, before another orchestrator leads."""
        try:
            await control.close()
        except RyzansteinError as error:
            log.warning("members not stored", error=str(error))

    async def _lead(self, tenure: Tenure) -> None:
        """Leads until the tenure is over. When the control plane cannot be built, another orchestrator may try."""
        election = self._campaign.election
        term = LeasedTerm(election, tenure, self._now)
        try:
            self._control = await ControlPlane.restore(self._settings, self._store, self._telemetry, term)
        except RyzansteinError as error:
            log.error("cannot lead without the store", epoch=tenure.leader.epoch, error=str(error))
            election.step_down()
            self._campaign.tell()
            return
        self._telemetry.terms.inc()
        log.info("leading", epoch=tenure.leader.epoch, leader_id=tenure.leader.leader_id)
        clockwork = self._telemetry.background.supervise("clock", self._control.run, STOP)
        try:
            while not term.over:
                await self._campaign.changed(_LOOK_S)
        finally:
            clockwork.cancel()
            await asyncio.gather(clockwork, return_exceptions=True)
        log.warning("leading no more", epoch=tenure.leader.epoch)
        self._campaign.tell()
        control, self._control = self._control, None
        await control.abandon()
        self._telemetry.forget_cluster()
