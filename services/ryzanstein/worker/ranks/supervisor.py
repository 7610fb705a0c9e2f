"""Keeps a group of ranks running: restarts it after a loss, as the recovery ladder says.

A refused model is not tried again.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
import time
from collections.abc import Coroutine, Sequence
from typing import Protocol

import structlog

from ryzanstein.worker.ranks.forking import RANK_COMMAND, ForkServer
from ryzanstein.worker.ranks.group import GroupBounds, GroupEvents, LossCause, RankGroup, RankLoss, RanksLost, RanksRefused
from ryzanstein.worker.ranks.messages import RankReady, RankSpec
from ryzanstein.worker.ranks.process import thread_environment
from ryzanstein.worker.ranks.recovery import Ladder, Recovery, RecoveryPolicy, Rung
from ryzanstein.worker.ranks.source import NewRankServer, RankServer

log = structlog.get_logger(__name__)


class RankListener(Protocol):
    """The user of the ranks. Called in the loop; must not block."""

    def on_ready(self, group: RankGroup, ranks: Sequence[RankReady]) -> None:
        """The ranks are ready; `group` takes messages until `on_lost`."""
        ...

    def on_lost(self, loss: RankLoss, recovery: Recovery) -> None:
        """The ranks are lost, and whatever was submitted is gone; `recovery` says what follows.

        Also called when a start failed.
        """
        ...

    def on_failed(self, reason: str) -> None:
        """The model is refused."""
        ...


class Supervisor:
    """A supervisor of one group at a time. `run` runs until cancelled; then no rank is left."""

    def __init__(
        self,
        spec: RankSpec,
        bounds: GroupBounds,
        policy: RecoveryPolicy,
        listener: RankListener,
        events: GroupEvents,
        *,
        command: Sequence[str] = RANK_COMMAND,
        new_server: NewRankServer = ForkServer,
    ) -> None:
        self._spec, self._bounds = spec, bounds
        self._listener, self._events, self._command = listener, events, command
        self._make_server = new_server
        self._ladder = Ladder(policy, time.monotonic)
        self._revived = asyncio.Event()
        self._server: RankServer | None = None
        self._came_up = False

    def revive(self) -> None:
        """Clears the record after an operator repaired the node, and ends a pause at once."""
        self._ladder.reset()
        self._revived.set()

    async def run(self) -> None:
        """Keeps ranks running until cancelled; returns only when the model is refused."""
        try:
            await self._run()
        finally:
            await _to_the_end(self._close_server())

    async def _run(self) -> None:
        while True:
            server = self._server = self._server or self._new_server()
            group = RankGroup(self._spec, self._bounds, self._events, server)
            graceful = True
            try:
                loss = await self._live(group)
                graceful = False
                recovery = self._lost(loss)
            except RanksRefused as refusal:
                log.error("model refused", model=self._spec.model, reason=str(refusal))
                self._listener.on_failed(str(refusal))
                return
            finally:
                await _to_the_end(group.end(graceful=graceful))
            if server.lost.done() or self._is_doubtful(loss):
                await self._close_server()
                self._server = self._new_server()  # before the pause, so that it imports meanwhile
            await self._pause(recovery.pause_s)

    def _new_server(self) -> RankServer:
        return self._make_server(self._command, thread_environment(self._spec), self._spec.nice)

    async def _close_server(self) -> None:
        if self._server is not None:
            await self._server.close()
            self._server = None

    def _is_doubtful(self, loss: RankLoss) -> bool:
        """Returns whether the server may be at fault.

        Ranks start with a copy of its memory, whatever has happened to that.
        """
        return not self._came_up or loss.cause is LossCause.UNSOUND

    async def _live(self, group: RankGroup) -> RankLoss:
        """Runs a group from its start to its loss."""
        self._came_up = False
        try:
            ranks = await group.start()
        except RanksLost as lost:
            return lost.loss
        self._came_up = True
        self._ladder.serves()
        self._listener.on_ready(group, ranks)
        return await group.lost

    def _lost(self, loss: RankLoss) -> Recovery:
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
    """Runs cleanup to its end, so that even a cancellation leaves no processes behind.

    The cancellation takes effect afterwards.
    """
    task = asyncio.create_task(ending)
    try:
        await asyncio.shield(task)
    except asyncio.CancelledError:
        await task
        raise
