"""Keeps a group of ranks running: starts it, and starts another when it is lost, sooner or later.

The first restart comes at once; each further one that did not lead to a stable group waits twice as long. After
`crash_limit` in a row the node counts as failed, and goes on trying slowly. A model that is refused is not tried again.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Coroutine, Sequence
from dataclasses import dataclass
from typing import Protocol

import structlog

from ryzanstein.worker.ranks.group import GroupBounds, GroupEvents, RankGroup, RankLoss, RanksLost, RanksRefused
from ryzanstein.worker.ranks.messages import RankReady, RankSpec
from ryzanstein.worker.ranks.process import RANK_COMMAND

log = structlog.get_logger(__name__)


@dataclass(frozen=True, slots=True)
class Backoff:
    """Seconds between restarts. A group that lived `stable_s` clears the count of crashes."""

    first_s: float = 0.25
    longest_s: float = 30.0
    stable_s: float = 10.0
    crash_limit: int = 5

    def delay_s(self, crashes: int) -> float:
        """Before the restart after so many crashes in a row."""
        if crashes <= 1:
            return 0.0
        return self.longest_s if crashes >= self.crash_limit else min(self.longest_s, self.first_s * 2.0 ** (crashes - 2))


class RankListener(Protocol):
    """Whoever uses the ranks. Called in the loop; must not block."""

    def on_ready(self, group: RankGroup, ranks: Sequence[RankReady]) -> None:
        """The ranks serve; `group` takes messages until `on_lost`."""
        ...

    def on_lost(self, loss: RankLoss) -> None:
        """They do not any more, whatever was submitted is gone; a restart follows. Also when a start failed."""
        ...

    def on_failed(self, reason: str) -> None:
        """The model is refused, or the ranks crash again and again."""
        ...


class Supervisor:
    """`run` until cancelled; then no rank is left."""

    def __init__(
        self,
        spec: RankSpec,
        bounds: GroupBounds,
        backoff: Backoff,
        listener: RankListener,
        events: GroupEvents,
        *,
        command: Sequence[str] = RANK_COMMAND,
    ) -> None:
        self._spec, self._bounds, self._backoff = spec, bounds, backoff
        self._listener, self._events, self._command = listener, events, command
        self._crashes = 0

    async def run(self) -> None:
        """Returns only when the model is refused."""
        while True:
            group = RankGroup(self._spec, self._bounds, self._events, command=self._command)
            graceful = True
            try:
                loss = await self._live(group)
                graceful = False
                self._mourn(loss)
            except RanksRefused as refusal:
                log.error("model refused", model=self._spec.model, reason=str(refusal))
                self._listener.on_failed(str(refusal))
                return
            finally:
                await _to_the_end(group.end(graceful=graceful))
            await asyncio.sleep(self._backoff.delay_s(self._crashes))

    async def _live(self, group: RankGroup) -> RankLoss:
        """From start to loss."""
        try:
            ranks = await group.start()
        except RanksLost as lost:
            self._crashes += 1
            return lost.loss
        began = time.monotonic()
        self._listener.on_ready(group, ranks)
        loss = await group.lost
        self._crashes = 1 if time.monotonic() - began > self._backoff.stable_s else self._crashes + 1
        return loss

    def _mourn(self, loss: RankLoss) -> None:
        log.error("ranks lost", rank=loss.rank, cause=loss.cause.value, reason=loss.message, crashes=self._crashes)
        self._listener.on_lost(loss)
        if self._crashes >= self._backoff.crash_limit:
            self._listener.on_failed(f"{self._crashes} crashes in a row, the last: {loss.message}")


async def _to_the_end(ending: Coroutine[None, None, None]) -> None:
    """Not even a cancellation leaves processes behind; it takes effect afterwards."""
    task = asyncio.create_task(ending)
    try:
        await asyncio.shield(task)
    except asyncio.CancelledError:
        await task
        raise
