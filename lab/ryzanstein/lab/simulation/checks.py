"""What must always hold in a simulated cluster, and that nothing is left at its end.

The simulator knows the truth: which process ran, which path was open, and which fault struck which
service.
"""

from __future__ import annotations

import asyncio
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from enum import Enum
from typing import Any

from ryzanstein import errors
from ryzanstein.cluster import NodeState
from ryzanstein.errors import RyzansteinError
from ryzanstein.lab.simulation import services
from ryzanstein.lab.simulation.access.key_ring import KNOWN_AFTER_S
from ryzanstein.lab.simulation.access.limits_server import LimitsServer
from ryzanstein.lab.simulation.cluster import BROKEN, Cluster, Service, link_name, split
from ryzanstein.lab.simulation.machine.process import Process
from ryzanstein.lab.simulation.planning.plan import FIRST_MODEL
from ryzanstein.lab.simulation.record import Line
from ryzanstein.router.access.limits.usage import NOTHING, UsageCount
from ryzanstein.router.nodes.breaker import BreakerState
from ryzanstein.worker.agent.node import NodeAgent

LOOK_S = 0.25
# A router must have found a node that has been able to serve for this long.
FIT_FOR_S = 4.0
# How long a fault may be blamed on a service that it struck.
BLAME_S = 60.0
# Every router knows of a node that it can be used after so long without a fault.
WELL_S = 20.0
FAILOVER_WAIT_S = 15.0
_ATTEMPTS_OF_A_ROUTER = 2**16  # the first attempt of each router has a multiple of it as its number
# A simulation with this many violations ends.
MAX_VIOLATIONS = 10


class BrokenPromise(Enum):
    """The promise that was broken."""

    INDEX = "every index once"
    TWICE = "a key has one generation"
    CHANGED = "equal to the undisturbed answer"
    GAVE_UP = "nothing is given up while a node could serve it"
    LATE = "nothing beyond its deadline"
    RETRY = "what is called retryable works when retried"
    LOST = "a generation is found within its window"
    CANCELLED = "nothing is cancelled by itself"
    BLAMED = "the client is not blamed"
    BLAME = "blame is right"
    SPARED = "a fault of one model leaves the others alone"
    TURN = "a turn is stored once"
    BOUND = "bounds hold"
    ACCESS = "nobody gets what is another's, or with a key that has ended"
    EPOCH = "no node obeys an earlier leader after a later one"
    TWO_LEADERS = "no earlier leader acts after a later one has"
    ACCEPTED = "what was accepted is not lost"
    ROLLOUT = "a change of a model keeps its bound"
    LEADER = "soon after the last strike one leader instructs"
    VIEWS = "soon after a change all routers see the same nodes, and choose the same for a key"
    ENGINE = "nothing runs on an engine that does not support it, or on a reserve without need"
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


@dataclass(frozen=True, slots=True)
class _Place:
    """A model of a node, with its context there."""

    node: str
    model: str
    context_length: int

    @property
    def name(self) -> str:
        return link_name(self.node, self.model)


class Checks:
    """The checks of one simulation. `run` it as a task of the simulator."""

    def __init__(self, cluster: Cluster) -> None:
        self.violations: list[Violation] = []
        self.reached: dict[str, int] = {}
        self.used: dict[str, UsageCount] = {}
        """What complete answers used, by generation."""
        """Counts of interesting states that were seen.

        A simulation that never reaches them shows nothing.
        """
        self.enough: asyncio.Future[None] = cluster.loop.create_future()
        """Done when no more violations are needed."""
        self._cluster = cluster
        self._struck: dict[str, float] = {}
        self._fit_since: dict[_Place, float] = {}
        self._last_fit: dict[_Place, float] = {}
        """When each model of each node, which every router must have found by then, could last serve."""
        self._places = [
            _Place(service.name, model, cluster.plan.context_of(number, model))
            for number, service in enumerate(cluster.nodes)
            for model in cluster.plan.models_of(number)
        ]
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

    def struck_model(self, node: str, model: str, lasts_s: float = 0.0) -> None:
        """Records that a fault struck the ranks of one model of a node, and nothing else of it."""
        self.struck(f"{node}/{model}", lasts_s)

    def check_key(self, router: str, key: str, **details: object) -> None:
        """Checks that a router has not just used a key that it must have known to be revoked."""
        ended_s = self._cluster.keys.ended_before(key, self._now)
        if ended_s > KNOWN_AFTER_S and not self.is_struck(router, KNOWN_AFTER_S):
            self.violated(BrokenPromise.ACCESS, f"a token {ended_s:.2f} s after its key was revoked", router=router, **details)

    def somebody_serves(self, model: str, *, foreign: bool = True) -> bool:
        """Returns whether a node could serve the model, and has been able to for a while; `foreign`: with any engine."""
        fit = (place for place, since in self._fit_since.items() if self._now - since > FIT_FOR_S)
        return any(place.model == model and (foreign or not self._is_foreign(place.node)) for place in fit)

    def check_engines(self, node_ids: Collection[str], **details: object) -> None:
        """Checks which nodes generated tokens of a request that uses what engines of others do not support."""
        for node_id in node_ids:
            if self._is_foreign(split(node_id)[0]):
                self.violated(BrokenPromise.ENGINE, f"{node_id} answered what its engine does not support", **details)

    def own_context(self, model: str) -> int:
        """Returns the largest context of a node that has the model and no engine of others; 0: there is none."""
        places = (place for place in self._places if place.model == model and not self._is_foreign(place.node))
        return max((place.context_length for place in places), default=0)

    def _is_foreign(self, node: str) -> bool:
        return self._number(node) in self._cluster.plan.foreign

    def _number(self, node: str) -> int:
        return int(node.rpartition("-")[2])

    def gave_up(
        self, error: RyzansteinError, progress_at: float, *, key: str, model: str, num_tokens: int, foreign: bool = True
    ) -> None:
        """Checks a failure that a client got for its generation of `num_tokens`, prompt included.

        `foreign`: engines of others could have run it too.
        """
        self._look_at_nodes()
        able = [place for place in self._places if place.model == model and (foreign or not self._is_foreign(place.node))]
        large = [place for place in able if place.context_length >= num_tokens]
        since = {place.name: self._now - self._fit_since.get(place, self._now) for place in large}
        fit = {name: fit_s for name, fit_s in since.items() if fit_s > FIT_FOR_S}
        last_fit = max((self._last_fit.get(place, 0.0) for place in large), default=0.0)
        quiet_s = self._now - progress_at
        if fit:
            longest = max(fit, key=lambda name: fit[name])
            self.violated(
                BrokenPromise.GAVE_UP, f"{error.reason} while {longest} could serve for {fit[longest]:.1f} s",
                key=key, quiet_s=round(quiet_s, 1),
            )  # fmt: skip
        elif self._now - max(last_fit, progress_at) < FAILOVER_WAIT_S - 2 * LOOK_S and _is_waited_for(error):
            self.violated(BrokenPromise.GAVE_UP, f"{error.reason} after {quiet_s:.1f} s without a token", key=key)

    @property
    def look_s(self) -> float:
        """How often it looks, in seconds."""
        return LOOK_S

    async def run(self) -> None:
        while True:
            await asyncio.sleep(self.look_s)
            self.look()

    def look(self) -> None:
        self._look_at_nodes()
        for service in self._cluster.routers:
            if service.process is not None and (router := services.ROUTERS.get(service.process)) is not None:
                self._look_at_router(service.name, router)
        for service in self._cluster.services:
            if service.process is not None:
                self._look_at_tasks(service.process)

    def _look_at_nodes(self) -> None:
        services_by_name = {service.name: service for service in self._cluster.nodes}
        for place in self._places:
            if self._serves(services_by_name[place.node], place.model):
                fit_since = self._fit_since.setdefault(place, self._now)
                if self._now - fit_since > FIT_FOR_S:
                    self._last_fit[place] = self._now
            else:
                self._fit_since.pop(place, None)

    def _serves(self, service: Service, model: str) -> bool:
        """Returns whether a node serves the model.

        It and the model's ranks run, and it and every live router can reach each other.
        """
        process = service.process
        if process is None or not process.runs or process.rewrite is not None:
            return False
        agent = services.NODES.get(process, {}).get(model)
        if agent is None or agent.state is not NodeState.READY or self.is_struck_model(service.name, model, 0.0):
            return False
        network, routers = self._cluster.network, [router for router in self._cluster.routers if router.alive]
        return all(
            network.reaches(service.name, router.name) and network.reaches(router.name, service.name) for router in routers
        )

    def _look_at_router(self, name: str, router: Any) -> None:
        running, bound = router.core.running, self._cluster.plan.max_running
        if running > bound:
            self.violated(BrokenPromise.BOUND, f"{running} generations run, max_running is {bound}", router=name)
        held, most = router.core.held_prompt_bytes, self._cluster.plan.max_held_prompt_bytes
        if held > most and running > 1:
            self.violated(BrokenPromise.BOUND, f"prompts of {held} bytes are held, the bound is {most}", router=name)
        for place in self._places:
            breaker = router.links.breaker(place.name)
            if breaker is not None and breaker.state is BreakerState.OPEN and not self.is_struck_model(place.node, place.model):
                self.violated(BrokenPromise.BLAME, f"{name} opened the breaker of {place.name}, which is healthy")

    def _look_at_tasks(self, process: Process) -> None:
        for task, error in process.crashes:
            name = getattr(task.get_coro(), "__qualname__", "?")
            self.violated(BrokenPromise.TASK, f"{name} ended with {error!r}, unseen", process=process.name)
        process.crashes.clear()

    def _on_line(self, line: Line) -> None:
        """Checks what services log about each other."""
        service = line.process.partition(".")[0]
        if line.event == "ranks lost":
            model = str(line.fields.get(services.MODEL_FIELD, FIRST_MODEL))
            if not self.is_struck_model(service, model):
                self.violated(BrokenPromise.BLAME, f"{line.fields.get('reason')}", node=link_name(service, model))
        if line.event == "generation failed over" and self._cluster.plan.more_models:
            self._look_at_failover(service, line)
        if line.event == "generation accepted" and self._cluster.plan.reserve:
            self._look_at_reserve(service, line)
        if line.event in _REACHED:
            self.reach(line.event)

    def _look_at_failover(self, router: str, line: Line) -> None:
        """Checks that an answer moved because of its own model or node, not because of another model."""
        node, model = split(str(line.fields["from_node"]))
        others = [other for other in self._cluster.plan.models if other != model and self.is_struck(f"{node}/{other}")]
        if others:
            self.reach("answer failed over from a node with another struck model")
        if line.fields["cause"] not in _WILLING and not self.is_struck_model(node, model) and not self.is_struck(router):
            self.violated(
                BrokenPromise.SPARED, f"an answer left {link_name(node, model)}, which is healthy",
                cause=line.fields["cause"], router=router, struck=others,
            )  # fmt: skip

    def _look_at_reserve(self, node: str, line: Line) -> None:
        """Checks that a reserve node gets no first attempt while a regular node of the same engine is well."""
        if self._number(node) not in self._cluster.plan.reserve:
            return
        self.reach("reserve used")
        first = int(line.fields["attempt"]) % _ATTEMPTS_OF_A_ROUTER == 0
        struck = any(self.is_struck(each.name, WELL_S) for each in self._cluster.routers)
        if not first or self._cluster.plan.more_models or struck:
            return
        for place, since in self._fit_since.items():
            regular = self._number(place.node) not in self._cluster.plan.reserve and not self._is_foreign(place.node)
            if regular and self._now - since > WELL_S and not self.is_struck_model(place.node, place.model, WELL_S):
                self.violated(BrokenPromise.ENGINE, f"{node} is a reserve and began an answer while {place.name} was well")

    def is_struck_model(self, node: str, model: str, for_s: float = BLAME_S) -> bool:
        """Returns whether a fault strikes the model's ranks on the node, or the whole node."""
        return self.is_struck(node, for_s) or self.is_struck(f"{node}/{model}", for_s)

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
        for server in services.LIMITS:
            self._require_charged_once(server)

    def _require_charged_once(self, server: LimitsServer) -> None:
        """Checks the counts at the server: a router that died may take some with it that it could not report."""
        if running := server.num_running():
            self.violated(BrokenPromise.LEFT, f"{running} generations hold a part of their tenant's limits")
        for generation_id, used in self.used.items():
            charged = server.counted.get(generation_id, NOTHING)
            if charged.requests > used.requests or charged.tokens > used.tokens:
                self.violated(BrokenPromise.BOUND, f"{charged} charged, {used} used", generation=generation_id)
            elif charged != used and not self._cluster.routers_restarted:
                self.violated(BrokenPromise.BOUND, f"{charged} charged, not {used}", generation=generation_id)
        if self.used:
            self.reach("answers charged to the token")

    def _require_at_rest(self, service: Service) -> None:
        agents = services.NODES.get(service.process, {}) if service.process is not None else {}
        if not service.wanted:
            return
        for model, agent in agents.items():
            if model == BROKEN or (model not in self._cluster.plan.models and agent.host.choice is None):
                continue  # it was not meant to be ready, or was removed
            self._require_idle(link_name(service.name, model), agent)
        for ranks in self._cluster.ranks[self._cluster.nodes.index(service)]:
            if ranks.unexpected:
                self.violated(BrokenPromise.TASK, f"the engine of {service.name} raised {ranks.unexpected[0]}")

    def _require_idle(self, name: str, agent: NodeAgent) -> None:
        if agent.state is not NodeState.READY:
            self.violated(BrokenPromise.REST, f"{name} is {agent.state.name}: {agent.host.reason}")
            return
        if agent.num_running:
            self.violated(BrokenPromise.LEFT, f"{agent.num_running} generations run on {name}")
        stats = agent.version.stats
        if stats.running or stats.waiting:
            self.violated(BrokenPromise.LEFT, f"{stats.running} sequences run in the engine of {name}")
        if stats.blocks_held:
            self.violated(BrokenPromise.LEFT, f"{stats.blocks_held} blocks are held on {name}")

    def _require_empty(self, service: Service) -> None:
        router = services.ROUTERS.get(service.process) if service.process is not None else None
        if router is None or not service.wanted:
            return
        if router.core.running:
            self.violated(BrokenPromise.LEFT, f"{router.core.running} generations run on {service.name}")
        wanted = {node.name for node in self._cluster.nodes if node.wanted}
        for place in self._places:
            if place.node in wanted and router.links.breaker(place.name) is None:
                self.violated(BrokenPromise.REST, f"{service.name} has no link to {place.name}")
        for what, count in left_in(router):
            if count:
                self.violated(BrokenPromise.LEFT, f"{count} {what} on {service.name}")

    @property
    def _now(self) -> float:
        return self._cluster.loop.now


def left_in(router: Any) -> Iterator[tuple[str, int]]:
    """Yields what a router should not hold at rest, with its number."""
    core, generations = router.core, router.core._generations
    yield "generations", len(generations._by_id)
    for name in ("_unread", "_expiring", "_expiring_after_grace"):
        yield f"names in {name[1:]}", len(getattr(generations, name))
    yield "holds", router.allowance.num_held
    yield "claims", len(core._turns.claimed._held)
    yield "entries of the journal", len(getattr(core._recorder, "_entries", ()))


def _is_waited_for(error: RyzansteinError) -> bool:
    """Returns whether the router waits for nodes after this error.

    It does not if all nodes are drained.
    """
    return error.reason in _WAITED_FOR and error.metadata.get("cause") != errors.ALL_DRAIN


# The node neither failed nor fell silent.
_WILLING = ("back_pressure", "refused", "request_fault", "unloaded")
_WAITED_FOR = ("NO_NODES", "RANK_LOST", "RANK_STALLED", "LINK_DOWN", "NODE_NOT_READY")
_REACHED = (
    "generation failed over",
    "generation taken over",
    "ranks lost",
    "session store works again",
    "journal works again",
    "event loop stalled",
    "rank slow",
    "keys loaded",
    "view has a gap",
    "answer continued by a node that computes other tokens",
)
