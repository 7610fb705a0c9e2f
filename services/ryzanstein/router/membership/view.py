"""The members of the cluster, from the orchestrator's watch, a fixed list, and the cached view.

The orchestrator is never on a request's path. While it is gone, the last view holds; a router that
starts meanwhile uses the view that it kept in its state directory. The view decides which nodes to
link; only the links know which are alive.
"""

from __future__ import annotations

import asyncio
import random
from collections import Counter
from collections.abc import AsyncIterator, Collection, Iterable, Iterator
from dataclasses import dataclass, field, replace
from logging import DEBUG, WARNING
from typing import Any, Protocol

import grpc
import structlog

from ryzanstein.auth.peers.peer import Peer, PeerRole
from ryzanstein.cluster import NO_MODEL, Node, NodeState
from ryzanstein.generation.prompts import MAX_NAME_CHARS
from ryzanstein.leaders.addresses import OrchestratorAddresses
from ryzanstein.leaders.epochs import KnownLeader, StaleLeaderError
from ryzanstein.router.membership.cache import ViewCache
from ryzanstein.router.telemetry import RouterTelemetry
from ryzanstein.rpc.client import PLAIN, Dialer
from ryzanstein.rpc.status import leader_named_by
from ryzanstein.v1 import orchestrator_pb2 as orchestrator
from ryzanstein.v1.orchestrator_pb2_grpc import OrchestratorServiceStub
from ryzanstein.wire.membership import leader_from_wire, node_from_wire

log = structlog.get_logger(__name__)

FIRST_BACKOFF_S = 0.1
LONGEST_BACKOFF_S = 2.0
SILENT_S = 5.0


class ViewObserver(Protocol):
    """Receives the view."""

    def follow(self, addresses: Collection[str], draining: Collection[str] = (), models: Collection[str] = ()) -> None:
        """Called with the addresses in the cluster, the ids of nodes that take nothing new, and all models."""
        ...


class ChangeMissedError(Exception):
    """A version is missing: a new snapshot is needed."""


@dataclass(frozen=True, slots=True)
class Membership:
    """What a router needs of a view: the addresses to link, the ids of nodes that take nothing new, and all models."""

    addresses: frozenset[str] = frozenset()
    draining: frozenset[str] = frozenset()
    models: frozenset[str] = frozenset()


@dataclass(slots=True)
class View:
    """The orchestrator's members at a version of an epoch. Pure: it only applies messages.

    `secure`: its router dials with TLS, so nodes without it are not reached.
    """

    secure: bool = False
    epoch: str = ""
    version: int = 0
    nodes: dict[str, Node] = field(default_factory=dict)
    _addresses: Counter[str] = field(default_factory=Counter)
    _draining: set[str] = field(default_factory=set)
    _models: Counter[str] = field(default_factory=Counter)
    _membership: Membership | None = None

    def apply(self, message: orchestrator.WatchClusterResponse) -> None:
        """Applies a message. Raises ChangeMissedError when a delta is not the next one."""
        if message.HasField("snapshot"):
            snapshot = message.snapshot
            self.epoch, self.version = snapshot.epoch, snapshot.version
            for node_id in list(self.nodes):
                self._remove(node_id)
            for node in snapshot.nodes:
                self._put(node_from_wire(node))
        elif message.HasField("delta"):
            self._change(message.delta)

    def _change(self, delta: orchestrator.ClusterDelta) -> None:
        if not self.epoch or delta.version != self.version + 1:
            raise ChangeMissedError(f"version {delta.version} after {self.version}")
        self.version = delta.version
        match delta.WhichOneof("change"):
            case "node":
                self._put(node_from_wire(delta.node))
            case "node_left":
                self._remove(delta.node_left)

    def _put(self, node: Node) -> None:
        before = self.nodes.get(node.node_id)
        if before is None or self._share(node) != self._share(before):
            self._remove(node.node_id)
            self._count(node, 1)
        self.nodes[node.node_id] = node

    def _remove(self, node_id: str) -> None:
        node = self.nodes.pop(node_id, None)
        if node is not None:
            self._count(node, -1)

    def _share(self, node: Node) -> tuple[str, bool, frozenset[str]]:
        """Returns what a node adds to the membership: most changes are only of its load."""
        models = frozenset(name for name in _models_of(node) if 0 < len(name) <= MAX_NAME_CHARS)
        return node.address_with(tls=self.secure), node.drain_requested, models

    def _count(self, node: Node, times: int) -> None:
        address, draining, models = self._share(node)
        _add(self._addresses, [address] if address else [], times)
        _add(self._models, models, times)
        if draining:
            (self._draining.add if times > 0 else self._draining.discard)(node.node_id)
        self._membership = None

    @property
    def membership(self) -> Membership:
        """What a router needs of it. The same object as long as nothing of it changes."""
        if self._membership is None:
            self._membership = Membership(frozenset(self._addresses), frozenset(self._draining), frozenset(self._models))
        return self._membership

    @property
    def addresses(self) -> frozenset[str]:
        return self.membership.addresses

    @property
    def draining(self) -> frozenset[str]:
        return self.membership.draining

    @property
    def models(self) -> frozenset[str]:
        """The models of all nodes, ready or not, without those that a node refused or unloaded for good."""
        return self.membership.models


def _add(counts: Counter[str], names: Iterable[str], times: int) -> None:
    for name in names:
        counts[name] += times
        if not counts[name]:
            del counts[name]


def _models_of(node: Node) -> Iterator[str]:
    if not node.plural:
        yield node.model
    for report in node.models:
        unloaded = report.state is NodeState.STARTING and report.reason == NO_MODEL and not report.asleep
        if report.state is not NodeState.FAILED and not unloaded:
            yield report.model


async def _while_alive(call: Any, limit_s: float | None) -> AsyncIterator[orchestrator.WatchClusterResponse]:
    """Yields the messages of a watch. Raises TimeoutError when none comes for so long.

    One of several orchestrators sends signs of life. From the first one on there is a limit in any case.
    """
    messages = aiter(call)
    try:
        while True:
            async with asyncio.timeout(limit_s):
                message = await anext(messages, None)
            if message is None:
                return
            if message.WhichOneof("kind") is None:
                limit_s = SILENT_S
            yield message
    finally:
        call.cancel()


class ClusterView:
    """Keeps a `ViewObserver` up to date.

    Call `start` in any case; start `run` as a task when there is an orchestrator.
    """

    def __init__(
        self,
        router_id: str,
        fixed: Collection[str],
        membership: ViewObserver,
        cache: ViewCache,
        telemetry: RouterTelemetry,
        *,
        dialer: Dialer = PLAIN,
    ) -> None:
        self._dialer = dialer
        self._router_id = router_id
        self._fixed = frozenset(fixed)
        self._membership = membership
        self._cache = cache
        self._telemetry = telemetry
        self._view = View()
        self._leader = KnownLeader()
        self._seen: Membership | None = None
        self._told: Membership | None = None

    async def start(self) -> None:
        """Notifies the observer of what is known before the orchestrator was contacted."""
        self._tell(Membership(self._fixed | await self._cache.load()))

    async def run(self, address: str) -> None:
        """Follows the orchestrator, or that of several which leads, until cancelled, through restarts and absence."""
        backoff_s = FIRST_BACKOFF_S
        addresses = OrchestratorAddresses(address)
        while True:
            async with self._dialer.open(addresses.current, Peer(PeerRole.ORCHESTRATOR), retries=False) as channel:
                limit_s = SILENT_S if addresses.several else None
                came, leader, silent = await self._watch(OrchestratorServiceStub(channel), limit_s)
            if came:
                backoff_s = FIRST_BACKOFF_S
                addresses.answered()
            if addresses.failed(leader, silent=silent):
                continue
            await asyncio.sleep(backoff_s * random.uniform(0.5, 1.0))
            backoff_s = min(2 * backoff_s, LONGEST_BACKOFF_S)

    async def _watch(self, stub: Any, limit_s: float | None) -> tuple[bool, str, bool]:
        """Follows one watch to its end. Returns whether anything came, the leader that was named, whether it fell silent."""
        view, came, leader, silent = View(self._dialer.secure), False, "", False
        known = self._leader.latest
        request = orchestrator.WatchClusterRequest(
            watcher_id=self._router_id, omit_loads=True, known_epoch=known.epoch, known_leader_id=known.leader_id
        )
        try:
            async for message in _while_alive(stub.WatchCluster(request), limit_s):
                self._leader.follow(leader_from_wire(message))
                came = True
                view.apply(message)
                if message.HasField("snapshot"):
                    self._count_resync(view)
                    self._view = view
                self._changed()
        except grpc.aio.AioRpcError as error:
            leader = leader_named_by(error)
            refused = error.code() is grpc.StatusCode.PERMISSION_DENIED
            log.log(WARNING if refused else DEBUG, "orchestrator watch ended", code=error.code().name, why=error.details())
        except TimeoutError:
            silent = True
            log.warning("orchestrator fell silent")
        except StaleLeaderError as stale:
            log.warning("view of a stale leader refused", what=str(stale))
        except ChangeMissedError as gap:
            log.warning("view has a gap", what=str(gap))
        return came, leader, silent

    def _count_resync(self, taken: View) -> None:
        """Counts a new snapshot, except the first.

        A snapshot of another epoch means that the orchestrator restarted.
        """
        if self._view.epoch:
            self._telemetry.view_resyncs.labels("gap" if taken.epoch == self._view.epoch else "epoch").inc()

    def _changed(self) -> None:
        """Notifies the observer, and keeps the addresses, if anything of them changed: most messages only change a load."""
        seen = self._view.membership
        if seen is self._seen:
            return
        told = replace(seen, addresses=seen.addresses | self._fixed)
        if told != self._told:
            self._tell(told)
            if seen.addresses:
                self._cache.keep(seen.addresses)
        self._seen = seen

    def _tell(self, membership: Membership) -> None:
        self._membership.follow(membership.addresses, membership.draining, membership.models)
        self._told = membership
