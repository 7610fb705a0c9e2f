"""Compares desired and reported state: computes the answer to a node's heartbeat.

The placement is computed once per burst of changes, not per beat. While the orchestrator settles
after a restart it has seen only some of the nodes. A placement over those would move models without
need, so each node is instructed to keep what it has.
"""

from __future__ import annotations

import asyncio
import math
from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass

import structlog

from ryzanstein.cluster import Deployment, Instruction, Node
from ryzanstein.orchestrator.placing.halts import Halts
from ryzanstein.orchestrator.placing.needs import MeasuredNeeds
from ryzanstein.orchestrator.placing.packing import NodeShortage
from ryzanstein.orchestrator.placing.placement import (
    MAX_SHORTAGES,
    Assigned,
    Failed,
    Placement,
    Reports,
    place,
    place_in_steps,
)
from ryzanstein.orchestrator.placing.replicas.refusals import Refusals
from ryzanstein.orchestrator.placing.replicas.replica_leases import ReplicaLeases
from ryzanstein.orchestrator.placing.rolling import RollingChanges
from ryzanstein.orchestrator.placing.rollout_bounds import RolloutBounds
from ryzanstein.orchestrator.placing.unplaceable import below_minimum
from ryzanstein.orchestrator.placing.waves import kept, serves
from ryzanstein.orchestrator.state.catalog import Catalog
from ryzanstein.orchestrator.state.members.registry import Registry
from ryzanstein.orchestrator.telemetry import OrchestratorTelemetry

log = structlog.get_logger(__name__)

# Up to so many nodes are looked at in each tick while they or their models change. More take longer, and are looked at less
# often: a thousand of them every half second.
_MAX_AT_EACH_TICK = 200
_LOOK_S = 0.0006


@dataclass(frozen=True, slots=True)
class DeploymentStatus:
    """A deployment with the nodes chosen for it, and what they report.

    `ready_nodes` report this revision ready, `outdated_nodes` serve an earlier one. `shortages`:
    why nodes do not serve it. `waits_for`: why no further outdated node changes. `halted`: it does not until the model
    is deployed again.
    """

    deployment: Deployment
    assigned_nodes: tuple[str, ...]
    ready_nodes: tuple[str, ...]
    outdated_nodes: tuple[str, ...]
    shortages: tuple[NodeShortage, ...]
    waits_for: str = ""
    halted: bool = False


@dataclass(frozen=True, slots=True)
class Sources:
    """What a placement depends on."""

    registry: Registry
    catalog: Catalog
    refusals: Refusals
    needs: MeasuredNeeds
    halts: Halts


@dataclass(frozen=True, slots=True)
class _Inputs:
    """What a placement is made of; equal only if nothing changed that counts. `num_changes`: the changes up to then."""

    num_changes: int
    failed: Failed
    surges: Mapping[str, int]
    settled: bool


class Reconciler:
    """Holds the placement that the last `update` computed. `now` is monotonic seconds."""

    def __init__(
        self,
        sources: Sources,
        telemetry: OrchestratorTelemetry,
        now: Callable[[], float],
        leases: ReplicaLeases,
        bounds: RolloutBounds | None = None,
    ) -> None:
        self._sources = sources
        self._telemetry = telemetry
        self._now = now
        self._leases = leases
        self._placement = Placement()
        self._rolling = RollingChanges(now, bounds, sources.halts)
        self._surges: Mapping[str, int] = {}
        self._failed: Failed = ()
        self._looked_at = -math.inf
        self._stale, self._num_changes = True, 0
        self._settled = False
        self._preparing = asyncio.Lock()
        self._prepared: tuple[Placement, _Inputs, Placement] | None = None

    def invalidate(self) -> None:
        """Marks the placement as stale: something that it depends on changed."""
        self._stale = True
        self._num_changes += 1

    def settle(self, missing: Collection[str] = ()) -> None:
        """Starts to instruct nodes by the placement: the members are known."""
        self._settled = True
        self._rolling.unseen(missing)

    async def prepare_tick(self) -> None:
        """Does what takes long in the next `tick`, so that others run meanwhile."""
        if self._may_look:
            await self.prepare()

    async def prepare(self) -> None:
        """Places what is stale as `update` would now, in steps between which others run.

        If nothing that counts changes meanwhile, the next `update` takes this placement. Otherwise it places anew, as if this
        one had been the last: most of it is kept, which takes a fraction of the time.
        """
        async with self._preparing:
            if not self._stale or self._has_prepared:
                return
            before, (deployments, nodes, inputs) = self._placement, self._inputs()
            # Nodes measure meanwhile, and this copy costs a millisecond or two for 256 models on 1,000 nodes.
            needs = {node_id: dict(those) for node_id, those in self._sources.needs.all().items()}
            steps = place_in_steps(deployments, nodes, Reports(inputs.failed, needs, self._before, inputs.surges))
            for placement in steps:
                if placement is None:
                    await asyncio.sleep(0)
                else:
                    self._prepared = before, inputs, placement

    def tick(self) -> None:
        """Updates at each tick, and less often the more nodes there are: while they change, something does in each tick."""
        if self._may_look:
            self.update()

    @property
    def _may_look(self) -> bool:
        pause_s = (len(self._sources.registry) - _MAX_AT_EACH_TICK) * _LOOK_S
        return self._now() - self._looked_at >= pause_s

    def update(self) -> None:
        """Computes the placement if it is stale, and which nodes may change a model."""
        if not self._stale and not (self._rolling.outdated and self._may_look):
            return
        self._looked_at = self._now()
        deployments, nodes, inputs = self._inputs()
        failed, surges = inputs.failed, inputs.surges
        self._sources.halts.keep(deployments)
        if self._stale or surges != self._surges:
            self._stale, self._surges = False, surges
            if not self._takes_prepared(inputs):
                self._placement = self._place(deployments, failed, surges)
            self._telemetry.placements.inc()
        needs = self._sources.needs.all()
        self._rolling.update(self._placement.assigned, nodes, failed, needs, all_known=self._settled)
        self._measure(deployments)

    def _inputs(self) -> tuple[tuple[Deployment, ...], tuple[Node, ...], _Inputs]:
        deployments, nodes = self._sources.catalog.deployments(), self._sources.registry.nodes()
        refusals = self._sources.refusals
        refusals.note(nodes, self._placement.assigned, self._leases.reason)
        self._failed = refusals.of(deployments, nodes)
        surges = self._rolling.surges(deployments, self._holders(nodes), self._sources.needs.all())
        return deployments, nodes, _Inputs(self._num_changes, self._failed, surges, self._settled)

    @property
    def _has_prepared(self) -> bool:
        if self._prepared is None:
            return False
        before, of, _ = self._prepared
        return before is self._placement and of.num_changes == self._num_changes

    def _takes_prepared(self, inputs: _Inputs) -> bool:
        """Takes the placement that was prepared, unless another one came since; returns whether it is made of these inputs."""
        prepared, self._prepared = self._prepared, None
        if prepared is None:
            return False
        before, of, placement = prepared
        if before is not self._placement or of.settled != inputs.settled:
            return False
        self._placement = placement
        return of == inputs

    def irreplaceable(self, deployment: Deployment) -> str:
        """Returns why no node could change to a new revision of a deployment; empty: one could.

        `deployment` has the revision that it would have.
        """
        self.update()
        nodes = self._sources.registry.nodes()
        members = [node for node in self._holders(nodes).get(deployment.model, ()) if not node.drain_requested]
        floor = self._rolling.unchangeable(deployment, members, self._sources.needs.all())
        if not floor:
            return ""
        if deployment.surge:
            others = [each for each in self._sources.catalog.deployments() if each.model != deployment.model]
            failed = [key for key in self._failed if key[1] != deployment.model]
            placed = self._place((*others, deployment), failed, {**self._surges, deployment.model: 1})
            if placed.count(deployment.model) > len(members):
                return ""
        bound, remedy = self._rolling.floor_reason(deployment, floor)
        return f"{bound}, and no node has room to load it beside the earlier revision, or to stand in for another; {remedy}"

    def check_drain(self, node: Node) -> None:
        """Raises FAILED_PRECONDITION when a deployment would keep fewer ready nodes than it states if this one drains."""
        self.update()
        nodes = self._sources.registry.nodes()
        for deployment in self._sources.catalog.deployments():
            if deployment.min_replicas and self._stays(node, deployment):
                left = sum(self._stays(each, deployment) for each in nodes if each.node_id != node.node_id)
                if left < deployment.min_replicas:
                    raise below_minimum(node.node_id, deployment, left)

    def _stays(self, node: Node, deployment: Deployment) -> bool:
        """Whether a node serves a deployment, and was told nothing else."""
        if node.drain_requested or not serves(node, deployment.model) or self._rolling.leaves(node, deployment):
            return False
        return not self._settled or deployment in self._placement.assigned.get(node.node_id, ())

    @property
    def _before(self) -> Assigned:
        return self._placement.assigned if self._settled else {}

    def _place(self, deployments: Sequence[Deployment], failed: Failed, surges: Mapping[str, int]) -> Placement:
        reports = Reports(failed, self._sources.needs.all(), self._before, surges)
        return place(deployments, self._sources.registry.nodes(), reports)

    def _holders(self, nodes: Iterable[Node]) -> Mapping[str, Sequence[Node]]:
        """Returns the nodes of each model: those that it was assigned to, or that report it if it was assigned to none."""
        given, reported = defaultdict[str, list[Node]](list), defaultdict[str, list[Node]](list)
        assigned = self._before
        for node in nodes:
            for deployment in assigned.get(node.node_id, ()):
                given[deployment.model].append(node)
            for model in [each.model for each in node.models] if node.plural else [node.model]:
                reported[model].append(node)
        return {**reported, **given}

    def left(self, node_id: str) -> None:
        """Notes that a node has left by itself, other than one whose lease expired."""
        self._rolling.left(node_id)

    def reported(self, node: Node, starts: Mapping[str, int]) -> None:
        """Notes how far a node is with the models that it starts. One that comes no further has failed there."""
        assigned = self._placement.assigned.get(node.node_id, ()) if self._settled and starts else ()
        told = [each for each in assigned if self._rolling.instructed(node, each).revision == each.revision]
        for deployment in self._leases.reported(node, starts, told):
            self._telemetry.replicas_expired.inc()
            report = node.report(deployment.model)
            log.warning(
                "replica expired",
                node_id=node.node_id,
                model=deployment.model,
                revision=deployment.revision,
                reason=self._leases.reason(node, deployment),
                state="absent" if report is None else report.state.name,
                doing="" if report is None else report.reason,
            )
            self.invalidate()

    def forget(self, node_id: str) -> None:
        """Forgets the starts of a node that is no member any more."""
        self._leases.forget(node_id)

    def instruct(self, node: Node) -> Instruction:
        """Returns what a node should do. One that came after the last placement keeps what it has until the next."""
        placed = self._settled and self._placement.has(node.node_id)
        deployments = self._assigned(node) if placed else self._present(node)
        return Instruction(deployments, node.drain_requested, self._sources.needs.ask(node))

    def without_room_for(self, deployment: Deployment) -> list[NodeShortage]:
        """Returns why no node can take a deployment; empty if one can, or may."""
        self.update()
        return self._placement.without_room_for(deployment, self._sources.needs.all())

    def status(self) -> list[DeploymentStatus]:
        """Returns the current status of each deployment, by name."""
        self.update()
        assigned: dict[str, list[str]] = defaultdict(list)
        for node_id, deployments in self._placement.assigned.items():
            for deployment in deployments:
                assigned[deployment.model].append(node_id)
        return [self._status(deployment, assigned) for deployment in self._sources.catalog.deployments()]

    def _status(self, deployment: Deployment, assigned: Mapping[str, list[str]]) -> DeploymentStatus:
        model = deployment.model
        nodes = self._sources.registry.nodes()
        ready = sorted(node.node_id for node in nodes if self._rolling.is_ready(node, deployment))
        outdated = self._rolling.outdated.get(model, ())
        halt = self._sources.halts.find(deployment) if outdated else None
        return DeploymentStatus(
            deployment,
            tuple(sorted(assigned.get(model, ()))),
            tuple(ready),
            outdated,
            self._shortages(deployment),
            self._rolling.waits_for(model),
            halt is not None and halt.lasting,
        )

    def _shortages(self, deployment: Deployment) -> tuple[NodeShortage, ...]:
        """Returns first which nodes failed, then which others cannot take the deployment."""
        reasons = self._sources.refusals.reasons(deployment.model)
        failed = [NodeShortage(node_id, 0, f"failed lately: {reason}".rstrip(": ")) for node_id, reason in reasons.items()]
        others = [each for each in self._placement.shortages(deployment) if each.node_id not in reasons]
        return (*failed, *others)[:MAX_SHORTAGES]

    def _assigned(self, node: Node) -> tuple[Deployment, ...]:
        assigned = self._placement.assigned.get(node.node_id, ())
        return tuple(self._rolling.instructed(node, deployment) for deployment in assigned)

    def _present(self, node: Node) -> tuple[Deployment, ...]:
        """Returns the deployments that the node has now, as it has them."""
        find = self._sources.catalog.find
        if not node.plural:
            deployment = find(node.model)
            return () if deployment is None else (deployment,)
        return tuple(kept(report, each) for report in node.models if (each := find(report.model)) is not None)

    def _num_failed(self, deployment: Deployment) -> int:
        """Returns how many nodes were given a deployment although they failed with it, and answer no requests for it."""
        model, found = deployment.model, 0
        for node_id in [node_id for node_id, failed in self._failed if failed == model]:
            node = self._sources.registry.find(node_id)
            given = deployment in self._placement.assigned.get(node_id, ())
            found += given and node is not None and not serves(node, model)
        return found

    def _measure(self, deployments: tuple[Deployment, ...]) -> None:
        short, outdated, halted = self._telemetry.short, self._telemetry.outdated, self._telemetry.halted
        short.clear()
        outdated.clear()
        halted.clear()
        for deployment in deployments:
            short.labels(deployment.model).set(self._placement.short(deployment) + self._num_failed(deployment))
            num_outdated = len(self._rolling.outdated.get(deployment.model, ()))
            outdated.labels(deployment.model).set(num_outdated)
            halted.labels(deployment.model).set(bool(num_outdated and self._sources.halts.find(deployment)))
