"""The control plane as one object.

It has what the RPCs call, and the clock that expires leases and notifies watchers. It composes
registry, catalog, reconciler, watch hub and store, and knows nothing of gRPC. It runs in one thread
with one event loop: between two awaits, a change of the state and its publication are one step.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from dataclasses import dataclass, replace

import structlog

from ryzanstein import errors
from ryzanstein.adapters import DeployedAdapter, DeployedAdapters
from ryzanstein.cluster import Deployment, Instruction, Node, NodeReport
from ryzanstein.leaders.epochs import LeaderEpoch
from ryzanstein.orchestrator.config import OrchestratorSettings
from ryzanstein.orchestrator.deploying.adapter_deployments import AdapterDeployments
from ryzanstein.orchestrator.deploying.model_deployments import DEFAULT_OPTIONS, DeployOptions, ModelDeployments
from ryzanstein.orchestrator.deploying.store_writes import StoreWrites
from ryzanstein.orchestrator.leading.term import SoleTerm, Term
from ryzanstein.orchestrator.placing.halts import Halts
from ryzanstein.orchestrator.placing.needs import MeasuredNeeds
from ryzanstein.orchestrator.placing.replicas.refusals import Refusals
from ryzanstein.orchestrator.placing.replicas.replica_leases import ReplicaLeases
from ryzanstein.orchestrator.reconcile import DeploymentStatus, Reconciler, Sources
from ryzanstein.orchestrator.state.adapters import AdapterTable
from ryzanstein.orchestrator.state.audit_table import AuditPage, AuditQuery
from ryzanstein.orchestrator.state.catalog import Catalog
from ryzanstein.orchestrator.state.changes import Change, NodeChanged, NodeLeft
from ryzanstein.orchestrator.state.members.address_book import AddressBook
from ryzanstein.orchestrator.state.members.recovery import MembershipRecorder, Settling
from ryzanstein.orchestrator.state.members.registry import Registry
from ryzanstein.orchestrator.state.stored import StateStore, StoredMembership, StoredState, not_leader, read_state
from ryzanstein.orchestrator.state.watch import ClusterState, Update, WatchHub
from ryzanstein.orchestrator.telemetry import OrchestratorTelemetry
from ryzanstein.process.awake import AwakeClock

log = structlog.get_logger(__name__)

TICK_S = 0.1
_MEASURE_S = 3.0
_MEASURE_BEATS = 3
_LONGEST_GAP_BEATS = 2
_ENOUGH = 0.95
_TICKS_PER_SIGN = 10
_KNOWN_S = 0.05


@dataclass(frozen=True, slots=True)
class Grant:
    """A lease. It expires after `lease_s` without a beat; beat every `heartbeat_interval_s`."""

    lease_id: str
    lease_s: float
    heartbeat_interval_s: float


class ControlPlane:
    """The control plane. Build it with `restore`, keep `run` running, end it with `close`."""

    def __init__(
        self,
        settings: OrchestratorSettings,
        store: StateStore,
        telemetry: OrchestratorTelemetry,
        term: Term,
        saved: StoredState,
    ) -> None:
        self._settings, self._term = settings, term
        self._store = store
        self._telemetry = telemetry
        self._awake = AwakeClock(telemetry.loop_lag.observe, self._forgive)
        self._registry = Registry(
            self._publish,
            lease_s=settings.lease_s,
            max_nodes=settings.tuning.max_nodes,
            drains=saved.membership.drains,
            monotonic=self._awake.now,
        )
        self._catalog = Catalog(self._publish, settings.tuning.max_deployments, saved.deployments)
        self._adapters = AdapterTable(saved.adapters)
        self._needs = MeasuredNeeds(lambda: self._catalog.paths, self._awake.now)
        refusals, halts = Refusals(self._awake.now, saved.refusals), Halts(saved.halts)
        sources = Sources(self._registry, self._catalog, refusals, self._needs, halts)
        # A new one in each term: nothing expires before this leader has seen it stand still for a whole lease.
        longest_gap_s = _LONGEST_GAP_BEATS * settings.tuning.heartbeat_interval_s
        leases = ReplicaLeases(self._awake.now, max(settings.replica_lease_s, settings.lease_s), longest_gap_s)
        self._reconciler = Reconciler(sources, telemetry, self._awake.now, leases, settings.tuning.rollout)
        self._recorder = MembershipRecorder(store, self._membership, refusals, halts)
        self._writes = StoreWrites(telemetry.background, term.check)
        self._models = ModelDeployments(
            sources,
            self._reconciler,
            self._adapters,
            store=store,
            writes=self._writes,
            telemetry=telemetry,
            settling=lambda: self._settling is not None,
            measure_s=max(_MEASURE_S, _MEASURE_BEATS * settings.tuning.heartbeat_interval_s),
        )
        self._adapter_deployments = AdapterDeployments(self._adapters, self._catalog, self._registry, store, self._writes)
        # A takeover waits for no dead node: it moves models only where nodes report.
        share, members = (_ENOUGH if term.keeping else 1.0), saved.membership.members
        self._settling: Settling | None = Settling(members, self._awake.now(), settings.tuning.settle_s, share)
        self._hub = WatchHub(
            term.leader.leader_id,
            lambda: ClusterState(self._registry.nodes(), self._catalog.deployments()),
            telemetry,
            queue_bound=settings.tuning.watch_queue,
            max_watchers=settings.tuning.max_watchers,
        )
        self._closed = False
        self._addresses = AddressBook(self._registry.nodes)
        self._ticks = 0
        telemetry.models.nodes = self._registry.nodes
        telemetry.deployments.set(len(saved.deployments))
        leader = term.leader
        log.info(
            "restored", deployments=len(saved.deployments), members=len(members), epoch=leader.epoch, leader_id=leader.leader_id
        )
        self._settle()

    @classmethod
    async def restore(
        cls, settings: OrchestratorSettings, store: StateStore, telemetry: OrchestratorTelemetry, term: Term | None = None
    ) -> ControlPlane:
        """Returns a control plane that continues from what the store holds. Without a term, it is alone."""
        term = term or await SoleTerm.begin(store, telemetry)
        await store.begin(term.leader.epoch)
        return cls(settings, store, telemetry, term, await read_state(store))

    @property
    def over(self) -> bool:
        """Whether this control plane must not act any more."""
        return self._term.over

    @property
    def leader(self) -> LeaderEpoch:
        """Who leads, which every answer says."""
        return self._term.leader

    async def met(self, known: LeaderEpoch) -> None:
        """Compares the leader that a peer knows with this one. Raises STALE_LEADER when the peer may not follow it."""
        if self._term.leader.is_stale_after(known):
            await self._term.outranked(known)

    def register(self, node: Node) -> Grant:
        """Adds or renews a node.

        Raises RESOURCE_EXHAUSTED when the cluster is full, FAILED_PRECONDITION when a newer process
        has replaced the node.
        """
        self._term.check()
        before = self._registry.incarnation(node.node_id)
        kind = "joined" if before is None else "renewed" if before == node.incarnation else "replaced"
        lease_id = self._registry.join(node)
        self._telemetry.joins.labels(kind).inc()
        log.info("node registered", kind=kind, node_id=node.node_id, address=node.address, incarnation=node.incarnation)
        return Grant(lease_id, self._settings.lease_s, self._settings.tuning.heartbeat_interval_s)

    def beat(self, node_id: str, lease_id: str, report: NodeReport) -> Instruction:
        """Renews the lease and returns what the node should do.

        Raises NOT_FOUND when the node must register again, UNAVAILABLE while stopping.
        """
        if self._closed:
            raise errors.unavailable("STOPPING", "the orchestrator is stopping")
        self._term.check()
        self._telemetry.beats.inc()
        node = self._registry.beat(node_id, lease_id, report)
        if self._needs.note(node, report.needs):
            self._reconciler.invalidate()
        self._reconciler.reported(node, report.starts)
        if self._settling is not None:
            self._settling.reported(node_id)
            self._settle()
        instruction = self._reconciler.instruct(node)
        if report.adapters_digest not in (None, self._adapters.digest):
            instruction = replace(instruction, adapters=DeployedAdapters(self._adapters.digest, self._adapters.all()))
        if self._settling is not None:
            return instruction
        return replace(instruction, members=self._addresses.news(node_id, report, self._awake.now()))

    def leave(self, node_id: str, lease_id: str) -> None:
        self._registry.leave(node_id, lease_id)
        self._reconciler.left(node_id)
        self._departed(node_id, "left")

    async def drain(self, node_id: str, *, below_min: bool = False) -> None:
        """Requests that a node drains; returns when the request is stored.

        Raises NOT_FOUND when the node is not a member, FAILED_PRECONDITION when a deployment would keep fewer ready
        replicas than it states, unless `below_min` allows it. Cancelling the caller does not cancel the write.
        """
        if not below_min and any(each.min_replicas for each in self._catalog.deployments()):
            await self._all_known()
            await self._reconciler.prepare()
            node = self._registry.find(node_id)
            if node is not None and not node.drain_requested:
                self._reconciler.check_drain(node)
        self._registry.drain(node_id)
        log.info("drain requested", node_id=node_id)
        await self._writes.write(self._recorder.flush())

    async def _all_known(self) -> None:
        """Waits until the nodes are back after a start: what some of them leave says nothing of the others."""
        while self._settling is not None and not self.over:  # noqa: ASYNC110 (what ends it is a time)
            await asyncio.sleep(_KNOWN_S)

    async def undrain(self, node_id: str) -> None:
        """Withdraws a drain request; returns when that is stored.

        Raises NOT_FOUND when the node is not a member. Cancelling the caller does not cancel the
        write.
        """
        self._registry.undrain(node_id)
        log.info("drain withdrawn", node_id=node_id)
        await self._writes.write(self._recorder.flush())

    async def deploy(self, deployment: Deployment, options: DeployOptions = DEFAULT_OPTIONS) -> Deployment:
        """Adds or replaces a deployment; see `ModelDeployments.deploy`."""
        return await self._models.deploy(deployment, options)

    async def remove(self, model: str) -> None:
        """Removes a deployment; returns when that is stored. Raises NOT_FOUND when there is none."""
        await self._models.remove(model)

    async def deploy_adapter(self, adapter: DeployedAdapter) -> DeployedAdapter:
        """Adds or replaces an adapter; see `AdapterDeployments.deploy`."""
        return await self._adapter_deployments.deploy(adapter)

    async def remove_adapter(self, name: str) -> None:
        """Removes an adapter; returns when that is stored. Raises NOT_FOUND when there is none."""
        await self._adapter_deployments.remove(name)

    def adapter(self, name: str) -> DeployedAdapter | None:
        return self._adapters.find(name)

    def adapters(self) -> tuple[DeployedAdapter, ...]:
        return self._adapters.all()

    def nodes(self) -> tuple[Node, ...]:
        return tuple(sorted(self._registry.nodes(), key=lambda node: node.node_id))

    def deployment(self, model: str) -> Deployment | None:
        return self._catalog.find(model)

    def is_drained(self, node_id: str) -> bool | None:
        """Returns whether a node was asked to drain; None: it is not a member."""
        incarnation = self._registry.incarnation(node_id)
        return None if incarnation is None else self._registry.drains.get(node_id) == incarnation

    async def audit(self, query: AuditQuery) -> AuditPage:
        """Returns a page of operators' acts."""
        return await self._store.audit(query)

    async def prepare(self) -> None:
        """Does what takes long in `deployments`, so that others run meanwhile."""
        await self._reconciler.prepare()

    def deployments(self) -> list[DeploymentStatus]:
        return self._reconciler.status()

    async def updates(self, *, loads: bool = True) -> AsyncIterator[Update]:
        """Yields a snapshot, then each change; without those that are of a load alone if it wants no `loads`.

        After a restart the snapshot waits for the members that were known.
        """
        async for update in self._hub.updates(loads=loads):
            self._term.check()
            yield update

    async def run(self) -> None:
        """Runs the clock and the recorder until cancelled.

        Raises NOT_LEADER when another orchestrator has taken the store of one that is alone. Any other exception here is a
        bug. The process should end and be restarted.
        """
        recording = self._telemetry.background.supervise("membership_recorder", self._recorder.run)
        try:
            await self._tick_forever()
        finally:
            recording.cancel()
            await asyncio.gather(recording, return_exceptions=True)

    async def close(self) -> None:
        """Ends watches and beats and writes what is left. The store stays open.

        Members are kept, because nodes outlive a restart.
        """
        await self.abandon()
        await self._recorder.flush_all()

    async def abandon(self) -> None:
        """Ends watches and beats, and writes nothing more: another orchestrator may lead."""
        self._closed = True
        self._telemetry.models.nodes = tuple
        self._awake.close()
        self._hub.close()
        await self._writes.ended()

    async def _tick_forever(self) -> None:
        while self._term.replaceable or not self._term.over:
            await asyncio.sleep(TICK_S)
            await self._reconciler.prepare_tick()
            self.tick()
        raise not_leader(why="another orchestrator writes to this one's store: it would serve nobody")

    def tick(self) -> None:
        """Does what depends on time: expires leases, publishes loads, places, ends settling."""
        if self._term.over:
            return
        for node_id in self._registry.expire():
            self._departed(node_id, "expired")
        self._registry.publish_loads(max(1, round(self._settings.tuning.load_updates_per_s * TICK_S)))
        self._settle()
        self._reconciler.tick()
        self._ticks += 1
        if self._term.replaceable and self._ticks % _TICKS_PER_SIGN == 0:
            self._hub.show_life()
        if self._recorder.behind:
            self._recorder.changed()

    def _forgive(self, late_s: float) -> None:
        """Restarts all leases after this process's event loop stalled.

        It could not receive beats, which is not the nodes' fault. After a long pause the nodes
        may also have left their streams and need time to register again.
        """
        if late_s > self._settings.lease_s / 3:
            self._registry.forgive()
            self._telemetry.stalls.inc()
            log.warning("event loop stalled", late_s=round(late_s, 3))

    def _settle(self) -> None:
        now = self._awake.now()
        if self._settling is not None and self._settling.over(now) and not self._term.keeping:
            elapsed_s = self._settling.elapsed_s(now)
            log.info("settled", after_s=round(elapsed_s, 3), missing=len(self._settling.missing))
            self._telemetry.settle.set(elapsed_s)
            missing, self._settling = self._settling.missing, None
            self._reconciler.settle(missing)
            self._reconciler.update()
            self._recorder.changed()
            self._hub.open()

    def _publish(self, change: Change) -> None:
        self._hub.publish(change)
        if isinstance(change, NodeChanged) and change.load_only:
            return
        self._addresses.changed()
        if isinstance(change, NodeLeft):
            self._needs.forget(change.node_id)
            self._reconciler.forget(change.node_id)
            self._addresses.forget(change.node_id)
        self._telemetry.nodes.set(len(self._registry))
        self._reconciler.invalidate()
        self._recorder.changed()

    def _departed(self, node_id: str, cause: str) -> None:
        self._telemetry.departures.labels(cause).inc()
        log.info("node removed", cause=cause, node_id=node_id)

    def _membership(self) -> StoredMembership:
        """Returns the membership to store.

        While settling, members that are not back yet still count: a second restart must wait for
        them, too.
        """
        missing = self._settling.missing if self._settling is not None else frozenset()
        return StoredMembership(self._registry.node_ids() | missing, self._registry.drains)
