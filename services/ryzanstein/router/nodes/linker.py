"""Opens and closes links to the members, and records in the table what happens to them.

Membership decides which nodes to link; the links show which are alive. A node that left the
membership keeps its links until they have all ended, so a lease that an orchestrator's restart lost
breaks nothing.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Collection

import structlog

from ryzanstein.auth.peers.peer import Peer, PeerRole
from ryzanstein.process.awake import AwakeClock
from ryzanstein.router.nodes.breaker import Breaker, BreakerState
from ryzanstein.router.nodes.compatibility import NumericsWatch
from ryzanstein.router.nodes.links.connection import NOT_TRUSTED
from ryzanstein.router.nodes.links.link import CLOSED, NodeLink
from ryzanstein.router.nodes.links.phi_detector import PhiThresholds
from ryzanstein.router.nodes.table import NodeTable, further_models
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

    @property
    def links(self) -> Collection[NodeLink]:
        """All open links, also of nodes that left the membership."""
        return self._table.links.keys()

    def follow(self, addresses: Collection[str], draining: Collection[str] = (), models: Collection[str] = ()) -> None:
        """Links exactly these addresses. The links to another address end when none of them is up.

        `draining`: node ids. `models`: what the nodes serve, as the orchestrator knows it.
        """
        changed = self._table.draining.symmetric_difference(draining)
        self._table.draining, self._table.listed_models = frozenset(draining), frozenset(models)
        for node_id in changed:
            self._table.renew(node_id)
        known = {link.address: link for link in self._running() if not link.model}
        for address in sorted(addresses):
            link = known.pop(address, None)
            if link is None:
                self._open(address)
            else:
                link.departed = False
                self._follow_models(link)
        for link in known.values():
            self._depart(link)
            self._follow_models(link)
        self._notify()

    def _follow_models(self, first: NodeLink) -> None:
        """Opens and closes links so that each further model of this link's node has one.

        The links of a node that is down are kept.
        """
        if first.model or not (first.connected or first.departed):
            return
        known = {link.model: link for link in self._running() if link.model and link.address == first.address}
        for model in () if first.departed else further_models(first.beat):
            link = known.pop(model, None)
            if link is None:
                self._open(first.address, model)
            else:
                link.departed = False
        for link in known.values():
            self._depart(link)

    def _running(self) -> list[NodeLink]:
        return [link for link, task in self._table.links.items() if not task.done()]

    def _depart(self, link: NodeLink) -> None:
        link.departed = True
        if not link.connected and not self.outlives(link):
            self._close(link)

    def _open(self, address: str, model: str = "") -> None:
        link = NodeLink(address, self._router_id, self._thresholds, self, self._awake, model=model, dialer=self._dialer)
        task = self._telemetry.background.supervise("link", link.run, finite=True)
        self._table.links[link] = task
        task.add_done_callback(lambda task: self._gone(link, task))

    def _close(self, link: NodeLink) -> None:
        """Starts to close a link. An address that returns before it is closed gets a new link."""
        task = self._table.links.pop(link)
        task.cancel()
        self._closing.add(task)

    def outlives(self, link: NodeLink) -> bool:
        """Returns whether the node of a departed link is up and still has the link's model.

        The orchestrator may have lost sight of a node that other links reach.
        """
        links = [other for other in self.links if other.address == link.address]
        listed = {model for first in links if not first.model for model in ("", *further_models(first.beat))}
        return link.model in listed and any(other.connected for other in links)

    def _gone(self, link: NodeLink, task: asyncio.Task[None]) -> None:
        self._table.links.pop(link, None)
        self._closing.discard(task)
        if link.known_model and link.departed and not self._unlisted(link):
            self._table.departed_models.add(link.known_model)
        self._forget_names(link, but="")

    def _unlisted(self, link: NodeLink) -> bool:
        """Returns whether the link's node is still linked and no longer has its model."""
        firsts = [first for first in self.links if not first.model and first.address == link.address]
        return bool(link.model) and any(link.model not in further_models(first.beat) for first in firsts)

    def _forget_names(self, link: NodeLink, but: str) -> None:
        """Forgets the node ids that this link no longer represents."""
        for node_id in [name for name, known in self._table.nodes.items() if known is link and name != but]:
            del self._table.nodes[node_id]
            del self._table.breakers[node_id]
            self._table.renew(node_id)
            self._suspected.discard(node_id)
            self._telemetry.forget_node(node_id)

    async def close(self) -> None:
        for link in list(self.links):
            self._close(link)
        await asyncio.gather(*self._closing, return_exceptions=True)

    def distrust(self) -> None:
        """Ends the links of nodes that are denied by name now."""
        for link in self._running():
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
        self._forget_names(link, but=node_id)
        self._impostors.discard((node_id, link.address))
        self._table.nodes[node_id] = link
        if node_id not in self._table.breakers:
            self._table.breakers[node_id] = Breaker(time.monotonic, lambda state: self._breaker_changed(node_id, state))
            self._telemetry.breaker.labels(node_id).set(BreakerState.CLOSED.value)
        if restarted:
            self._table.breakers[node_id].reset()
        self._telemetry.know_node(node_id)
        self._telemetry.link_up.labels(node_id).set(1)
        self._table.renew(node_id)
        self._follow_models(link)
        self._notify()

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
        self._table.renew(link.node_id)
        self._notify()

    def link_changed(self, link: NodeLink) -> None:
        if link.suspected:
            self._suspect(link)
        else:
            self._trust(link)
        self._table.renew(link.node_id)
        self._follow_models(link)
        self._notify()

    def _suspect(self, link: NodeLink) -> None:
        self._suspected.add(link.node_id)
        self._telemetry.suspected.labels(link.node_id).set(1)

    def _trust(self, link: NodeLink) -> None:
        if link.node_id in self._suspected:
            self._suspected.discard(link.node_id)
            self._telemetry.suspected.labels(link.node_id).set(0)

    def link_beat(self, link: NodeLink) -> None:
        self._telemetry.beats.labels(link.node_id).inc()
        self._telemetry.clock_skew.labels(link.node_id).set(link.clock_skew_s)

    def link_loaded(self, link: NodeLink) -> None:
        self._table.renew(link.node_id)

    def link_suspected(self, link: NodeLink, cause: str) -> None:
        self._telemetry.suspicions.labels(link.node_id, cause).inc()

    def link_progressed(self, link: NodeLink, num_tokens: int) -> None:
        self._telemetry.tokens.labels(link.beat.model, link.node_id).inc(num_tokens)

    def _breaker_changed(self, node_id: str, state: BreakerState) -> None:
        self._telemetry.breaker.labels(node_id).set(state.value)
        self._table.renew(node_id)
        self._notify()

    def _notify(self) -> None:
        self._numerics_watch.judge(self._table.nodes.values())
        self._table.notify()
