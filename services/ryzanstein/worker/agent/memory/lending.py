"""Applies `kv_shares` to the engines of this node: reads what they use, sends them their limits."""

from __future__ import annotations

import asyncio
from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from typing import Protocol

import structlog

from ryzanstein.worker.agent.memory.kv_shares import KvMember, KvShares, KvUse
from ryzanstein.worker.engine.messages import EngineStats, SetBlockLimit
from ryzanstein.worker.supervision.group import EngineGroup
from ryzanstein.worker.supervision.messages import RankReady

log = structlog.get_logger(__name__)

_OVERDRAWN_S = 5.0


class Borrower(Hashable, Protocol):
    """A version of a model with its engine's last statistics; see `version.ModelVersion`."""

    @property
    def stats(self) -> EngineStats: ...


@dataclass(frozen=True, slots=True)
class _Engine:
    """The ranks of a version that takes part."""

    version: Borrower
    group: EngineGroup


class KvLending:
    """The lending of KV memory between the versions of models that this node serves.

    `run` it as a task; `interval_s` is how often limits change.
    """

    def __init__(self, interval_s: float) -> None:
        self._interval_s = interval_s
        self._shares = KvShares()
        self._engines: dict[Hashable, _Engine] = {}
        self._company = asyncio.Event()

    def join(self, version: Borrower, group: EngineGroup, ranks: Sequence[RankReady]) -> None:
        """Takes part with ranks that are ready, before any work is sent to them."""
        lead = ranks[0]
        if lead.without_lending or not lead.max_blocks:
            return
        member = KvMember(lead.num_blocks, lead.max_blocks, lead.block_bytes * len(ranks))
        self._engines[version] = _Engine(version, group)
        limit = self._shares.join(version, member)
        if limit < lead.num_blocks:
            group.send(SetBlockLimit(limit))
        if len(self._engines) > 1:
            self._company.set()

    def lose(self, version: Borrower) -> None:
        """Records that the ranks are lost and are being ended: nothing of theirs is lent before `free`."""
        self._engines.pop(version, None)
        self._shares.lose(version)

    def free(self, version: Borrower) -> None:
        """Records that lost ranks, which may be restarted, have ended. Their own memory stays reserved."""
        self._shares.free(version)
        self._company.set()  # for one round, even if only one engine is left

    def leave(self, version: Borrower) -> None:
        """Records that the ranks have ended and their memory is free."""
        self._engines.pop(version, None)
        self._shares.leave(version)

    async def settled(self) -> None:
        """Returns when nothing is lent that belonged to a model which has left, or after some seconds."""
        try:
            async with asyncio.timeout(_OVERDRAWN_S):
                while self._shares.overdrawn_bytes:  # noqa: ASYNC110 (`run` changes it)
                    await asyncio.sleep(self._interval_s)
        except TimeoutError:
            log.warning("lent memory is not back", overdrawn_bytes=self._shares.overdrawn_bytes)

    def borrowed_bytes(self, version: Borrower) -> int:
        return self._shares.borrowed_bytes(version)

    def lent_bytes(self, version: Borrower) -> int:
        return self._shares.lent_bytes(version)

    async def run(self) -> None:
        """Moves memory between the models until cancelled; sleeps while there is only one."""
        while True:
            await self._company.wait()
            self.round()
            if len(self._engines) < 2 and not self._shares.overdrawn_bytes:
                self._company.clear()
            await asyncio.sleep(self._interval_s)

    def round(self) -> None:
        """Reads what the engines use, and sends them new limits."""
        for key, engine in self._engines.items():
            stats = engine.version.stats
            self._shares.report(key, KvUse(stats.block_limit, stats.blocks_held, stats.blocks_wanted))
        for key, limit in self._shares.round().items():
            self._engines[key].group.send(SetBlockLimit(limit))
