"""Opens and closes links to the members, and records in the table what happens to them.

Membership decides which nodes to link; the links show which are alive. A node that left the
membership keeps its links until they have all ended, so a lease that an orchestrator's restart lost
breaks nothing.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Collection, Set

import structlog

from ryzanstein.auth.peers.peer import Peer, PeerRole
from ryzanstein.process.awake import AwakeClock
from ryzanstein.router.nodes.breaker import Breaker, BreakerState
from ryzanstein.router.nodes.compatibility import NumericsWatch
from ryzanstein.router.nodes.index import further_models
from ryzanstein.router.nodes.links.connection import NOT_TRUSTED
from ryzanstein.router.nodes.links.link import CLOSED, NodeLink
from ryzanstein.router.nodes.links.phi_detector import PhiThresholds
from ryzanstein.router.nodes.table import NodeTable
from ryzanstein.router.telemetry import RouterTelemetry
from ryzanstein.rpc.client import PLAIN, Dialer

log = structlog.get_logger(__name__)


class Linker:
    """Links the nodes of a router. Call `follow` with the membership, and `close` at the end."""

    def __init__(
        self,
        router_id: str,
        table: NodeTable,
        thresholds: PhiThresholds,
        telemetry: RouterTelemetry,
        awake: AwakeClock,
        *,
        dialer: Dialer = PLAIN,
    ) -> None:
        self._router_id = router_id
        self._dialer = dialer
        self._impostors: set[tuple[str, str]] = set()  # node id and address, each logged once
        self._table = table
        self._thresholds = thresholds
        self._telemetry = telemetry
        self._awake = awake
        self._closing: set[asyncio.Task[None]] = set()
        self._suspected: set[str] = set()
        self._numerics_watch = NumericsWatch(telemetry.compatibility)
        self._followed: set[str] = set()
        self._at: dict[str, dict[str, NodeLink]] = {}  # by address and model
        self._names: dict[NodeLink, str] = {}

    @property
    def links(self) -> Collection[NodeLink]:
        """All open links, also of nodes that left the membership."""
        return self._table.links.keys()

    def follow(self, addresses: Collection[str], draining: Collection[str] = (), models: Collection[str] = ()) -> None:
        """Links exactly these addresses. The links to another address end when none of them is up.

        `draining`: node ids. `models`: what the nodes serve, as the orchestrator knows it. Looks only at
        what differs from before.
        """
        now, before = frozenset(addresses), self._followed
        self._followed = set(now)
        self._drain(frozenset(draining))
        self._table.listed_models = frozenset(models)
        for address in sorted(now - before):
            self._join(address)
        for address in before - now:
            self._leave(address)
        self._table.notify(())

    def _drain(self, draining: frozenset[str]) -> None:
        changed, self._table.draining = self._table.draining ^ draining, draining
        for link in [self._table.nodes[node_id] for node_id in changed if node_id in self._table.nodes]:
            self._changed(link)

    def _join(self, address: str) -> None:
        link = self._open_at(address)
        if link is None:
            self._open(address)
        else:
            self._stay(link)
            self._follow_models(link)

    def _leave(self, address: str) -> None:
        link = self._open_at(address)
        if link is not None:
            self._depart(link)
            self._follow_models(link)

    def _follow_models(self, first: NodeLink) -> None:
        """Opens and closes links so that each further model of this link's node has one.

        The links of a node that is down are kept.
        """
        if first.model or not (first.connected or first.departed):
            return
        wanted = () if first.departed else further_models(first.beat)
        for model in wanted:
            link = self._open_at(first.address, model)
            if link is None:
                self._open(first.address, model)
            else:
                self._stay(link)
        for link in list(self._at.get(first.address, {}).values()):
            if link.model and link.model not in wanted:
                self._depart(link)

    def _open_at(self, address: str, model: str = "") -> NodeLink | None:
        """Returns the link to a model of the node at an address; None if there is none or it has just ended."""
        link = self._at.get(address, {}).get(model)
        return None if link is None or self._table.links[link].done() else link

    def _stay(self, link: NodeLink) -> None:
        if link.departed:
            link.departed = False
            self._renew(link)

    def _depart(self, link: NodeLink) -> None:
        if not link.departed:
            link.departed = True
            self._renew(link)
        if not link.connected and not self.outlives(link):
            self._close(link)

    def _open(self, address: str, model: str = "") -> None:
        link = NodeLink(address, self._router_id, self._thresholds, self, self._awake, model=model, dialer=self._dialer)
        task = self._telemetry.background.supervise("link", link.run, finite=True)
        self._table.links[link] = task
        self._at.setdefault(address, {})[model] = link
        self._table.settle(link)
        task.add_done_callback(lambda task: self._gone(link, task))

    def _close(self, link: NodeLink) -> None:
        """Starts to close a link. An address that returns before it is closed gets a new link."""
        task = self._table.links[link]
        self._forget(link)
        task.cancel()
        self._closing.add(task)

    def _forget(self, link: NodeLink) -> None:
        """Forgets an open link."""
        self._table.links.pop(link, None)
        self._table.settle(link)
        links = self._at.get(link.address, {})
        if links.get(link.model) is link:
            del links[link.model]
        if not links:
            self._at.pop(link.address, None)

    def outlives(self, link: NodeLink) -> bool:
        """Returns whether the node of a departed link is up and still has the link's model.

        The orchestrator may have lost sight of a node that other links reach.
        """
        links = self._at.get(link.address, {})
        first = links.get("")
        listed = first is not None and link.model in ("", *further_models(first.beat))
        return listed and any(other.connected for other in links.values())

    def _gone(self, link: NodeLink, task: asyncio.Task[None]) -> None:
        if not link.model and self._at.get(link.address, {}).get("") is link:
            self._followed.discard(link.address)  # to be linked again with the next view that has it
        self._forget(link)
        self._closing.discard(task)
        if link.known_model and link.departed and not self._unlisted(link):
            self._table.departed_models.add(link.known_model)
        self._forget_name(link, but="")

    def _unlisted(self, link: NodeLink) -> bool:
        """Returns whether the link's node is still linked and no longer has its model."""
        first = self._at.get(link.address, {}).get("")
        return bool(link.model) and first is not None and link.model not in further_models(first.beat)

    def _forget_name(self, link: NodeLink, but: str) -> None:
        """Forgets the node id that this link had, if it represents that node no longer."""
        node_id = self._names.pop(link, but)
        if node_id != but and self._table.nodes.get(node_id) is link:
            del self._table.nodes[node_id]
            del self._table.breakers[node_id]
            self._suspected.discard(node_id)
            self._telemetry.forget_node(node_id)
            self._tell(self._table.renew(node_id))

    async def close(self) -> None:
        for link in list(self.links):
            self._close(link)
        await asyncio.gather(*self._closing, return_exceptions=True)

    def distrust(self) -> None:
        """Ends the links of nodes that are denied by name now."""
        for link in list(self.links):
            if link.connected and not self._dialer.trusts(Peer(PeerRole.NODE, link.node_id.partition("/")[0])):
                link.end(NOT_TRUSTED)

    def name_taken(self, link: NodeLink, node_id: str, incarnation: str) -> bool:
        """Returns whether a process at another address is linked under this id: that one keeps it until it is gone."""
        other = self._table.nodes.get(node_id)
        if other is None or other is link or not other.connected:
            return False
        if other.address == link.address or other.incarnation == incarnation:
            return False
        if (node_id, link.address) not in self._impostors:
            self._impostors.add((node_id, link.address))
            log.error("duplicate node id", node_id=node_id, addresses=[other.address, link.address])
        return True

    def link_up(self, link: NodeLink, restarted: bool) -> None:
        node_id = link.node_id
        self._forget_name(link, but=node_id)
        self._names[link] = node_id
        self._impostors.discard((node_id, link.address))
        self._table.nodes[node_id] = link
        if node_id not in self._table.breakers:
            self._table.breakers[node_id] = Breaker(time.monotonic, lambda state: self._breaker_changed(node_id, state))
            self._telemetry.breaker.labels(node_id).set(BreakerState.CLOSED.value)
        if restarted:
            self._table.breakers[node_id].reset()
        self._telemetry.know_node(node_id)
        self._telemetry.link_up.labels(node_id).set(1)
        self._follow_models(link)
        self._changed(link)

    def link_down(self, link: NodeLink, cause: str) -> None:
        if cause != CLOSED:
            # After a pause of this router no node is blamed: meanwhile the node may have given up
            # this router, or gRPC the connection.
            # Nor for a refusal, which says nothing of the node's health.
            breaker = self._table.breakers.get(link.node_id)
            if breaker is not None and cause != NOT_TRUSTED and not self._awake.lately_paused:
                breaker.open()
            self._telemetry.link_losses.labels(link.node_id, cause).inc()
            self._table.losses.add(link.node_id, cause, link.inflight)
        self._trust(link)
        if self._table.nodes.get(link.node_id) is link:
            self._telemetry.link_up.labels(link.node_id).set(0)
        self._changed(link)

    def link_changed(self, link: NodeLink) -> None:
        if link.suspected:
            self._suspect(link)
        else:
            self._trust(link)
        self._follow_models(link)
        self._changed(link)

    def _suspect(self, link: NodeLink) -> None:
        self._suspected.add(link.node_id)
        self._telemetry.suspected.labels(link.node_id).set(1)

    def _trust(self, link: NodeLink) -> None:
        if link.node_id in self._suspected:
            self._suspected.discard(link.node_id)
            self._telemetry.suspected.labels(link.node_id).set(0)

    def link_beat(self, link: NodeLink, load_only: bool) -> None:
        self._telemetry.beats.labels(link.node_id).inc()
        self._telemetry.clock_skew.labels(link.node_id).set(link.clock_skew_s)
        if load_only:
            self._table.reload(link.node_id)
        else:
            self._renew(link)

    def link_loaded(self, link: NodeLink) -> None:
        self._table.took(link.node_id)

    def link_suspected(self, link: NodeLink, cause: str) -> None:
        self._telemetry.suspicions.labels(link.node_id, cause).inc()

    def link_progressed(self, link: NodeLink, num_tokens: int) -> None:
        self._telemetry.tokens.labels(link.beat.model, link.node_id).inc(num_tokens)

    def _breaker_changed(self, node_id: str, state: BreakerState) -> None:
        self._telemetry.breaker.labels(node_id).set(state.value)
        if (link := self._table.nodes.get(node_id)) is not None:
            self._changed(link)

    def _changed(self, link: NodeLink) -> None:
        """Takes what happened to a link, and wakes those who wait for one of its models."""
        self._table.settle(link)
        self._tell(self._table.renew(link.node_id) | self._table.index.models_of(link.node_id))

    def _renew(self, link: NodeLink) -> None:
        """Takes what may have happened to a link, and wakes those for whose models it is something new."""
        self._table.settle(link)
        self._tell(self._table.renew(link.node_id))

    def _tell(self, models: Set[str]) -> None:
        for model in models:
            self._numerics_watch.judge(model, self._table.index.ready.get(model))
        if models:
            self._table.notify(models)
