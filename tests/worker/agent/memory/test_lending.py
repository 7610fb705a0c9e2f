"""The lending of KV memory between engines that come and go."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable
from typing import Any, cast

from ryzanstein.worker.agent.memory.lending import KvLending
from ryzanstein.worker.engine.messages import EngineStats, SetBlockLimit
from ryzanstein.worker.supervision.group import EngineGroup
from ryzanstein.worker.supervision.messages import RankReady


class Version:
    """A version of a model, and the limits that were sent to its engine, which obeys at once."""

    def __init__(self, demand: int) -> None:
        self.limits = [160]
        self._demand = demand

    @property
    def stats(self) -> EngineStats:
        held = min(self._demand, self.limits[-1])
        return EngineStats(0, 0, held, 0, 0, 0, 0, 0, 0, block_limit=self.limits[-1], blocks_wanted=self._demand - held)

    def send(self, message: SetBlockLimit) -> None:
        self.limits.append(message.num_blocks)


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(10):
        while not condition():  # noqa: ASYNC110 - engines tell nobody
            await asyncio.sleep(0.001)


def join(lending: KvLending, version: Version) -> None:
    ready: Any = RankReady(0, 4096, 160, 16, 4, {}, max_blocks=320, block_bytes=10)
    lending.join(version, cast(EngineGroup, version), [ready])


async def test_what_lost_ranks_borrowed_returns_to_its_owner_when_they_have_ended() -> None:
    lending = KvLending(0.001)
    running = asyncio.create_task(lending.run())
    borrower, owner = Version(demand=1000), Version(demand=0)
    join(lending, borrower)
    join(lending, owner)
    await until(lambda: owner.limits[-1] == 10)
    await until(lambda: borrower.limits[-1] == 310)
    lending.lose(borrower)
    for _ in range(20):
        lending.round()
    await asyncio.sleep(0.05)
    assert owner.limits[-1] == 10, "its memory may still be in use"
    lending.free(borrower)
    await until(lambda: owner.limits[-1] == 160)
    running.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        await running
