"""Queries a whole cluster for its state.

The orchestrator reports members, a router links and models, and each node its ranks.

Nodes that only the router knows are queried too, so that this works without an orchestrator.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Coroutine
from dataclasses import replace
from functools import partial
from itertools import chain
from typing import Any, Protocol, TypeVar

from ryzanstein.cluster import Beat, ModelReport, Node, NodeState
from ryzanstein.errors import RyzansteinError
from ryzanstein.rpc.client import PLAIN, Dialer
from ryzanstein.rpc.status import answered
from ryzanstein.survey.reach import ANY_NODE, ORCHESTRATOR, KeyedRouter
from ryzanstein.survey.views import (
    ClusterStatus,
    Distribution,
    EngineFigures,
    EngineView,
    LinkLossView,
    LinkView,
    ModelView,
    NodeStatus,
    OrchestratorView,
    ProtectionView,
    RankLossView,
    RankView,
    RouterFigures,
    RouterMember,
    RouterView,
    SessionView,
)
from ryzanstein.v1 import (
    inference_pb2,
    inference_pb2_grpc,
    orchestrator_pb2,
    orchestrator_pb2_grpc,
    router_pb2,
    router_pb2_grpc,
    worker_pb2,
    worker_pb2_grpc,
)
from ryzanstein.wire.enum_names import enum_name
from ryzanstein.wire.membership import beat_from_wire, node_from_wire

TIMEOUT_S = 5.0
NODE_TIMEOUT_S = 2.0
MAX_SESSIONS = 20

T = TypeVar("T")


class Ask(Protocol):
    """How a question is asked. `key` is the same each time that the same service is asked the same. Raises RyzansteinError."""

    def __call__(self, key: tuple[str, ...], question: Callable[[], Coroutine[Any, Any, T]]) -> Awaitable[T]: ...


def _ask(key: tuple[str, ...], question: Callable[[], Coroutine[Any, Any, T]]) -> Awaitable[T]:
    return question()


async def look(orchestrator: str, router: KeyedRouter, dialer: Dialer = PLAIN, ask: Ask = _ask) -> ClusterStatus:
    """Queries all services at once. `dialer` reaches the orchestrator and nodes; a router's port is a public one.

    A service that does not answer within TIMEOUT_S is in `errors`. `ask` may answer with what is known already.
    """
    errors: dict[str, str] = {}
    (members, control), (links, routers), models, sessions = await asyncio.gather(
        _or(ask(("members",), partial(_members, orchestrator, dialer)), ((), OrchestratorView()), "orchestrator", errors),
        _or(ask(("router",), partial(_router, router)), (RouterView(), ()), "router", errors),
        _or(ask(("models",), partial(_models, router)), (), "router", errors),
        _or(ask(("sessions",), partial(_sessions, router)), (), "session store", errors),
    )
    if "router" in errors:
        errors.pop("session store", None)  # the router, which answers for the store, was unreachable

    def told(node: Node) -> Awaitable[list[worker_pb2.GetStatusResponse]]:
        return ask(("node", node.address), partial(_answers, node.address, dialer))

    asked = [_models_of(node, True, told(node)) for node in members]
    asked += [_models_of(node, False, told(node)) for node in _only_linked(links, members)]
    nodes = await asyncio.gather(*asked)
    return ClusterStatus(tuple(chain.from_iterable(nodes)), links, models, sessions, errors, control, routers)


async def router_figures(router: KeyedRouter) -> RouterFigures | None:
    """Returns what a router counted; None: it does not answer, or is an older one."""
    try:
        async with router.open() as channel:
            stub = router_pb2_grpc.RouterServiceStub(channel)
            answer = await answered(stub.GetRouterStatus(router_pb2.GetRouterStatusRequest(), timeout=TIMEOUT_S))
    except RyzansteinError:
        return None
    return _router_figures(answer.figures) if answer.HasField("figures") else None


async def _or(asked: Awaitable[T], nothing: T, service: str, errors: dict[str, str]) -> T:
    try:
        return await asked
    except RyzansteinError as error:
        errors[service] = f"{error.code.name}: {error.message}"
        return nothing


async def _members(orchestrator: str, dialer: Dialer) -> tuple[tuple[Node, ...], OrchestratorView]:
    async with dialer.open(orchestrator, ORCHESTRATOR) as channel:
        stub = orchestrator_pb2_grpc.OrchestratorServiceStub(channel)
        answer = await answered(stub.ListNodes(orchestrator_pb2.ListNodesRequest(), timeout=TIMEOUT_S))
    members = [node_from_wire(node) for node in answer.nodes]
    dialled = [replace(node, address=node.address_with(tls=dialer.secure) or node.address) for node in members]
    return tuple(sorted(dialled, key=lambda node: node.node_id)), OrchestratorView(_protection(answer.protection))


def _only_linked(router: RouterView, members: tuple[Node, ...]) -> list[Node]:
    known = {node.address for node in members}
    return [
        Node(link.node_id or link.address, link.address, tp=0, state=link.state)
        for link in router.links
        if link.address not in known
    ]


async def _models_of(node: Node, member: bool, told: Awaitable[list[worker_pb2.GetStatusResponse]]) -> list[NodeStatus]:
    """Returns the node's status with its first model, and one for each further model that it has.

    The orchestrator may know of models that the node has no ranks for, and the node of some that the
    orchestrator has not heard of yet.
    """
    reports = {report.model: report for report in node.models}
    try:
        answers = await told
    except RyzansteinError as error:
        why = f"{error.code.name}: {error.message}"
        first = NodeStatus(node, error=why, member=member, report=reports.pop(node.model, None))
        return [first, *(_reported(node, report, why) for report in reports.values())]
    first = _status(node, answers[0], member, reports.pop(answers[0].beat.model, None))
    names = answers[0].beat.other_models
    further = [_further(node, each, reports.pop(name, None)) for name, each in zip(names, answers[1:], strict=True)]
    return [first, *further, *(_reported(node, report) for report in reports.values())]


async def _answers(address: str, dialer: Dialer) -> list[worker_pb2.GetStatusResponse]:
    """Returns the node's own status of each model, the first one first."""
    async with dialer.open(address, ANY_NODE) as channel:
        stub = worker_pb2_grpc.WorkerServiceStub(channel)
        first = await answered(stub.GetStatus(worker_pb2.GetStatusRequest(), timeout=NODE_TIMEOUT_S))
        requests = [worker_pb2.GetStatusRequest(model=model) for model in first.beat.other_models]
        return [first, *[await answered(stub.GetStatus(request, timeout=NODE_TIMEOUT_S)) for request in requests]]


def _further(node: Node, answer: worker_pb2.GetStatusResponse, report: ModelReport | None) -> NodeStatus:
    status = _status(replace(node, node_id=answer.node_id, tp=0, models=(), memory_bytes=0), answer, False, report)
    return replace(status, further=True)


def _reported(node: Node, report: ModelReport, error: str = "") -> NodeStatus:
    """Returns the status of a model of which only the orchestrator knows."""
    visible = replace(
        node,
        node_id=f"{node.node_id}/{report.model}",
        state=report.state,
        model=report.model,
        context_length=report.context_length,
        load=report.load,
        models=(),
        memory_bytes=0,
    )
    return NodeStatus(visible, error=error, reason=report.reason, further=True, report=report)


def _status(node: Node, answer: worker_pb2.GetStatusResponse, member: bool, report: ModelReport | None) -> NodeStatus:
    losses = tuple(
        RankLossView(loss.time.ToNanoseconds() / 1e9, loss.rank, loss.cause, loss.message, loss.last_words)
        for loss in answer.recent_losses
    )
    ranks = tuple(map(_rank, answer.ranks))
    node = node if member else _as_it_says(node, beat_from_wire(answer.beat), len(ranks))
    return NodeStatus(
        node,
        ranks,
        answer.rank_restarts,
        "",
        answer.beat.reason,
        losses,
        member,
        report=report,
        protection=_protection(answer.protection),
        engine=_engine(answer.beat),
        figures=_engine_figures(answer.figures) if answer.HasField("figures") else None,
    )


def _as_it_says(node: Node, beat: Beat, tp: int) -> Node:
    """Returns a node that the orchestrator does not know, filled in from the node's own report."""
    return replace(node, tp=tp, state=beat.state, model=beat.model, context_length=beat.context_length, load=beat.load)


def _rank(rank: worker_pb2.RankStatus) -> RankView:
    return RankView(
        rank=rank.rank,
        pid=rank.pid,
        phase=rank.phase,
        step=rank.step,
        since_progress_s=rank.since_progress.ToNanoseconds() / 1e9,
        last_step_s=rank.last_step.ToNanoseconds() / 1e9,
        resident_bytes=rank.resident_bytes,
        loaded_bytes=rank.loaded_bytes,
        load_bytes=rank.load_bytes,
    )


def _engine_figures(told: worker_pb2.EngineFigures) -> EngineFigures:
    return EngineFigures(
        prefill_tokens=told.prefill_tokens,
        decode_tokens=told.decode_tokens,
        prefix_queries=told.prefix_queries,
        prefix_hits=told.prefix_hits,
        preemptions=told.preemptions,
        waiting=dict(told.waiting),
        expected_wait_s=told.expected_wait.ToNanoseconds() / 1e9,
        kv_blocks_cached=told.kv_blocks_cached,
        hot_pages_held=told.hot_pages_held,
        hot_pages_cached=told.hot_pages_cached,
        pages_sealed=told.pages_sealed,
        kv_bytes_borrowed=told.kv_bytes_borrowed,
        kv_bytes_lent=told.kv_bytes_lent,
    )


def _router_figures(told: router_pb2.RouterFigures) -> RouterFigures:
    return RouterFigures(
        start_time=told.start_time.ToNanoseconds() / 1e9,
        generated_tokens=told.generated_tokens,
        prompt_tokens=told.prompt_tokens,
        running=told.running,
        waiting=told.waiting,
        ended=dict(told.ended),
        failovers=told.failovers,
        time_to_first_token=_distribution(told.time_to_first_token),
        time_per_output_token=_distribution(told.time_per_output_token),
    )


def _distribution(told: router_pb2.Distribution) -> Distribution:
    """Returns a histogram; an empty one where its counts do not fit its bounds."""
    if len(told.counts) != len(told.upper_bounds) + 1:
        return Distribution()
    return Distribution(tuple(told.upper_bounds), tuple(told.counts), told.sum)


async def _router(router: KeyedRouter) -> tuple[RouterView, tuple[RouterMember, ...]]:
    """Returns the router's view of itself, and the routers that it knows: itself alone if it is an older one."""
    async with router.open() as channel:
        stub = router_pb2_grpc.RouterServiceStub(channel)
        answer = await answered(stub.GetRouterStatus(router_pb2.GetRouterStatusRequest(), timeout=TIMEOUT_S))
        try:
            known = await answered(stub.ListRouters(router_pb2.ListRoutersRequest(), timeout=TIMEOUT_S))
        except RyzansteinError:  # an older router, or one whose journal is away
            known = router_pb2.ListRoutersResponse(
                routers=[router_pb2.RouterMember(router_id=answer.router_id, address=router.address)]
            )
    routers = tuple(RouterMember(each.router_id, each.address, each.draining, each.tls) for each in known.routers)
    losses = (
        LinkLossView(loss.time.ToNanoseconds() / 1e9, loss.node_id, loss.cause, loss.inflight) for loss in answer.recent_losses
    )
    links, figures = tuple(map(_link, answer.links)), _router_figures(answer.figures) if answer.HasField("figures") else None
    return RouterView(answer.router_id, links, tuple(losses), _protection(answer.protection), figures), routers


def _protection(told: worker_pb2.Protection) -> ProtectionView:
    expires, life = told.certificate_expires.ToNanoseconds(), told.certificate_life.ToNanoseconds()
    return ProtectionView(told.insecure, told.tls, expires / 1e9, life / 1e9)


def _link(link: router_pb2.LinkStatus) -> LinkView:
    return LinkView(
        node_id=link.node_id,
        address=link.address,
        up=link.up,
        suspicion=link.suspicion,
        breaker=enum_name(router_pb2.BreakerState, link.breaker),
        inflight=link.inflight,
        state=NodeState(link.state),
        reason=link.reason,
        clock_skew_s=link.clock_skew.ToNanoseconds() / 1e9,
        failure=link.failure,
        engine=_engine(link),
    )


def _engine(told: worker_pb2.Beat | router_pb2.LinkStatus) -> EngineView:
    return EngineView(told.engine, tuple(told.unsupported), not told.continues_inexactly, told.reserve)


async def _models(router: KeyedRouter) -> tuple[ModelView, ...]:
    """Returns the models. Their adapters are left out: there may be thousands."""
    async with router.open() as channel:
        stub = inference_pb2_grpc.InferenceServiceStub(channel)
        answer = await answered(stub.ListModels(inference_pb2.ListModelsRequest(), timeout=TIMEOUT_S))
    return tuple(ModelView(each.name, each.context_length, each.ready_nodes) for each in answer.models if not each.parent)


async def _sessions(router: KeyedRouter) -> tuple[SessionView, ...]:
    """Returns the most recently used sessions."""
    async with router.open() as channel:
        stub = inference_pb2_grpc.SessionServiceStub(channel)
        request = inference_pb2.ListSessionsRequest(page_size=MAX_SESSIONS)
        answer = await answered(stub.ListSessions(request, timeout=TIMEOUT_S))
    return tuple(
        SessionView(session.session_id, session.node_id, session.update_time.ToNanoseconds() / 1e9)
        for session in answer.sessions
    )
