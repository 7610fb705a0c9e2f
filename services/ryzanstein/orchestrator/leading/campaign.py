"""Keeps an election going: renews the lease as the leader, looks at it as a standby, gives it back at the end."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import structlog

from ryzanstein.orchestrator.leading.election import Election, LeaseWrite, Tenure
from ryzanstein.orchestrator.leading.lease import LeaseProvider, LeaseUnavailableError
from ryzanstein.orchestrator.telemetry import OrchestratorTelemetry

log = structlog.get_logger(__name__)

_AGAIN_S = 0.2
"""Between two tries of a renewal that failed."""


class Campaign:
    """Drives the election with a provider. Keep `run` running; wait for `changed`; end it with `close`."""

    def __init__(
        self, election: Election, provider: LeaseProvider, telemetry: OrchestratorTelemetry, now: Callable[[], float]
    ) -> None:
        self.election = election
        self._provider, self._telemetry, self._now = provider, telemetry, now
        self._woken = asyncio.Event()
        self._known: Tenure | None = None
        self._reachable = True

    async def run(self) -> None:
        """Runs until cancelled."""
        times = self.election.times
        while True:
            started = self._now()
            succeeded = await self._step()
            self.tell()
            if self.election.tenure is None:
                pause_s = min(times.poll_s, self.election.runs_out_in_s or times.poll_s)
            else:
                pause_s = times.renew_s - (self._now() - started) if succeeded else _AGAIN_S
            await asyncio.sleep(max(pause_s, 0.01))

    async def changed(self, timeout_s: float) -> None:
        """Returns when the tenure may have changed, or after this time."""
        try:
            async with asyncio.timeout(timeout_s):
                await self._woken.wait()
        except TimeoutError:
            return
        self._woken.clear()

    def tell(self) -> None:
        """Wakes who waits for a change if there is one, and shows it."""
        tenure = self.election.tenure
        self._telemetry.leader.set(tenure is not None)
        self._telemetry.epoch.set(self.election.highest)
        if tenure is not self._known:
            self._known = tenure
            self._woken.set()

    async def close(self) -> None:
        """Gives the lease back, if it is held. Call it after `run` was cancelled."""
        if (write := self.election.resign()) is not None:
            try:
                async with asyncio.timeout(self.election.times.renew_s):
                    await self._provider.replace(write.seen, write.record)
            except (TimeoutError, LeaseUnavailableError) as error:
                log.warning("lease not given back, it will run out", error=str(error) or type(error).__name__)
        self.tell()
        await self._provider.close()

    async def _step(self) -> bool:
        """Asks the provider once; returns whether it answered."""
        write = self.election.wanted()
        try:
            async with asyncio.timeout(self.election.times.renew_s):
                await (self._look() if write is None else self._write(write))
        except (TimeoutError, LeaseUnavailableError) as error:
            self._failed(write, str(error) or "no answer in time")
            return False
        if not self._reachable:
            log.info("lease service reached again")
        self._reachable = True
        return True

    def _failed(self, write: LeaseWrite | None, why: str) -> None:
        if write is not None and write.renews:
            self._telemetry.renewals_failed.inc()
        if self._reachable:
            log.warning("lease service unavailable", error=why)
        self._reachable = False

    async def _look(self) -> None:
        self.election.read(await self._provider.read())

    async def _write(self, write: LeaseWrite) -> None:
        started = self._now()
        written = await self._provider.replace(write.seen, write.record)
        if written is None:
            await self._look()
        else:
            self.election.written(write, written, started)
