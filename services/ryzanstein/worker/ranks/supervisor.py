"""Keeps a group of ranks running: starts it, and starts another when it is lost, as the recovery ladder says.

A model that is refused is not tried again.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
import time
from collections.abc import Coroutine, Sequence
from typing import Protocol

import structlog

from ryzanstein.worker.ranks.group import GroupBounds, GroupEvents, RankGroup, RankLoss, RanksLost, RanksRefused
from ryzanstein.worker.ranks.messages import RankReady, RankSpec
from ryzanstein.worker.ranks.process import RANK_COMMAND
from ryzanstein.worker.ranks.recovery import Ladder, Recovery, RecoveryPolicy, Rung

log = structlog.get_logger(__name__)


class RankListener(Protocol):
    """Whoever uses the ranks. Called in the loop; must not block."""

    def on_ready(self, group: RankGroup, ranks: Sequence[RankReady]) -> None:
        """The ranks serve; `group` takes messages until `on_lost`."""
        ...

    def on_lost(self, loss: RankLoss, recovery: Recovery) -> None:
        """They do not any more, whatever was submitted is gone; `recovery` says what follows. Also when a start failed."""
        ...

    def on_failed(self, reason: str) -> None:
        """The model is refused."""
        ...


class Supervisor:
    """`run` until cancelled; then no rank is left."""

    def __init__(
        self,
        spec: RankSpec,
        bounds: GroupBounds,
        policy: RecoveryPolicy,
        listener: RankListener,
        events: GroupEvents,
        *,
        command: Sequence[str] = RANK_COMMAND,
    ) -> None:
        self._spec, self._bounds = spec, bounds
        self._listener, self._events, self._command = listener, events, command
        self._ladder = Ladder(policy, time.monotonic)
        self._revived = asyncio.Event()

    def revive(self) -> None:
        """An operator has mended the node: its past is forgotten, and a pause ends now."""
        self._ladder.reset()
        self._revived.set()

    async def run(self) -> None:
        """Returns only when the model is refused."""
        while True:
            group = RankGroup(self._spec, self._bounds, self._events, command=self._command)
            graceful = True
            try:
                loss = await self._live(group)
                graceful = False
                recovery = self._mourn(loss)
            except RanksRefused as refusal:
                log.error("model refused", model=self._spec.model, reason=str(refusal))
                self._listener.on_failed(str(refusal))
                return
            finally:
                await _to_the_end(group.end(graceful=graceful))
            await self._pause(recovery.pause_s)

    async def _live(self, group: RankGroup) -> RankLoss:
        """From start to loss."""
        try:
            ranks = await group.start()
        except RanksLost as lost:
            return lost.loss
        self._ladder.serves()
        self._listener.on_ready(group, ranks)
        return await group.lost

    def _mourn(self, loss: RankLoss) -> Recovery:
        recovery = self._ladder.lost(loss)
        said = {"rank": loss.rank, "cause": loss.cause.value, "reason": loss.message, "rung": recovery.rung.value}
        log.error("ranks lost", pause_s=None if recovery.rung is Rung.DRAIN else recovery.pause_s, **said)
        self._listener.on_lost(loss, recovery)
        return recovery

    async def _pause(self, pause_s: float) -> None:
        self._revived.clear()
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self._revived.wait(), None if math.isinf(pause_s) else pause_s)


async def _to_the_end(ending: Coroutine[None, None, None]) -> None:
    """Not even a cancellation leaves processes behind; it takes effect afterwards."""
    task = asyncio.create_task(ending)
    try:
        await asyncio.shield(task)
    except asyncio.CancelledError:
        await task
        raise
