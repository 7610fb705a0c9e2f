"""A simulated cluster: an orchestrator, nodes and routers, each on its own machine, with restarts.

Routers share one state directory when they keep sessions in SQLite, as those of one host do.

Names of models on nodes, as agents and routers form them.

The first model of node-0 has the name of the node, the model b has the name node-0/b.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Coroutine
from contextvars import copy_context
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

from ryzanstein.cluster import OWN_ENGINE, EngineTraits
from ryzanstein.demo import MODEL_DIR
from ryzanstein.lab.simulation import services
from ryzanstein.lab.simulation.access.key_ring import KeyRing
from ryzanstein.lab.simulation.leaders.redis_server import URL
from ryzanstein.lab.simulation.machine.clock import RATE
from ryzanstein.lab.simulation.machine.loop import SimulatedLoop
from ryzanstein.lab.simulation.machine.network import SimulatedNetwork
from ryzanstein.lab.simulation.machine.process import Process, SimulatedMachine
from ryzanstein.lab.simulation.planning.plan import (
    FIRST_MODEL,
    FOREIGN_LACKS,
    LeadersPlan,
    ModelPlan,
    NodePlan,
    SimulationPlan,
)
from ryzanstein.lab.simulation.ranks.node_ranks import NodeRanks
from ryzanstein.lab.simulation.ranks.ranks import RankProfile, SimulatedRanks
from ryzanstein.lab.simulation.record import SimulationRecord
from ryzanstein.lab.simulation.scripted.model import ScriptedModel
from ryzanstein.lab.simulation.services import serve_node, serve_orchestrator, serve_router, serve_wide_node
from ryzanstein.lab.simulation.wide.node import WideHost, WideNode
from ryzanstein.orchestrator.config import OrchestratorSettings, OrchestratorTuning
from ryzanstein.orchestrator.placing.rollout_bounds import RolloutBounds
from ryzanstein.router.config import RouterSettings
from ryzanstein.worker.config import WorkerSettings
from ryzanstein.worker.ranks.group import GroupBounds
from ryzanstein.worker.tuning import WorkerTuning


def link_name(node: str, model: str) -> str:
    """Returns the name of a model of a node."""
    return node if model == FIRST_MODEL else f"{node}/{model}"


def split(name: str) -> tuple[str, str]:
    """Returns the node and the model of a name."""
    node, _, model = name.partition("/")
    return node, model or FIRST_MODEL


ORCHESTRATOR = "orchestrator"
_GRPC = {"orchestrator": 50050, "router": 50051, "node": 50061}
_Settings = TypeVar("_Settings")
# The model loads in two seconds; a rank that hangs while loading is replaced within the calm.
_RANKS = GroupBounds(start_s=45.0)
_TUNING = WorkerTuning(ranks=_RANKS)
_SELDOM_TUNING = WorkerTuning(ranks=replace(_RANKS, watch_interval_s=0.5), beat_idle_s=2.0)
# The tokens are those of any node, so that each answer can still be compared with the undisturbed one.
_FOREIGN = EngineTraits("scripted 1", frozenset({FOREIGN_LACKS}), continues_exactly=False)
BROKEN = "broken"
"""A model that every second node cannot load."""
MIN_READY_S = 3.0
"""How long a replica must be ready before the next one changes, where there are several orchestrators."""
RESTART_S = 1.0
"""How long a supervisor takes to restart a service."""


class Service:
    """One service. Each start makes a new process."""

    def __init__(self, world: Cluster, name: str, main: Callable[[], Coroutine[Any, Any, None]]) -> None:
        self.name = name
        self.kind = name.rpartition("-")[0] or name
        self.address = f"{name}:{_GRPC[self.kind]}"
        self.machine = SimulatedMachine(name)
        self.starts = 0
        self.wanted = True
        self.process: Process | None = None
        self._world = world
        self._main = main

    @property
    def alive(self) -> bool:
        return self.process is not None and self.process.alive

    def start(self) -> Process:
        world = self._world
        self.starts += 1
        name = self.name if self.starts == 1 else f"{self.name}.{self.starts}"
        process = self.process = Process(name, self.machine, world.loop, world.rng(name))
        process.on_end.append(lambda: world.process_ended(self, process))
        world.before_start(self, process)
        process.start(self._main())
        return process


class Cluster:
    """The simulated cluster. `start` it within the loop.

    `on_end` is called for every process that ended.
    """

    def __init__(
        self, plan: SimulationPlan, loop: SimulatedLoop, network: SimulatedNetwork, record: SimulationRecord, directory: Path
    ) -> None:
        self.plan, self.loop, self.network, self.record = plan, loop, network, record
        self.directory = directory
        self.keys = KeyRing(plan, directory, self.rng("keys"))
        self.stopping = False
        names = [ORCHESTRATOR] if plan.leaders is None else [f"{ORCHESTRATOR}-{number}" for number in range(plan.leaders.num)]
        self.orchestrators = [Service(self, name, lambda name=name: self._orchestrator(name)) for name in names]  # type: ignore[misc]
        self.orchestrator = self.orchestrators[0]
        self.orchestrator_addresses = ",".join(each.address for each in self.orchestrators)
        self.nodes = [
            Service(self, f"node-{number}", lambda number=number: self._node(number))  # type: ignore[misc]
            for number in range(len(plan.nodes))
        ]
        self.routers = [
            Service(self, f"router-{number}", lambda number=number: self._router(number))  # type: ignore[misc]
            for number in range(plan.num_routers)
        ]
        for rate, service in zip(plan.leaders.rates if plan.leaders else (), (*self.orchestrators, *self.nodes), strict=False):
            service.machine.clock_rate = rate
        self._numbers = {service: number for number, service in enumerate(self.nodes)}
        self._wide = None if plan.wide is None else WideHost()
        self.ranks = [] if plan.wide else [self._node_ranks(number) for number in range(len(plan.nodes))]
        for number, ranks in enumerate(self.ranks):
            for model in plan.models_of(number):
                ranks.of(model)
        self.on_end: list[Callable[[Service, Process], None]] = []

    @property
    def services(self) -> list[Service]:
        return [*self.orchestrators, *self.nodes, *self.routers]

    @property
    def routers_restarted(self) -> bool:
        return any(router.starts > 1 for router in self.routers)

    def rng(self, name: str) -> random.Random:
        """Returns the random generator of one purpose, independent of all others."""
        return random.Random(f"{self.plan.seed} {name}")

    def start(self) -> None:
        for service in self.services:
            service.start()

    def before_start(self, service: Service, process: Process) -> None:
        number = self._numbers.get(service)
        if number is not None and self.ranks:
            services.RANKS[process] = self.ranks[number]
            services.ENGINES[process] = _FOREIGN if number in self.plan.foreign else OWN_ENGINE

    def process_ended(self, service: Service, process: Process) -> None:
        error = process.ended.result()
        self.record.say("process ended", process=process.name, error=repr(error))
        self.network.process_ended(process)
        services.forget(process)
        if service in self._numbers and self.ranks:
            self.ranks[self._numbers[service]].agent_died()
        for notify in self.on_end:
            notify(service, process)

    def _node_ranks(self, number: int) -> NodeRanks:
        """Returns what a node's ranks come from. They have the clock of its machine."""
        context = copy_context()
        context.run(RATE.set, self.nodes[number].machine.clock_rate)
        return context.run(NodeRanks, partial(self._ranks, number))

    def _ranks(self, number: int, model: str) -> SimulatedRanks:
        node = self.plan.nodes[number]
        if model == FIRST_MODEL:
            return SimulatedRanks(self.rng(f"ranks {number}"), _profile(node))
        planned = next((each for each in self.plan.more_models if each.name == model), node)
        ranks = SimulatedRanks(self.rng(f"ranks {number} {model}"), _profile(planned), ScriptedModel.named(model))
        if model == BROKEN and number % 2 == 0:
            ranks.faults.refused = "it is broken here"
        return ranks

    def _orchestrator(self, name: str) -> Coroutine[Any, Any, None]:
        settings = _settings(
            OrchestratorSettings,
            host=name,
            grpc_port=_GRPC["orchestrator"],
            database=self.directory / "orchestrator.sqlite",
            **({"tuning": OrchestratorTuning(heartbeat_interval_s=2.0), "lease_s": 8.0} if self.plan.seldom else {}),
            **({} if self.plan.leaders is None else _one_of_several(name, self.plan.leaders)),
        )
        return serve_orchestrator(settings)

    def _node(self, number: int) -> Coroutine[Any, Any, None]:
        if self._wide is not None:
            return self._wide_node(number, self._wide)
        node = self.plan.nodes[number]
        settings = _settings(
            WorkerSettings,
            host=f"node-{number}",
            node_id=f"node-{number}",
            grpc_port=_GRPC["node"],
            orchestrator=self.orchestrator_addresses,
            model=str(MODEL_DIR),
            model_name=FIRST_MODEL,
            more_models=",".join(f"{model}={MODEL_DIR}" for model in self.plan.models_of(number)[1:]),
            tp=node.tp,
            device="cpu",
            max_sequences=node.max_sequences,
            reserve=number in self.plan.reserve,
            drain_grace_s=5.0,
            state_dir=self.directory / f"node-{number}",
            tuning=_SELDOM_TUNING if self.plan.seldom else _TUNING,
            **({} if self.plan.leaders is None else _room_for(self.plan.leaders)),
        )
        return serve_node(settings)

    async def _wide_node(self, number: int, host: WideHost) -> None:
        assert self.plan.wide is not None
        name, planned = f"node-{number}", self.plan.nodes[number]
        settings = _settings(
            WorkerSettings,
            host=name,
            node_id=name,
            grpc_port=_GRPC["node"],
            orchestrator=self.orchestrator_addresses,
            model=str(MODEL_DIR),
            model_name=FIRST_MODEL,
            device="cpu",
            max_sequences=planned.max_sequences,
            drain_grace_s=5.0,
            state_dir=self.directory / name,
        )
        load_s = self.rng(f"load {number} {self.nodes[number].starts}").uniform(*self.plan.wide.loads_s)
        node = WideNode(settings, host, step_s=planned.step_s, load_s=load_s)
        await serve_wide_node(node, self.directory / "leaders")

    def _router(self, number: int) -> Coroutine[Any, Any, None]:
        name = f"router-{number}"
        settings = _settings(
            RouterSettings,
            host=name,
            router_id=name,
            grpc_port=_GRPC["router"],
            orchestrator=self.orchestrator_addresses,
            state_dir=self.directory / name,
            session_dir=self.directory,
            session_store=self.plan.session_store,
            router_address=f"{name}:{_GRPC['router']}",
            max_running=self.plan.max_running,
            max_held_prompt_bytes=self.plan.max_held_prompt_bytes,
            policy=self.plan.policy,
            unread_grace_s=self.plan.unread_grace_s,
            unread_turns=self.plan.unread_turns,
            drain_grace_s=5.0,
            keys_file=self.keys.path,
        )
        return serve_router(settings)


def _settings(kind: type[_Settings], **fields: Any) -> _Settings:
    """Returns settings, validated as from flags; nothing comes from this process's environment."""
    return kind(**fields)


def _one_of_several(name: str, leaders: LeadersPlan) -> dict[str, Any]:
    rollout = RolloutBounds(max_unavailable=leaders.max_unavailable, min_ready_s=MIN_READY_S)
    election = {
        "store": "redis",
        "leader_election": "redis",
        "redis_url": URL,
        "advertise_address": f"{name}:{_GRPC['orchestrator']}",
    }
    return {**election, "tuning": OrchestratorTuning(rollout=rollout)}


def _room_for(leaders: LeadersPlan) -> dict[str, Any]:
    """Returns the settings of a node that holds what is deployed, and two revisions of each if `beside`."""
    return {"model_memory_bytes": 2**40 if leaders.beside else 2 * 10**9}


def _profile(node: NodePlan | ModelPlan) -> RankProfile:
    return RankProfile(step_s=node.step_s, context_length=node.context_length, num_blocks=node.num_blocks)
