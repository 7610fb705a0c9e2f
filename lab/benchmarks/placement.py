"""Measures how long the orchestrator's event loop is held while models are placed on nodes.

    .venv/bin/python lab/benchmarks/placement.py [--nodes 1000] [--models 256] [--replicas 3] [--rounds 3]

The orchestrator's own registry, catalog, needs and reconciler run; nobody beats. Medians of the rounds, in milliseconds of
processor time. `all anew`: the models are placed on nodes that have none. `one change`: one node drains, and what it had goes
elsewhere. `in one piece`: an update that nothing prepared, which holds the loop as long as it takes. `prepared`: until all is
placed, with pauses in which others run. `longest hold`: of that, the longest time in which nobody else ran.
"""

from __future__ import annotations

import argparse
import asyncio
import time
from collections.abc import Callable
from statistics import median

import structlog
from rich.console import Console
from rich.table import Table

from ryzanstein.cluster import Deployment, ModelNeed, Node, NodeState
from ryzanstein.orchestrator.placing.halts import Halts
from ryzanstein.orchestrator.placing.needs import MeasuredNeeds
from ryzanstein.orchestrator.placing.replicas.refusals import Refusals
from ryzanstein.orchestrator.placing.replicas.replica_leases import ReplicaLeases
from ryzanstein.orchestrator.reconcile import Reconciler, Sources
from ryzanstein.orchestrator.state.catalog import Catalog
from ryzanstein.orchestrator.state.members.registry import Registry
from ryzanstein.orchestrator.telemetry import OrchestratorTelemetry
from ryzanstein.process.spare_memory import CalmCollector

GIB = 2**30


def changed(what: object) -> None:
    """Nobody watches."""


class MeasuredCluster:
    """Nodes that have no model and have measured all, and deployments that are not placed."""

    def __init__(self, num_nodes: int, num_models: int, replicas: int) -> None:
        self.registry = Registry(changed, lease_s=1e9, max_nodes=num_nodes, monotonic=time.monotonic)
        self._catalog = Catalog(changed, num_models)
        self._needs = MeasuredNeeds(lambda: self._catalog.paths, time.monotonic)
        self._replicas = replicas
        for number in range(num_models):
            self._catalog.put(Deployment(f"m{number}", f"/m{number}", replicas, 1))
        for number in range(num_nodes):
            place = {"host": f"h{number // 2}", "zone": f"z{number % 3}"}
            room = (80 if number % 3 else 40) * GIB
            node = Node(f"node-{number}", f"h{number}:1", "1", state=NodeState.READY, memory_bytes=room, **place)
            self.registry.join(node)
            self._needs.note(node, [ModelNeed(f"/m{each}", (1 + each % 7) * GIB) for each in range(num_models)])

    def reconciler(self) -> Reconciler:
        sources = Sources(self.registry, self._catalog, Refusals(time.monotonic), self._needs, Halts())
        leases = ReplicaLeases(time.monotonic, 600.0, 1.0)
        reconciler = Reconciler(sources, OrchestratorTelemetry(), time.monotonic, leases)
        reconciler.settle()
        return reconciler

    def drain(self, reconciler: Reconciler, number: int) -> None:
        self.registry.drain(f"node-{number}")
        reconciler.invalidate()

    def check(self, reconciler: Reconciler) -> None:
        assert all(len(each.assigned_nodes) == self._replicas for each in reconciler.status())


def in_one_piece(reconciler: Reconciler) -> float:
    began = time.thread_time()
    reconciler.update()
    return 1e3 * (time.thread_time() - began)


async def prepared(reconciler: Reconciler) -> tuple[float, float]:
    """Returns how long it took, and how long at most nobody else ran."""
    longest = 0.0

    async def other() -> None:
        nonlocal longest
        ran = time.thread_time()
        while True:
            await asyncio.sleep(0)
            longest = max(longest, time.thread_time() - ran)
            ran = time.thread_time()

    running = asyncio.create_task(other())
    await asyncio.sleep(0)
    began = time.thread_time()
    await reconciler.prepare()
    reconciler.update()
    await asyncio.sleep(0)
    took = time.thread_time() - began
    running.cancel()
    return 1e3 * took, 1e3 * longest


async def measured(nodes: int, models: int, replicas: int) -> dict[str, tuple[float, float, float]]:
    """Returns the three times by what is placed."""
    cluster = MeasuredCluster(nodes, models, replicas)
    found: dict[str, tuple[float, float, float]] = {}

    async def both(name: str, change: Callable[[Reconciler], None]) -> None:
        change(one)
        piece = in_one_piece(one)
        cluster.check(one)
        change(other)
        found[name] = (piece, *await prepared(other))
        cluster.check(other)

    one, other = cluster.reconciler(), cluster.reconciler()
    await both("all anew", lambda reconciler: None)
    await both("one change", lambda reconciler: cluster.drain(reconciler, 1))
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--nodes", type=int, default=1000)
    parser.add_argument("--models", type=int, default=256)
    parser.add_argument("--replicas", type=int, default=3)
    parser.add_argument("--rounds", type=int, default=3)
    arguments = parser.parse_args()
    structlog.configure(wrapper_class=structlog.make_filtering_bound_logger(40))
    CalmCollector().begin()
    rounds = [asyncio.run(measured(arguments.nodes, arguments.models, arguments.replicas)) for _ in range(arguments.rounds)]
    shown = Table("ms", "in one piece", "prepared", "longest hold")
    for name in rounds[0]:
        shown.add_row(name, *(f"{median(each[name][number] for each in rounds):,.0f}" for number in range(3)))
    Console(width=100).print(shown)


if __name__ == "__main__":
    main()
