"""The real services as simulated processes: their own `serve`, without what cannot be simulated.

Left out: the HTTP face, the metrics port and the exporter of traces (none is configured). Ranks are
simulated, see `ranks`; chat templates have no separate process. Each `serve` is passed what stands
in for these, so mypy compares it with what it replaces. Only the standard library and gRPC (`rpc`)
are replaced where they are.
"""

from __future__ import annotations

import asyncio
import contextlib
import sqlite3
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import replace
from pathlib import Path
from typing import Any

from prometheus_client import CollectorRegistry
from structlog.contextvars import bind_contextvars

from ryzanstein.cluster import OWN_ENGINE, EngineTraits
from ryzanstein.lab.simulation.access.limits_server import LimitsServer, open_simulated
from ryzanstein.lab.simulation.leaders.redis_server import SimulatedRedis
from ryzanstein.lab.simulation.machine.clock import CLOCK
from ryzanstein.lab.simulation.machine.loop import OWNER
from ryzanstein.lab.simulation.machine.process import Process
from ryzanstein.lab.simulation.planning.plan import FIRST_MODEL
from ryzanstein.lab.simulation.ranks.node_ranks import NodeRanks
from ryzanstein.lab.simulation.wide.node import WideNode
from ryzanstein.orchestrator import __main__ as orchestrator
from ryzanstein.orchestrator.config import OrchestratorSettings
from ryzanstein.orchestrator.control import ControlPlane
from ryzanstein.orchestrator.leadership import ElectedLeadership, Leadership
from ryzanstein.process import awake
from ryzanstein.router import __main__ as router
from ryzanstein.router.access.limits.allowance import LimitsOf, TenantAllowance
from ryzanstein.router.assembly import Router, assembled
from ryzanstein.router.config import RouterSettings
from ryzanstein.router.opening import open_allowance
from ryzanstein.router.sessions.names import shown_id
from ryzanstein.router.telemetry import RouterTelemetry
from ryzanstein.worker import __main__ as worker
from ryzanstein.worker.agent.membership.deployed import DeployedModels
from ryzanstein.worker.agent.node import NodeAgent
from ryzanstein.worker.config import WorkerSettings
from ryzanstein.worker.ranks.starting.source import NewRankServer, RankServer
from ryzanstein.worker.text.programs.starting import ProgramBounds
from ryzanstein.worker.text.templates.renderer import LocalRenderer
from ryzanstein.worker.text.templates.rendering import RenderLimit

MODEL_FIELD = "model_of_ranks"
"""The field of log lines about ranks that names their model."""
ROUTERS: dict[Process, Router] = {}
"""The internals of each running router, for the checks."""
NODES: dict[Process, dict[str, NodeAgent]] = {}
"""The internals of each running node: the agent of each model."""
WIDE_NODES: dict[Process, WideNode] = {}
"""The internals of each running node without ranks."""
RANKS: dict[Process, NodeRanks] = {}
"""What the agents of a node fork their ranks from."""
ENGINES: dict[Process, EngineTraits] = {}
"""What a node's engine is, as its beats say."""


async def serve_router(settings: RouterSettings) -> None:
    await router.serve(settings, assemble=_assembled, new_web_face=_NoWebFace, new_metrics=_NoMetrics)


async def serve_orchestrator(settings: OrchestratorSettings) -> None:
    await orchestrator.serve(settings, orchestrator.OrchestratorMachine(_NoMetrics, _new_redis, _leads))


async def serve_node(settings: WorkerSettings) -> None:
    await worker.serve(settings, worker.NodeMachine(_NoMetrics, _Templates, _Ranks, _know, _follows))


async def serve_wide_node(node: WideNode, directory: Path) -> None:
    WIDE_NODES[_process()] = node
    await node.serve(directory)


REDIS: list[SimulatedRedis] = []
"""The Redis server of the orchestrators, if the plan has several of them."""
LEADS: dict[Process, Leadership] = {}
"""What leads in each running orchestrator, or stands by."""
ON_DEPLOYED: list[Callable[[Process, DeployedModels], None]] = []
"""Called with what follows the orchestrator in each node that starts."""
LIMITS: list[LimitsServer] = []
"""The server of the limits of tenants, if the plan has limits."""
LOST_TURNS: set[str] = set()
"""Sessions with turns that waited for the store in a router that ended.

The turns died with the router, as documented.
"""


def speaks_in(session_id: str) -> bool:
    """Returns whether a router runs a generation of this session."""
    return any(session_id == shown_id(name) for router in ROUTERS.values() for name in turns_of(router).claimed._held)


def turns_of(router: Router) -> Any:
    """Returns the router's turns, which hold the claimed sessions."""
    return router.core._turns


def forget(process: Process) -> None:
    """Forgets a process that ended."""
    if (ended := ROUTERS.get(process)) is not None:
        backlog = getattr(turns_of(ended).store, "_backlog", None)
        LOST_TURNS.update(shown_id(write.session_id) for write in getattr(backlog, "_writes", ()) if write.generation_id)
    for known in (ROUTERS, NODES, WIDE_NODES, RANKS, ENGINES, LEADS):
        known.pop(process, None)


class _NoMetrics:
    """A `MetricsPort` that nobody reads."""

    port = 0

    def __init__(self, registry: CollectorRegistry, host: str, port: int) -> None:
        pass

    def close(self) -> None:
        pass


class _NoWebFace:
    """A `WebFace` that nobody reaches."""

    port = 0

    def __init__(self, router: Router, settings: RouterSettings) -> None:
        pass

    async def start(self) -> None:
        pass

    async def live(self) -> None:
        pass

    async def stop(self, grace_s: float) -> None:
        pass


class _Templates(LocalRenderer):
    """Chat templates rendered in the one existing process."""

    def __init__(self, bounds: ProgramBounds, on_limit: Callable[[RenderLimit], None]) -> None:
        super().__init__()

    async def run(self) -> None:
        await asyncio.Event().wait()


class _Ranks:
    """A `RankSource`: the simulated ranks of the calling process."""

    def __init__(self) -> None:
        self._ranks = RANKS[_process()]

    def of(self, model: str) -> NewRankServer:
        name = model or FIRST_MODEL
        ranks = self._ranks.of(name)

        def new_server(command: Sequence[str], env: Mapping[str, str], nice: int) -> RankServer:
            # Called by the task that supervises the ranks, which then logs whose they are.
            bind_contextvars(**{MODEL_FIELD: name})
            return ranks.new_server(command, env, nice)

        return new_server

    async def close(self) -> None:
        pass


def _know(model: str, agent: NodeAgent) -> None:
    """Lets the checks find an agent, whose beats say what its engine is."""
    traits, beat = ENGINES[_process()], agent.beat
    if traits != OWN_ENGINE:
        agent.beat = lambda: replace(beat(), engine=traits)  # type: ignore[method-assign]
    NODES.setdefault(_process(), {})[model or FIRST_MODEL] = agent


def _follows(deployed: DeployedModels) -> None:
    for notify in ON_DEPLOYED:
        notify(_process(), deployed)


def _leads(lead: Leadership) -> None:
    LEADS[_process()] = lead


def control_of(process: Process) -> ControlPlane | None:
    """Returns the control plane of an orchestrator that leads and may act; None: it does not."""
    lead = LEADS.get(process)
    if not isinstance(lead, ElectedLeadership):
        return None
    control, tenure = lead._control, lead._campaign.election._tenure
    now = CLOCK.now * process.machine.clock_rate
    return control if tenure is not None and now < tenure.acts_until else None


def is_leading(process: Process) -> bool:
    return process.alive and control_of(process) is not None


def _new_redis(url: str) -> Any:
    return REDIS[0].client(_process())


def _open_limits(
    settings: RouterSettings, router_id: str, telemetry: RouterTelemetry, limits_of: LimitsOf
) -> AbstractAsyncContextManager[TenantAllowance]:
    if LIMITS:
        return open_simulated(LIMITS[0], router_id, telemetry, limits_of)
    return open_allowance(settings, router_id, telemetry, limits_of)


@contextlib.asynccontextmanager
async def _assembled(settings: RouterSettings) -> AsyncIterator[Router]:
    async with assembled(settings, _open_limits) as made:
        ROUTERS[_process()] = made
        yield made


def _process() -> Process:
    owner = OWNER.get()
    assert isinstance(owner, Process)
    return owner


_connect = sqlite3.connect
_TICK_S = awake.TICK_S


def _connected(*args: Any, **kwargs: Any) -> Any:
    """Opens a connection that is closed when its process ends, which frees its locks.

    A kernel closes files in the same way.
    """
    connection = _connect(*args, **kwargs)
    _process().on_end.append(connection.close)
    return connection


def look_every(tick_s: float | None) -> None:
    """Sets how often a service's clock checks whether its loop is on time; None: as often as by default."""
    awake.TICK_S = tick_s or _TICK_S


def install() -> None:
    """Replaces the opening of databases, permanently for this process."""
    sqlite3.connect = _connected
