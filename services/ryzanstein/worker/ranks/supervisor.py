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

_STANDBY_DELAY_S = 2.0

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
        self._standby: RankGroup | None = None
        self._preparing: asyncio.Task[None] | None = None

    def revive(self) -> None:
        """An operator has mended the node: its past is forgotten, and a pause ends now."""
        self._ladder.reset()
        self._revived.set()

    async def run(self) -> None:
        """Returns only when the model is refused."""
        try:
            await self._run()
        finally:
            await _to_the_end(self._end_standby())

    async def _run(self) -> None:
        while True:
            group = await self._next_group()
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

    def _new_group(self) -> RankGroup:
        return RankGroup(self._spec, self._bounds, self._events, command=self._command)

    async def _next_group(self) -> RankGroup:
        """The standby, if there is one that is whole."""
        if self._preparing is not None and not self._preparing.done():
            await self._end_standby()
        standby, self._standby = self._standby, None
        if standby is not None and standby.lost.done():
            await standby.end(graceful=False)
            standby = None
        return standby or self._new_group()

    async def _prepare(self) -> None:
        """A moment after the ranks are ready, so that the first requests do not pay for it."""
        await asyncio.sleep(_STANDBY_DELAY_S)
        self._standby = self._new_group()
        await self._standby.prepare()

    async def _end_standby(self) -> None:
        if self._preparing is not None:
            self._preparing.cancel()
            await asyncio.wait([self._preparing])
        if self._standby is not None:
            await self._standby.end(graceful=False)
            self._standby = None

    async def _live(self, group: RankGroup) -> RankLoss:
        """From start to loss."""
        try:
            ranks = await group.start()
        except RanksLost as lost:
            return lost.loss
        self._ladder.serves()
        self._listener.on_ready(group, ranks)
        if self._bounds.standby and self._standby is None:
            self._preparing = asyncio.create_task(self._prepare())
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
