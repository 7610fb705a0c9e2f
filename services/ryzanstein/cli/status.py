"""`ryzanstein status`: members from the orchestrator, ranks from each node, models and sessions from a router."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable
from dataclasses import asdict, dataclass
from typing import Annotated, Any, TypeVar

import grpc
import typer
from rich.console import Console
from rich.table import Table

from ryzanstein import wire
from ryzanstein.cli import display
from ryzanstein.cli.defaults import ORCHESTRATOR_ADDRESS, ROUTER_ADDRESS
from ryzanstein.cluster import Node
from ryzanstein.errors import RyzansteinError
from ryzanstein.rpc.client import open_channel
from ryzanstein.rpc.status import error_from_rpc
from ryzanstein.v1 import (
    inference_pb2,
    inference_pb2_grpc,
    orchestrator_pb2,
    orchestrator_pb2_grpc,
    worker_pb2,
    worker_pb2_grpc,
)

TIMEOUT_S = 5.0
MAX_SESSIONS = 20

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class RankView:
    rank: int
    pid: int
    phase: str
    step: int
    since_progress_s: float
    last_step_s: float
    resident_bytes: int


@dataclass(frozen=True, slots=True)
class NodeView:
    """A member and, when it answered itself, its ranks; `error` says why it did not."""

    node: Node
    ranks: tuple[RankView, ...] = ()
    rank_restarts: int = 0
    error: str = ""


@dataclass(frozen=True, slots=True)
class ModelView:
    name: str
    context_length: int
    ready_nodes: int


@dataclass(frozen=True, slots=True)
class SessionView:
    session_id: str
    node_id: str
    update_time: float


@dataclass(frozen=True, slots=True)
class ClusterView:
    """What the services said. `errors` by service: what could not be learned."""

    nodes: tuple[NodeView, ...]
    models: tuple[ModelView, ...]
    sessions: tuple[SessionView, ...]
    errors: dict[str, str]


def status(
    orchestrator: Annotated[str, typer.Option(help="host:port of the orchestrator.")] = ORCHESTRATOR_ADDRESS,
    router: Annotated[str, typer.Option(help="host:port of a router.")] = ROUTER_ADDRESS,
    as_json: Annotated[bool, typer.Option("--json", help="For scripts.")] = False,
) -> None:
    """Nodes, ranks, load, KV use, models and sessions. Exit code 1 when a service did not answer."""
    view = asyncio.run(look(orchestrator, router))
    if as_json:
        display.print_json(as_document(view))
    else:
        show(display.output(), view)
    for service, error in view.errors.items():
        display.people().print(f"{service} did not answer: {error}", style="red", markup=False, soft_wrap=True)
    raise typer.Exit(1 if view.errors else 0)


async def look(orchestrator: str, router: str) -> ClusterView:
    """Asks everybody at once; a service that does not answer within TIMEOUT_S is in `errors`."""
    errors: dict[str, str] = {}
    nodes, models, sessions = await asyncio.gather(
        _or_empty(_nodes, "orchestrator", orchestrator, errors),
        _or_empty(_models, "router", router, errors),
        _or_empty(_sessions, "router", router, errors),
    )
    return ClusterView(nodes, models, sessions, errors)


async def _or_empty(
    ask: Callable[[str], Awaitable[tuple[T, ...]]], service: str, address: str, errors: dict[str, str]
) -> tuple[T, ...]:
    try:
        return await ask(address)
    except RyzansteinError as error:
        errors[service] = f"{error.code.name}: {error.message}"
        return ()


async def _nodes(orchestrator: str) -> tuple[NodeView, ...]:
    async with open_channel(orchestrator) as channel:
        stub = orchestrator_pb2_grpc.OrchestratorServiceStub(channel)
        answer = await _call(stub.ListNodes(orchestrator_pb2.ListNodesRequest(), timeout=TIMEOUT_S))
    nodes = sorted((wire.node_from_wire(node) for node in answer.nodes), key=lambda node: node.node_id)
    return tuple(await asyncio.gather(*map(_node, nodes)))


async def _node(node: Node) -> NodeView:
    async with open_channel(node.address) as channel:
        stub = worker_pb2_grpc.WorkerServiceStub(channel)
        try:
            answer = await _call(stub.GetStatus(worker_pb2.GetStatusRequest(), timeout=TIMEOUT_S))
        except RyzansteinError as error:
            return NodeView(node, error=f"{error.code.name}: {error.message}")
    return NodeView(node, tuple(map(_rank, answer.ranks)), answer.rank_restarts)


def _rank(rank: worker_pb2.RankStatus) -> RankView:
    return RankView(
        rank=rank.rank,
        pid=rank.pid,
        phase=rank.phase,
        step=rank.step,
        since_progress_s=rank.since_progress.ToNanoseconds() / 1e9,
        last_step_s=rank.last_step.ToNanoseconds() / 1e9,
        resident_bytes=rank.resident_bytes,
    )


async def _models(router: str) -> tuple[ModelView, ...]:
    async with open_channel(router) as channel:
        stub = inference_pb2_grpc.InferenceServiceStub(channel)
        answer = await _call(stub.ListModels(inference_pb2.ListModelsRequest(), timeout=TIMEOUT_S))
    return tuple(ModelView(model.name, model.context_length, model.ready_nodes) for model in answer.models)


async def _sessions(router: str) -> tuple[SessionView, ...]:
    """The sessions used last."""
    async with open_channel(router) as channel:
        stub = inference_pb2_grpc.SessionServiceStub(channel)
        request = inference_pb2.ListSessionsRequest(page_size=MAX_SESSIONS)
        answer = await _call(stub.ListSessions(request, timeout=TIMEOUT_S))
    return tuple(
        SessionView(session.session_id, session.node_id, session.update_time.ToNanoseconds() / 1e9)
        for session in answer.sessions
    )


async def _call(call: Awaitable[T]) -> T:
    try:
        return await call
    except grpc.aio.AioRpcError as failure:
        raise error_from_rpc(failure) from failure


def as_document(view: ClusterView) -> dict[str, Any]:
    """For scripts; the state by its name, times in seconds."""
    document = asdict(view)
    for shown, node_view in zip(document["nodes"], view.nodes, strict=True):
        shown["node"]["state"] = node_view.node.state.name
    return document


def show(console: Console, view: ClusterView) -> None:
    console.print(node_table(view))
    console.print(_rank_table(view))
    console.print(_model_table(view))
    console.print(_session_table(view))


def node_table(view: ClusterView) -> Table:
    """Members with their state and load."""
    table = Table("node", "state", "model", "tp", "running", "waiting", "KV blocks", "restarts", "beat", title="nodes")
    now = time.time()
    for each in view.nodes:
        node, load = each.node, each.node.load
        state = f"{node.state.name} (drains)" if node.drain_requested else node.state.name
        beat = f"{max(0.0, now - node.beat_time):.1f} s ago" if not each.error else each.error
        kv = f"{load.kv_blocks_used}/{load.kv_blocks_total}"
        running = f"{load.running}/{load.capacity}"
        table.add_row(
            node.node_id, state, node.model, str(node.tp), running, str(load.waiting), kv, str(each.rank_restarts), beat
        )
    return table


def _rank_table(view: ClusterView) -> Table:
    table = Table("node", "rank", "pid", "phase", "step", "last step", "memory", title="ranks")
    for each in view.nodes:
        for rank in each.ranks:
            last_step, memory = display.milliseconds(rank.last_step_s), display.binary_bytes(rank.resident_bytes)
            table.add_row(each.node.node_id, str(rank.rank), str(rank.pid), rank.phase, str(rank.step), last_step, memory)
    return table


def _model_table(view: ClusterView) -> Table:
    table = Table("model", "context", "ready nodes", title="models")
    for model in view.models:
        table.add_row(model.name, str(model.context_length), str(model.ready_nodes))
    return table


def _session_table(view: ClusterView) -> Table:
    table = Table("session", "node", "used", title=f"sessions (last {MAX_SESSIONS})")
    now = time.time()
    for session in view.sessions:
        table.add_row(session.session_id, session.node_id, f"{max(0.0, now - session.update_time):.0f} s ago")
    return table
