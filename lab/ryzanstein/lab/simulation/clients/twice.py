"""A request that is sent to two routers with one key: one generation runs, and both read it."""

from __future__ import annotations

import asyncio
import random

from ryzanstein.lab.simulation.checks import BrokenPromise, Checks
from ryzanstein.lab.simulation.clients.asking import Asking
from ryzanstein.lab.simulation.cluster import Cluster

_WITHIN_S = 8.0
_READABLE_S = 20.0


class Twice:
    """A request of a client, and sometimes the same one again elsewhere."""

    def __init__(self, asking: Asking, cluster: Cluster, checks: Checks) -> None:
        self._asking, self._checks = asking, checks
        rng = random.Random(f"{cluster.plan.seed} {asking.question.key} twice")
        self._later_s = rng.uniform(0.0, _WITHIN_S) if rng.random() < 0.7 else 0.0
        self._other = asking.again(rng.random()) if rng.random() < asking.plan.twice else None

    async def run(self) -> str:
        """Returns how the first one ended."""
        if self._other is None:
            return await self._asking.run()
        async with asyncio.TaskGroup() as both:
            first = both.create_task(self._asking.run())
            both.create_task(self._run_other(self._other))
        self._compare(self._asking, self._other)
        return first.result()

    async def _run_other(self, other: Asking) -> None:
        await asyncio.sleep(self._later_s)
        await other.run()

    def _compare(self, one: Asking, other: Asking) -> None:
        """Both read one generation if the second began while the answer of the first could still be read."""
        met = max(one.began_at, other.began_at) < min(one.ended_at, other.ended_at) + _READABLE_S
        ids = one.answer.generation_id, other.answer.generation_id
        if met and one.answer.complete and other.answer.complete and ids[0] != ids[1]:
            self._checks.violated(BrokenPromise.TWICE, "two generations ran for one key", key=one.question.key, ids=ids)
        self._checks.reach("asked at two routers")
