"""The members of the cluster, from the orchestrator's watch, a fixed list, and the cached view.

The orchestrator is never on a request's path. While it is gone, the last view holds; a router that
starts meanwhile uses the view that it kept in its state directory. The view decides which nodes to
link; only the links know which are alive.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator, Collection, Iterator
from dataclasses import dataclass, field
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


@dataclass(slots=True)
class View:
    """The orchestrator's members at a version of an epoch. Pure: it only applies messages.

    `secure`: its router dials with TLS, so nodes without it are not reached.
    """

    secure: bool = False
    epoch: str = ""
    version: int = 0
    nodes: dict[str, Node] = field(default_factory=dict)

    def apply(self, message: orchestrator.WatchClusterResponse) -> None:
        """Applies a message. Raises ChangeMissedError when a delta is not the next one."""
        if message.HasField("snapshot"):
            snapshot = message.snapshot
            self.epoch, self.version = snapshot.epoch, snapshot.version
            self.nodes = {node.node_id: node_from_wire(node) for node in snapshot.nodes}
        elif message.HasField("delta"):
            self._change(message.delta)

    def _change(self, delta: orchestrator.ClusterDelta) -> None:
        if not self.epoch or delta.version != self.version + 1:
            raise ChangeMissedError(f"version {delta.version} after {self.version}")
        self.version = delta.version
        match delta.WhichOneof("change"):
            case "node":
                self.nodes[delta.node.node_id] = node_from_wire(delta.node)
            case "node_left":
                self.nodes.pop(delta.node_left, None)

    @property
    def addresses(self) -> frozenset[str]:
        return frozenset(filter(None, (node.address_with(tls=self.secure) for node in self.nodes.values())))

    @property
    def draining(self) -> frozenset[str]:
        return frozenset(node.node_id for node in self.nodes.values() if node.drain_requested)

    @property
    def models(self) -> frozenset[str]:
        """The models of all nodes, ready or not, without those that a node refused or unloaded for good."""
        names = (name for node in self.nodes.values() for name in _models_of(node))
        return frozenset(name for name in names if 0 < len(name) <= MAX_NAME_CHARS)


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
        self._notified: tuple[frozenset[str], ...] | None = None

    async def start(self) -> None:
        """Notifies the observer of what is known before the orchestrator was contacted."""
        self._tell(self._fixed | await self._cache.load(), frozenset(), frozenset())

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
            watcher_id=self._router_id, known_epoch=known.epoch, known_leader_id=known.leader_id
        )
        try:
            async for message in _while_alive(stub.WatchCluster(request), limit_s):
                self._leader.follow(leader_from_wire(message))
                came = True
                view.apply(message)
                if message.HasField("snapshot"):
                    self._count_resync(view)
                    self._view = view
                await self._changed()
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

    async def _changed(self) -> None:
        addresses = self._view.addresses | self._fixed
        if self._tell(addresses, self._view.draining, self._view.models) and self._view.addresses:
            await self._cache.save(self._view.addresses)

    def _tell(self, *text: frozenset[str]) -> bool:
        """Notifies the observer of addresses, draining nodes and models.

        Returns False if nothing changed: most deltas only change a load.
        """
        if text == self._notified:
            return False
        self._membership.follow(*text)
        self._notified = text
        return True
