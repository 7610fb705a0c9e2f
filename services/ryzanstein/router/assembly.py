"""Assembles a router from its settings and closes it. Everything is passed; nothing is global."""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
import sqlite3
import uuid
import zlib
from collections.abc import AsyncIterator, Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, TypeVar

import structlog

from ryzanstein.addresses import EVERY_HOST, is_loopback, join_address, split_address, with_port
from ryzanstein.auth.caller import Caller
from ryzanstein.auth.certificates.files import MaterialError
from ryzanstein.auth.certificates.public import PublicCertificates
from ryzanstein.auth.peers.peer import Peer, PeerRole
from ryzanstein.errors import RyzansteinError
from ryzanstein.generation.request import GenerationRequest
from ryzanstein.observe.tracing import Tracing
from ryzanstein.process.awake import AwakeClock
from ryzanstein.process.service_process import BadSettingsError
from ryzanstein.router.access.entrance import Entrance
from ryzanstein.router.access.limits.allowance import TenantAllowance
from ryzanstein.router.access.live import LOOK_S
from ryzanstein.router.authentication import open_authenticator
from ryzanstein.router.choose import Chooser, PolicyChoice
from ryzanstein.router.choose.telemetry import ChoiceTelemetry
from ryzanstein.router.config import RouterSettings
from ryzanstein.router.core.admission import Limits
from ryzanstein.router.core.clustered import ClusteredCore
from ryzanstein.router.core.local import LocalCore
from ryzanstein.router.core.parts import CoreParts, CorePolicy
from ryzanstein.router.core.peers import peer_target
from ryzanstein.router.faces.grpc.call import Calls
from ryzanstein.router.faces.grpc.embeddings import EmbeddingServicer
from ryzanstein.router.faces.grpc.inference import InferenceServicer
from ryzanstein.router.faces.grpc.operators import RouterServicer
from ryzanstein.router.faces.grpc.peers import PeerServicer, RelayServicer
from ryzanstein.router.faces.grpc.sessions import SessionServicer
from ryzanstein.router.faces.grpc.usage import UsageServicer
from ryzanstein.router.failover.placement import RunnerPolicy
from ryzanstein.router.journal.journal import Owner
from ryzanstein.router.membership.cache import ViewCache
from ryzanstein.router.membership.view import ClusterView
from ryzanstein.router.nodes.linker import Linker
from ryzanstein.router.nodes.roster import Roster
from ryzanstein.router.nodes.table import NodeTable
from ryzanstein.router.opening import OpenLimits, journalled_core, open_allowance, open_journal, open_sessions, session_bounds
from ryzanstein.router.sessions.claimed import Claimed
from ryzanstein.router.sessions.claims import Holding
from ryzanstein.router.sessions.names import OwnedSessions
from ryzanstein.router.sessions.store import SessionStore
from ryzanstein.router.sessions.turn import Turns
from ryzanstein.router.telemetry import RouterTelemetry
from ryzanstein.rpc.client import Dialer
from ryzanstein.rpc.debugging import DebugServicer, DebugSource
from ryzanstein.rpc.interceptors import RpcMetrics
from ryzanstein.rpc.reading import RequestReading
from ryzanstein.rpc.server import RpcServer
from ryzanstein.rpc.tls.protection import protection_to_wire
from ryzanstein.rpc.tls.public_tls import public_certificates, public_port
from ryzanstein.rpc.tls.tls_settings import dialer_of, service_tls
from ryzanstein.v1 import debug_pb2 as debugged
from ryzanstein.v1 import embedding_pb2 as embedding
from ryzanstein.v1 import inference_pb2 as inference
from ryzanstein.v1 import router_pb2 as operators
from ryzanstein.v1 import usage_pb2 as used
from ryzanstein.v1.debug_pb2_grpc import add_DebugServiceServicer_to_server
from ryzanstein.v1.embedding_pb2_grpc import add_EmbeddingServiceServicer_to_server
from ryzanstein.v1.inference_pb2_grpc import add_InferenceServiceServicer_to_server, add_SessionServiceServicer_to_server
from ryzanstein.v1.peer_pb2_grpc import add_PeerServiceServicer_to_server
from ryzanstein.v1.router_pb2_grpc import add_RouterServiceServicer_to_server
from ryzanstein.v1.usage_pb2_grpc import add_UsageServiceServicer_to_server
from ryzanstein.wire.requests import MostParts

log = structlog.get_logger(__name__)

if TYPE_CHECKING:
    from ryzanstein.rpc.tls.service_tls import ServiceTls

T = TypeVar("T")
_LOOPBACK = "127.0.0.1"
MAX_RPC_CONNECTIONS = 4096
"""Connections to the gRPC port with TLS, those in their handshake too: without a bound they would take all descriptors."""


@dataclass(frozen=True, slots=True)
class Router:
    """A router whose links are being established. Its faces use the rest."""

    core: LocalCore
    sessions: SessionStore
    owned: OwnedSessions
    entrance: Entrance
    tls: ServiceTls | None
    certificates: PublicCertificates | None
    rpc: RpcMetrics
    links: Roster
    linker: Linker
    telemetry: RouterTelemetry
    tracing: Tracing
    allowance: TenantAllowance


@contextlib.asynccontextmanager
async def assembled(settings: RouterSettings, open_limits: OpenLimits = open_allowance) -> AsyncIterator[Router]:
    """Yields a router that follows its cluster, and closes it on exit. `open_limits` opens what tenants may use.

    Raises OSError when its state directory cannot be used, BadSettingsError when its certificates for clients cannot.
    """
    telemetry = RouterTelemetry()
    certificates = _public_certificates(settings, telemetry)
    tls = service_tls(settings, Peer(PeerRole.ROUTER, settings.router_id), "router", telemetry.registry, telemetry.background)
    router_id = settings.router_id or (tls.peer.name if tls else f"{socket.gethostname()}-{os.getpid()}")
    dialer = dialer_of(tls)
    async with contextlib.AsyncExitStack() as stack:
        tracing = Tracing(
            "router",
            settings.otlp_endpoint,
            folder=settings.trace_dir,
            ratio=settings.trace_ratio,
            name=router_id,
            **{"service.instance.id": router_id},
        )
        # In a thread: it sends the remaining spans and blocks until that is done.
        stack.push_async_callback(asyncio.to_thread, tracing.close)
        access = await stack.enter_async_context(open_authenticator(settings, telemetry))
        sessions = await _stored(stack, open_sessions(settings, telemetry, access.limits_of), settings)
        awake = AwakeClock(telemetry.loop_lag.observe, _log_pause)
        stack.callback(awake.close)
        table = NodeTable()
        links = Roster(router_id, table, _chooser(settings, router_id, telemetry), awake)
        linker = Linker(router_id, table, settings.tuning.suspicion, telemetry, awake, dialer=dialer)
        stack.push_async_callback(linker.close)
        if tls is not None:
            tls.material.observe(lambda _: linker.distrust())
        await stack.enter_async_context(_following(settings, router_id, linker, telemetry, dialer))
        journal = await _stored(stack, open_journal(settings, dialer), settings)
        # A new id at each start: a restarted process does not have the old generations.
        owner_id = f"{router_id}/{uuid.uuid4().hex[:12]}"
        claimed = Claimed(
            sessions,
            owner_id,
            settings.tuning.claim_ttl_s,
            _no_other_router if journal is None else journal.peers.holding,
            telemetry.background,
        )
        stack.push_async_callback(claimed.close)
        allowance = await stack.enter_async_context(open_limits(settings, owner_id, telemetry, access.limits_of))
        entrance = Entrance(access.authenticator, telemetry.registry, allowance.shown)
        owned = OwnedSessions(sessions, settings.unowned_tenant)
        turns = Turns(sessions, session_bounds(settings), telemetry, claimed, owned)
        parts = CoreParts(links, turns, _policy(settings), telemetry, tracing, allowance=allowance)
        core = LocalCore(parts) if journal is None else journalled_core(journal, settings, owner_id, parts)
        stack.push_async_callback(core.close)
        telemetry.background.supervise("access", partial(_end_refused, entrance, core))
        rpc = RpcMetrics("router", telemetry.registry)
        yield Router(core, sessions, owned, entrance, tls, certificates, rpc, links, linker, telemetry, tracing, allowance)


async def _stored(stack: contextlib.AsyncExitStack, opened: AbstractAsyncContextManager[T], settings: RouterSettings) -> T:
    """Enters a store. Raises OSError, which names its directory, where SQLite cannot use that."""
    try:
        return await stack.enter_async_context(opened)
    except sqlite3.Error as error:
        option, directory = ("session", settings.session_dir) if settings.session_dir else ("state", settings.state_dir)
        remedy = f"make room there, or choose another directory with --{option}-dir"
        raise OSError(f"the state in {directory} cannot be used: {error}; {remedy}") from error


def grpc_face(router: Router, settings: RouterSettings) -> RpcServer:
    """Returns the public gRPC server, not yet started."""
    files = [inference.DESCRIPTOR, embedding.DESCRIPTOR, operators.DESCRIPTOR, used.DESCRIPTOR]
    if not settings.exposed:  # without keys, a generation's id is enough to read it, and this service lists ids
        files.append(debugged.DESCRIPTOR)
    services = [service for each in files for service in each.services_by_name.values()]
    server = RpcServer(
        settings.host,
        settings.grpc_port,
        [service.full_name for service in services],
        max_request_bytes=settings.max_request_bytes,
        max_calls=settings.grpc_max_calls,
        reading=RequestReading(settings.tuning.max_request_records, router.rpc.malformed),
        metrics=router.rpc,
        guard=router.entrance,
        health_port=settings.health_port,
        certificates=None if router.certificates is None else public_port(router.certificates),
        max_connections=None if router.certificates is None else MAX_RPC_CONNECTIONS,
        shares_port=settings.processes > 1,
        builtin=settings.grpc_server == "builtin",
    )
    calls = Calls(router.telemetry, router.tracing, router.entrance.limits_shown)
    counts = MostParts(settings.max_messages, settings.max_prompt_tokens)
    add_InferenceServiceServicer_to_server(InferenceServicer(router.core, calls, counts, router.entrance.live), server.server)
    add_SessionServiceServicer_to_server(SessionServicer(router.owned, calls, counts), server.server)
    add_EmbeddingServiceServicer_to_server(EmbeddingServicer(router.core, calls, counts), server.server)
    status = RouterServicer(
        router.links,
        router.telemetry,
        partial(protection_to_wire, settings, router.tls),
        partial(_routers, router, settings, server),
        tls=router.certificates is not None,
    )
    add_RouterServiceServicer_to_server(status, server.server)
    add_UsageServiceServicer_to_server(UsageServicer(router.allowance, calls), server.server)
    if debugged.DESCRIPTOR in files:
        source = DebugSource("router", router.links.router_id, settings, router.telemetry.registry, router.core.requests)
        add_DebugServiceServicer_to_server(DebugServicer(source), server.server)
    return server


def peer_face(router: Router, settings: RouterSettings) -> RpcServer | None:
    """Returns the gRPC server for other routers, not yet started; None where no other router knows of this one."""
    if not isinstance(router.core, ClusteredCore):
        return None
    calls = Calls(router.telemetry, router.tracing)
    server = RpcServer(
        _peer_host(settings),
        settings.peer_port,
        ["ryzanstein.v1.PeerService"],
        max_request_bytes=settings.max_request_bytes,
        max_calls=settings.grpc_max_calls,
        reading=RequestReading(settings.tuning.max_request_records, router.rpc.malformed),
        metrics=router.rpc,
        tls=router.tls,
        builtin=settings.grpc_server == "builtin",
    )
    add_PeerServiceServicer_to_server(PeerServicer(router.core, calls), server.server)
    add_InferenceServiceServicer_to_server(_relay(router.core, calls), server.server)
    return server


def _relay(core: ClusteredCore, calls: Calls) -> RelayServicer:
    return RelayServicer(core, calls)  # type: ignore[abstract]  # the other methods are not for routers: UNIMPLEMENTED


def let_find(router: Router, settings: RouterSettings, peers: RpcServer, public_port: int) -> None:
    """Publishes the addresses of this router's gRPC faces: for other routers, and for clients."""
    if isinstance(router.core, ClusteredCore):
        address = peer_target(_peer_address(settings, peers.port), peers.tls_port)
        router.core.start(address, _public_address(settings, public_port))


async def _routers(router: Router, settings: RouterSettings, server: RpcServer) -> Sequence[Owner]:
    """Returns the routers that share a store with this one, or this one alone."""
    if isinstance(router.core, ClusteredCore):
        return await router.core.routers()
    address = _public_address(settings, server.port)
    return [Owner(router.links.router_id, address, address)]


def _public_address(settings: RouterSettings, port: int) -> str:
    """Returns host:port of the gRPC face for clients, by the name that other routers know this one by."""
    given = with_port(settings.router_address, port)
    if given:
        with contextlib.suppress(ValueError):
            return join_address(split_address(given)[0], port)
    return join_address(socket.gethostname() if settings.host in EVERY_HOST else settings.host, port)


def _peer_address(settings: RouterSettings, port: int) -> str:
    given = with_port(settings.router_address, port)
    if given:
        with contextlib.suppress(ValueError):
            host, given_port = split_address(given)
            if given_port == settings.grpc_port:  # as it was while others came to the public port
                return join_address(host, port)
        return given
    host = _peer_host(settings)
    return join_address(socket.gethostname() if host in EVERY_HOST else host, port)


def _peer_host(settings: RouterSettings) -> str:
    """Returns where this router listens for others. Those that share its files are on this host."""
    return settings.host if settings.peers_on_host or is_loopback(settings.host) else _LOOPBACK


def _public_certificates(settings: RouterSettings, telemetry: RouterTelemetry) -> PublicCertificates | None:
    try:
        return public_certificates(settings.tls_cert, settings.tls_key, "router", telemetry.registry, telemetry.background)
    except MaterialError as error:
        raise BadSettingsError(str(error)) from None


@contextlib.asynccontextmanager
async def _following(
    settings: RouterSettings, router_id: str, linker: Linker, telemetry: RouterTelemetry, dialer: Dialer
) -> AsyncIterator[None]:
    fixed = [address.strip() for address in settings.nodes.split(",") if address.strip()]
    cache = ViewCache(settings.state_dir / "view.json")
    view = ClusterView(router_id, fixed, linker, cache, telemetry, dialer=dialer)
    if not settings.orchestrator:
        linker.follow(fixed)
        yield
        return
    await view.start()
    tasks = [
        telemetry.background.supervise("view", partial(view.run, settings.orchestrator)),
        telemetry.background.supervise("view_cache", cache.run),
    ]
    try:
        yield
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await cache.save()


async def _end_refused(entrance: Entrance, core: LocalCore) -> None:
    """Ends what callers still do whose keys have ended."""

    def refused(request: GenerationRequest) -> RyzansteinError | None:
        return entrance.ended(Caller(tenant=request.tenant, key_id=request.key_id))

    while True:
        await asyncio.sleep(LOOK_S)
        entrance.live.look()
        core.end_refused(refused)


def _log_pause(late_s: float) -> None:
    log.warning("event loop stalled", late_s=round(late_s, 3))


async def _no_other_router(owner_id: str, session_id: str) -> Holding:
    """Returns UNKNOWN: a router without a journal shares its sessions with no other router."""
    return Holding.UNKNOWN


def _policy(settings: RouterSettings) -> CorePolicy:
    return CorePolicy(
        runner=RunnerPolicy(
            failover_wait_s=settings.failover_wait_s,
            max_fruitless_attempts=settings.tuning.max_fruitless_attempts,
            patience=settings.tuning.patience,
            failover_to_incompatible=settings.failover_to_incompatible,
        ),
        limits=Limits(
            max_running=settings.max_running,
            max_waiting=settings.max_waiting,
            max_messages=settings.max_messages,
            max_prompt_chars=settings.max_prompt_chars,
            max_prompt_tokens=settings.max_prompt_tokens,
            max_held_prompt_bytes=settings.max_held_prompt_bytes,
        ),
        deadline_s=settings.default_deadline_s,
        reattach_window_s=settings.reattach_window_s,
        unread_grace_s=settings.unread_grace_s,
        unread_turns=settings.unread_turns,
        max_retained_tokens=settings.max_retained_tokens,
        hedges=settings.tuning.hedges,
        keep_prompt_head=settings.keep_prompt_head,
    )


def _chooser(settings: RouterSettings, router_id: str, telemetry: RouterTelemetry) -> Chooser:
    """Returns the chooser.

    Round robin starts at a different node on each router, so that routers that start together do
    not move in step.
    """
    first_turn = zlib.crc32(router_id.encode())
    choice = PolicyChoice(
        default=settings.policy, by_model=settings.model_policy, bounds=settings.tuning.policies, first_turn=first_turn
    )
    return Chooser(choice, settings.tuning.balance, ChoiceTelemetry(telemetry))
