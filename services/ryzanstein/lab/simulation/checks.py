"""What must always hold in a simulated cluster, and that nothing is left at its end.

The simulator knows the truth: which process ran, which path was open, and which fault struck which
service.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from dataclasses import dataclass
from enum import Enum
from typing import Any

from ryzanstein import errors
from ryzanstein.cluster import NodeState
from ryzanstein.errors import RyzansteinError
from ryzanstein.lab.simulation import services
from ryzanstein.lab.simulation.cluster import Cluster, Service
from ryzanstein.lab.simulation.process import Process
from ryzanstein.lab.simulation.record import Line
from ryzanstein.router.nodes.breaker import BreakerState

LOOK_S = 0.25
# A router must have found a node that has been able to serve for this long.
FIT_FOR_S = 4.0
# How long a fault may be blamed on a service that it struck.
BLAME_S = 60.0
FAILOVER_WAIT_S = 15.0
# A simulation with this many violations ends.
MAX_VIOLATIONS = 10


class BrokenPromise(Enum):
    """The promise that was broken."""

    INDEX = "every index once"
    CHANGED = "equal to the undisturbed answer"
    GAVE_UP = "nothing is given up while a node could serve it"
    LATE = "nothing beyond its deadline"
    RETRY = "what is called retryable works when retried"
    LOST = "a generation is found within its window"
    CANCELLED = "nothing is cancelled by itself"
    BLAMED = "the client is not blamed"
    BLAME = "blame is right"
    TURN = "a turn is stored once"
    BOUND = "bounds hold"
    TASK = "no task ends unseen"
    LEFT = "nothing is left"
    REST = "everything comes to rest"


@dataclass(frozen=True, slots=True)
class Violation:
    """A broken promise."""

    at: float
    failure: BrokenPromise
    what: str
    details: dict[str, Any]

    def __str__(self) -> str:
        details = " ".join(f"{key}={value}" for key, value in self.details.items())
        return f"{self.at:10.3f} s  {self.failure.value}: {self.what}  {details}"


class Checks:
    """The checks of one simulation. `run` it as a task of the simulator."""

    def __init__(self, cluster: Cluster) -> None:
        self.violations: list[Violation] = []
        self.reached: dict[str, int] = {}
        """Counts of interesting states that were seen.

        A simulation that never reaches them shows nothing.
        """
        self.enough: asyncio.Future[None] = cluster.loop.create_future()
        """Done when no more violations are needed."""
        self._cluster = cluster
        self._struck: dict[str, float] = {}
        self._fit_since: dict[str, float] = {}
        self._last_fit: dict[str, float] = {}
        """When each node, which every router must have found by then, could last serve."""
        cluster.record.on_line.append(self._on_line)

    def violated(self, failure: BrokenPromise, what: str, **details: object) -> None:
        violation = Violation(self._now, failure, what, details)
        self.violations.append(violation)
        self._cluster.record.say("VIOLATION", promise=failure.value, what=what, **details)
        if len(self.violations) >= MAX_VIOLATIONS and not self.enough.done():
            self.enough.set_result(None)

    def reach(self, state: str) -> None:
        self.reached[state] = self.reached.get(state, 0) + 1

    def struck(self, name: str, lasts_s: float = 0.0) -> None:
        """Records that a fault struck a service.

        The service may be blamed until the fault ends and a while longer.
        """
        self._struck[name] = max(self._struck.get(name, 0.0), self._now + lasts_s)

    @property
    def somebody_serves(self) -> bool:
        """Whether a node could serve, and has been able to for a while."""
        return any(self._now - since > FIT_FOR_S for since in self._fit_since.values())

    def gave_up(self, error: RyzansteinError, progress_at: float, key: str, num_tokens: int) -> None:
        """Checks a failure that a client got for its generation of `num_tokens`, prompt included."""
        for service in self._cluster.nodes:
            self._look_at_node(service)
        plans = zip(self._cluster.nodes, self._cluster.plan.nodes, strict=True)
        large = [service.name for service, plan in plans if plan.context_length >= num_tokens]
        since = {name: self._now - self._fit_since.get(name, self._now) for name in large}
        fit = {name: fit_s for name, fit_s in since.items() if fit_s > FIT_FOR_S}
        last_fit = max((self._last_fit.get(name, 0.0) for name in large), default=0.0)
        quiet_s = self._now - progress_at
        if fit:
            longest = max(fit, key=lambda name: fit[name])
            self.violated(
                BrokenPromise.GAVE_UP, f"{error.reason} while {longest} could serve for {fit[longest]:.1f} s",
                key=key, quiet_s=round(quiet_s, 1),
            )  # fmt: skip
        elif self._now - max(last_fit, progress_at) < FAILOVER_WAIT_S - 2 * LOOK_S and _is_waited_for(error):
            self.violated(BrokenPromise.GAVE_UP, f"{error.reason} after {quiet_s:.1f} s without a token", key=key)

    async def run(self) -> None:
        while True:
            await asyncio.sleep(LOOK_S)
            self.look()

    def look(self) -> None:
        for service in self._cluster.nodes:
            self._look_at_node(service)
        for service in self._cluster.routers:
            if service.process is not None and (router := services.ROUTERS.get(service.process)) is not None:
                self._look_at_router(service.name, router)
        for service in self._cluster.services:
            if service.process is not None:
                self._look_at_tasks(service.process)

    def _look_at_node(self, service: Service) -> None:
        if self._serves(service):
            fit_since = self._fit_since.setdefault(service.name, self._now)
            if self._now - fit_since > FIT_FOR_S:
                self._last_fit[service.name] = self._now
        else:
            self._fit_since.pop(service.name, None)

    def _serves(self, service: Service) -> bool:
        """Returns whether a node serves.

        It and its ranks run, and it and every live router can reach each other.
        """
        process = service.process
        if process is None or not process.runs or process.rewrite is not None:
            return False
        node = services.NODES.get(process)
        if node is None or node.state is not NodeState.READY or self.is_struck(service.name, 0.0):
            return False
        network, routers = self._cluster.network, [router for router in self._cluster.routers if router.alive]
        return all(
            network.reaches(service.name, router.name) and network.reaches(router.name, service.name) for router in routers
        )

    def _look_at_router(self, name: str, router: Any) -> None:
        running, bound = router.core.running, self._cluster.plan.max_running
        if running > bound:
            self.violated(BrokenPromise.BOUND, f"{running} generations run, max_running is {bound}", router=name)
        for service in self._cluster.nodes:
            breaker = router.links.breaker(service.name)
            if breaker is not None and breaker.state is BreakerState.OPEN and not self.is_struck(service.name):
                self.violated(BrokenPromise.BLAME, f"{name} opened the breaker of {service.name}, which is healthy")

    def _look_at_tasks(self, process: Process) -> None:
        for task, error in process.crashes:
            name = getattr(task.get_coro(), "__qualname__", "?")
            self.violated(BrokenPromise.TASK, f"{name} ended with {error!r}, unseen", process=process.name)
        process.crashes.clear()

    def _on_line(self, line: Line) -> None:
        """Checks what services log about each other."""
        service = line.process.partition(".")[0]
        if line.event == "ranks lost" and not self.is_struck(service):
            self.violated(BrokenPromise.BLAME, f"{line.fields.get('reason')}", node=service)
        if line.event in _REACHED:
            self.reach(line.event)

    def is_struck(self, name: str, for_s: float = BLAME_S) -> bool:
        """Returns whether a fault strikes it, or did so recently."""
        return name in self._struck and self._now < self._struck[name] + for_s

    async def at_rest(self) -> None:
        """Checks after the calm: every service serves, every node is linked, nothing is left."""
        for service in self._cluster.services:
            if not service.alive and service.wanted:
                self.violated(BrokenPromise.REST, f"{service.name} is not running")
        for service in self._cluster.nodes:
            self._require_at_rest(service)
        for service in self._cluster.routers:
            self._require_empty(service)

    def _require_at_rest(self, service: Service) -> None:
        node = services.NODES.get(service.process) if service.process is not None else None
        if node is None or not service.wanted:
            return
        if node.state is not NodeState.READY:
            self.violated(BrokenPromise.REST, f"{service.name} is {node.state.name}: {node.host.reason}")
            return
        if len(node.running):
            self.violated(BrokenPromise.LEFT, f"{len(node.running)} generations run on {service.name}")
        if node.stats.running or node.stats.waiting:
            self.violated(BrokenPromise.LEFT, f"{node.stats.running} sequences run in the engine of {service.name}")
        if node.stats.blocks_held:
            self.violated(BrokenPromise.LEFT, f"{node.stats.blocks_held} blocks are held on {service.name}")
        if unexpected := self._cluster.ranks[self._cluster.nodes.index(service)].unexpected:
            self.violated(BrokenPromise.TASK, f"the engine of {service.name} raised {unexpected[0]}")

    def _require_empty(self, service: Service) -> None:
        router = services.ROUTERS.get(service.process) if service.process is not None else None
        if router is None or not service.wanted:
            return
        if router.core.running:
            self.violated(BrokenPromise.LEFT, f"{router.core.running} generations run on {service.name}")
        linked = set(router.links._nodes)
        for node in self._cluster.nodes:
            if node.wanted and node.name not in linked:
                self.violated(BrokenPromise.REST, f"{service.name} has no link to {node.name}")
        for what, count in _left_in(router):
            if count:
                self.violated(BrokenPromise.LEFT, f"{count} {what} on {service.name}")

    @property
    def _now(self) -> float:
        return self._cluster.loop.time()


def _left_in(router: Any) -> Iterator[tuple[str, int]]:
    core = router.core
    yield "generations", len(core._generations._by_id)
    yield "timers of generations", len(core._generations._timers)
    yield "claims", len(core._turns.claimed._held)
    yield "entries of the journal", len(getattr(core._recorder, "_entries", ()))


def _is_waited_for(error: RyzansteinError) -> bool:
    """Returns whether the router waits for nodes after this error.

    It does not if all nodes are drained.
    """
    return error.reason in _WAITED_FOR and error.metadata.get("cause") != errors.ALL_DRAIN


_WAITED_FOR = ("NO_NODES", "RANK_LOST", "RANK_STALLED", "LINK_DOWN", "NODE_NOT_READY")
_REACHED = (
    "generation failed over",
    "generation taken over",
    "ranks lost",
    "session store works again",
    "journal works again",
    "stood still, leases restarted",
    "rank slow",
    "view has a gap",
)
