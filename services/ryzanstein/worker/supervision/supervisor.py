"""Keeps an engine group running: restarts it after a loss, as the recovery ladder says.

A refused model is not tried again.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
import time
from collections.abc import Coroutine, Sequence
from typing import Any, Protocol

import structlog

from ryzanstein.worker.supervision.autopsy import AUTOPSY_S, Autopsy, examine
from ryzanstein.worker.supervision.group import EngineFactory, EngineGroup, RankLoss, RanksLost, RanksRefused
from ryzanstein.worker.supervision.messages import RankReady
from ryzanstein.worker.supervision.recovery import Ladder, Recovery, RecoveryPolicy, Rung

log = structlog.get_logger(__name__)


class RankListener(Protocol):
    """The user of the ranks. Called in the loop; must not block."""

    def on_ready(self, group: EngineGroup, ranks: Sequence[RankReady]) -> None:
        """The ranks are ready; `group` takes messages until `on_lost`."""
        ...

    def on_lost(self, loss: RankLoss, recovery: Recovery) -> None:
        """The ranks are lost, and whatever was submitted is gone; `recovery` says what follows.

        Also called when a start failed.
        """
        ...

    def on_examined(self, autopsy: Autopsy) -> None:
        """What lost ranks did is known. Not called where that takes too long."""
        ...

    def on_ended(self) -> None:
        """The processes of a lost group have ended: their memory is free."""
        ...

    def on_failed(self, reason: str) -> None:
        """The model is refused."""
        ...


class Supervisor:
    """A supervisor of one group at a time. `run` runs until cancelled; then no rank is left."""

    def __init__(self, engines: EngineFactory, policy: RecoveryPolicy, listener: RankListener, logger: Any = log) -> None:
        self._engines, self._log = engines, logger
        self._listener = listener
        self._ladder = Ladder(policy, time.monotonic)
        self._revived = asyncio.Event()
        self._served = False
        self.starting: EngineGroup | None = None
        """The group that is being started."""
        self.sleeps = False
        """Whether the model will be started again after the end of `run`, see `EngineFactory.close`."""

    def revive(self) -> None:
        """Clears the record after an operator repaired the node, and ends a pause at once."""
        self._ladder.reset()
        self._revived.set()

    async def run(self) -> None:
        """Keeps ranks running until cancelled; returns only when the model is refused."""
        try:
            await self._run()
        finally:
            await _to_the_end(self._engines.close(sleeps=self.sleeps))

    async def _run(self) -> None:
        while True:
            group = self._engines.make()
            graceful = True
            try:
                loss = await self._live(group)
                graceful = False
                recovery = self._lost(loss)
                await self._examine(group, loss)
            except RanksRefused as refusal:
                self._log.error("model refused", model=self._engines.model, reason=str(refusal))
                self._listener.on_failed(str(refusal))
                return
            finally:
                await _to_the_end(group.end(graceful=graceful))
            self._listener.on_ended()
            await self._engines.lost(loss, served=self._served)
            await self._pause(recovery.pause_s)

    async def _live(self, group: EngineGroup) -> RankLoss:
        """Runs a group from its start to its loss."""
        self._served = False
        self.starting = group
        try:
            ranks = await group.start()
        except RanksLost as lost:
            return lost.loss
        finally:
            self.starting = None
        self._served = True
        self._ladder.serves()
        self._listener.on_ready(group, ranks)
        return await group.lost

    def _lost(self, loss: RankLoss) -> Recovery:
        recovery = self._ladder.lost(loss)
        text = {"rank": loss.rank, "cause": loss.cause.value, "reason": loss.message, "rung": recovery.rung.value}
        self._log.error("ranks lost", pause_s=None if recovery.rung is Rung.DRAIN else recovery.pause_s, **text)
        self._listener.on_lost(loss, recovery)
        return recovery

    async def _examine(self, group: EngineGroup, loss: RankLoss) -> None:
        """Records what a lost group did, while its processes live. What ran there has failed over already."""
        try:
            async with asyncio.timeout(AUTOPSY_S):
                autopsy = await examine(group, loss)
        except TimeoutError:
            self._log.warning("lost ranks not examined", reason=f"it took longer than {AUTOPSY_S:g} s")
            return
        except Exception:  # evidence never costs a recovery
            self._log.exception("lost ranks not examined")
            return
        self._log.error("ranks lost, what they did", **autopsy.fields)
        self._listener.on_examined(autopsy)

    async def _pause(self, pause_s: float) -> None:
        self._revived.clear()
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self._revived.wait(), None if math.isinf(pause_s) else pause_s)


async def _to_the_end(ending: Coroutine[None, None, None]) -> None:
    """Runs cleanup to its end, so that even a cancellation leaves no processes behind.

    The cancellation takes effect afterwards.
    """
    task = asyncio.create_task(ending)
    try:
        await asyncio.shield(task)
    except asyncio.CancelledError:
        await task
        raise
