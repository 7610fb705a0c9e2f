"""Routers that only watch: `python -P -m ryzanstein.lab.bench.control.standins.watchers ORCHESTRATOR NUMBER FOLDER`.

Each has a router's own view of the cluster, and links nothing. They take no orders.
"""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Collection
from pathlib import Path
from typing import Any

import uvloop

from ryzanstein.lab.bench.control.standins.orders import Order, obey
from ryzanstein.lab.bench.control.standins.traffic import CountingDialer, Traffic
from ryzanstein.observe import log as logs
from ryzanstein.router.membership.cache import ViewCache
from ryzanstein.router.membership.view import ClusterView
from ryzanstein.router.telemetry import RouterTelemetry


class WatchingRouter:
    """A `ViewObserver` that counts what it would link."""

    def __init__(self, number: int, folder: Path, traffic: Traffic) -> None:
        self.nodes = 0
        self._telemetry = RouterTelemetry()
        cache = ViewCache(folder / f"watcher-{number}.json")
        self._view = ClusterView(f"watcher-{number}", (), self, cache, self._telemetry, dialer=CountingDialer(traffic))

    async def run(self, orchestrator: str) -> None:
        await self._view.run(orchestrator)

    def follow(self, addresses: Collection[str], draining: Collection[str] = (), models: Collection[str] = ()) -> None:
        self.nodes = len(addresses)

    @property
    def restarts_seen(self) -> int:
        """How often a snapshot was another orchestrator's."""
        labels = {"cause": "epoch"}
        return int(self._telemetry.registry.get_sample_value("ryzanstein_router_view_resyncs_total", labels) or 0)


async def serve(orchestrator: str, number: str, folder: str) -> None:
    """Watches until standard input ends."""
    traffic = Traffic()
    watchers = [WatchingRouter(n, Path(folder), traffic) for n in range(int(number))]

    def state() -> dict[str, Any]:
        return {
            "nodes": [watcher.nodes for watcher in watchers],
            "restarts_seen": [watcher.restarts_seen for watcher in watchers],
            "to_orchestrator": traffic.document(),
        }

    async def carry_out(order: Order) -> None:
        raise ValueError(f"no such order: {order}")

    running = [asyncio.create_task(watcher.run(orchestrator)) for watcher in watchers]
    try:
        await obey(carry_out, state)
    finally:
        for task in running:
            task.cancel()


if __name__ == "__main__":
    # Standard output is only for the state.
    logs.setup("watchers", "error")
    uvloop.run(serve(*sys.argv[1:4]))
