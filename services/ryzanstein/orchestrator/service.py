"""OrchestratorService: converts between the wire and calls to the control plane."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import AsyncIterator, Callable
from dataclasses import asdict, replace
from typing import Any

from grpc.aio import ServicerContext

from ryzanstein.adapters import DeployedAdapter
from ryzanstein.auth.audit.audit_record import Facts
from ryzanstein.auth.audit.auditor import Auditor
from ryzanstein.auth.peers.peer import check_name
from ryzanstein.cluster import Deployment
from ryzanstein.orchestrator.audit_pages import audit_page, audit_query
from ryzanstein.orchestrator.control import ControlPlane
from ryzanstein.orchestrator.deploying.model_deployments import DeployOptions
from ryzanstein.orchestrator.leadership import Leadership
from ryzanstein.orchestrator.reconcile import DeploymentStatus
from ryzanstein.orchestrator.state.changes import Change, DeploymentChanged, DeploymentRemoved, NodeChanged, NodeLeft
from ryzanstein.orchestrator.state.watch import SignOfLife, Snapshot, Update
from ryzanstein.orchestrator.validation import (
    check_adapter,
    check_deployment,
    check_idempotency_key,
    check_name_of,
    check_node,
    check_node_id,
    check_report,
)
from ryzanstein.v1 import orchestrator_pb2 as pb
from ryzanstein.v1 import worker_pb2
from ryzanstein.v1.orchestrator_pb2_grpc import OrchestratorServiceServicer
from ryzanstein.wire.adapters import deployed_adapter_from_wire, deployed_adapter_to_wire
from ryzanstein.wire.membership import (
    deployment_from_wire,
    deployment_to_wire,
    instruction_to_wire,
    known_leader_from_wire,
    node_from_wire,
    node_report_from_wire,
    node_to_wire,
)
from ryzanstein.wire.timestamps import duration

Context = ServicerContext[Any, Any]

_MOST_CHANGES = 512


class OrchestratorServicer(OrchestratorServiceServicer):
    """A thin adapter; `max_nodes` bounds the replicas of a deployment, `protection` says how the service is protected now."""

    def __init__(
        self, lead: Leadership, auditor: Auditor, max_nodes: int, protection: Callable[[], worker_pb2.Protection]
    ) -> None:
        self._lead, self._auditor = lead, auditor
        self._max_nodes, self._protection = max_nodes, protection
        self._messages = WatchMessages()

    @property
    def _control(self) -> ControlPlane:
        """The control plane. Raises NOT_LEADER while this orchestrator stands by."""
        return self._lead.control

    async def RegisterNode(self, request: pb.RegisterNodeRequest, context: Context) -> pb.RegisterNodeResponse:
        node = node_from_wire(request.node)
        check_node(node)
        check_name(node.node_id)
        await self._control.met(known_leader_from_wire(request))
        leader = self._control.leader
        grant = self._control.register(node)
        return pb.RegisterNodeResponse(
            lease_id=grant.lease_id,
            lease_duration=duration(grant.lease_s),
            heartbeat_interval=duration(grant.heartbeat_interval_s),
            leader_epoch=leader.epoch,
            leader_id=leader.leader_id,
        )

    async def Heartbeat(
        self, request_iterator: AsyncIterator[pb.HeartbeatRequest], context: Context
    ) -> AsyncIterator[pb.HeartbeatResponse]:
        async for request in request_iterator:
            report = node_report_from_wire(request)
            check_report(report)
            check_name(request.node_id)
            answer = instruction_to_wire(self._control.beat(request.node_id, request.lease_id, report))
            leader = self._control.leader
            answer.leader_epoch, answer.leader_id, answer.sequence = leader.epoch, leader.leader_id, request.sequence
            yield answer

    async def WatchCluster(self, request: pb.WatchClusterRequest, context: Context) -> AsyncIterator[pb.WatchClusterResponse]:
        control = self._control
        await control.met(known_leader_from_wire(request))
        async for update in control.updates(loads=not request.omit_loads):
            leader = control.leader
            message = self._messages.of(update, leader.epoch)
            message.leader_epoch, message.leader_id = leader.epoch, leader.leader_id
            yield message

    async def DeployModel(self, request: pb.DeployModelRequest, context: Context) -> pb.DeployModelResponse:
        model = request.deployment.model
        async with self._auditor.act(context, "DeployModel", model, _deployed(self._control.deployment(model))) as act:
            deployment, key = deployment_from_wire(request.deployment), request.idempotency_key
            check_idempotency_key(key)
            options = DeployOptions(request.reload, request.rollback, idempotency_key=key)
            allowed = request.allow_outage or deployment.rollout.allow_outage
            if request.rollback:
                check_name_of(deployment)
                options = replace(options, allow_outage=allowed)
            else:
                deployment = replace(deployment, rollout=replace(deployment.rollout, allow_outage=allowed))
                check_deployment(deployment, self._max_nodes)
            stored = await self._control.deploy(deployment, options)
            act.after = _deployed(stored)
        return pb.DeployModelResponse(deployment=deployment_to_wire(stored))

    async def RemoveModel(self, request: pb.RemoveModelRequest, context: Context) -> pb.RemoveModelResponse:
        before = _deployed(self._control.deployment(request.model))
        async with self._auditor.act(context, "RemoveModel", request.model, before):
            await self._control.remove(request.model)
        return pb.RemoveModelResponse()

    async def ListDeployments(self, request: pb.ListDeploymentsRequest, context: Context) -> pb.ListDeploymentsResponse:
        await self._control.prepare()
        return pb.ListDeploymentsResponse(deployments=map(_status, self._control.deployments()))

    async def DeployAdapter(self, request: pb.DeployAdapterRequest, context: Context) -> pb.DeployAdapterResponse:
        name = request.adapter.name
        async with self._auditor.act(context, "DeployAdapter", name, _adapted(self._control.adapter(name))) as act:
            adapter = deployed_adapter_from_wire(request.adapter)
            check_adapter(adapter)
            stored = await self._control.deploy_adapter(adapter)
            act.after = _adapted(stored)
        return pb.DeployAdapterResponse(adapter=deployed_adapter_to_wire(stored))

    async def RemoveAdapter(self, request: pb.RemoveAdapterRequest, context: Context) -> pb.RemoveAdapterResponse:
        async with self._auditor.act(context, "RemoveAdapter", request.name, _adapted(self._control.adapter(request.name))):
            await self._control.remove_adapter(request.name)
        return pb.RemoveAdapterResponse()

    async def ListDeployedAdapters(
        self, request: pb.ListDeployedAdaptersRequest, context: Context
    ) -> pb.ListDeployedAdaptersResponse:
        return pb.ListDeployedAdaptersResponse(adapters=map(deployed_adapter_to_wire, self._control.adapters()))

    async def DrainNode(self, request: pb.DrainNodeRequest, context: Context) -> pb.DrainNodeResponse:
        async with self._auditor.act(context, "DrainNode", request.node_id, self._drained(request.node_id)) as act:
            check_node_id(request.node_id)
            await self._control.drain(request.node_id, below_min=request.below_min)
            act.after = self._drained(request.node_id)
        return pb.DrainNodeResponse()

    async def UndrainNode(self, request: pb.UndrainNodeRequest, context: Context) -> pb.UndrainNodeResponse:
        async with self._auditor.act(context, "UndrainNode", request.node_id, self._drained(request.node_id)) as act:
            check_node_id(request.node_id)
            await self._control.undrain(request.node_id)
            act.after = self._drained(request.node_id)
        return pb.UndrainNodeResponse()

    async def ListAudit(self, request: pb.ListAuditRequest, context: Context) -> pb.ListAuditResponse:
        page = await self._control.audit(audit_query(request))
        return audit_page(page)

    async def LeaveNode(self, request: pb.LeaveNodeRequest, context: Context) -> pb.LeaveNodeResponse:
        check_node_id(request.node_id)
        check_name(request.node_id)
        self._control.leave(request.node_id, request.lease_id)
        return pb.LeaveNodeResponse()

    async def ListNodes(self, request: pb.ListNodesRequest, context: Context) -> pb.ListNodesResponse:
        nodes = [node_to_wire(node) for node in self._control.nodes()]
        return pb.ListNodesResponse(nodes=nodes, protection=self._protection())

    def _drained(self, node_id: str) -> Facts | None:
        asked = self._control.is_drained(node_id)
        return None if asked is None else {"drain_requested": asked}


def _deployed(deployment: Deployment | None) -> Facts | None:
    """Returns what a record says of a deployment: of bounds, those that it states. Its model is the target."""
    if deployment is None:
        return None
    facts = asdict(deployment)
    del facts["model"], facts["idempotency_keys"]
    limits = facts.pop("rollout")
    for name in ("min_replicas", "max_replicas", "earlier_path", "outage_revision"):
        if not facts[name]:
            del facts[name]
    return facts | {f"rollout.{name}": value for name, value in limits.items() if value is not None and value is not False}


def _adapted(adapter: DeployedAdapter | None) -> Facts | None:
    """Returns what a record says of an adapter; its name is the target."""
    if adapter is None:
        return None
    facts = asdict(adapter)
    del facts["name"]
    return facts


def _status(status: DeploymentStatus) -> pb.DeploymentStatus:
    return pb.DeploymentStatus(
        deployment=deployment_to_wire(status.deployment),
        assigned_nodes=status.assigned_nodes,
        ready_nodes=status.ready_nodes,
        outdated_nodes=status.outdated_nodes,
        shortages=[
            pb.NodeShortage(node_id=each.node_id, missing_bytes=each.missing_bytes, reason=each.reason)
            for each in status.shortages
        ],
        waits_for=status.waits_for,
        halted=status.halted,
    )


class WatchMessages:
    """Converts updates to messages, each snapshot and each change once for all watchers that are sent it.

    After a restart ten routers want the same snapshot of a thousand nodes in the same moment.
    """

    def __init__(self) -> None:
        self._snapshot = pb.ClusterSnapshot()
        self._snapshot_of: tuple[int, str, int] | None = None
        self._changes: OrderedDict[int, tuple[Change, pb.ClusterDelta]] = OrderedDict()
        """By the identity of the change, which is kept with its message."""

    def of(self, update: Update, leader_epoch: int) -> pb.WatchClusterResponse:
        """Returns the message of an update. The caller may change it.

        A leader that leads again counts its versions anew: `leader_epoch` tells its terms apart.
        """
        if isinstance(update, SignOfLife):
            return pb.WatchClusterResponse()
        if isinstance(update, Snapshot):
            key = leader_epoch, update.epoch, update.version
            if key != self._snapshot_of:
                self._snapshot, self._snapshot_of = _snapshot(update), key
            return pb.WatchClusterResponse(snapshot=self._snapshot)
        message = pb.WatchClusterResponse(delta=self._delta(update.change))
        message.delta.version = update.version
        return message

    def _delta(self, change: Change) -> pb.ClusterDelta:
        known = self._changes.get(id(change))
        if known is None:
            known = self._changes[id(change)] = change, _change(change)
            if len(self._changes) > _MOST_CHANGES:
                self._changes.popitem(last=False)
        return known[1]


def _snapshot(snapshot: Snapshot) -> pb.ClusterSnapshot:
    return pb.ClusterSnapshot(
        epoch=snapshot.epoch,
        version=snapshot.version,
        nodes=[node_to_wire(node) for node in snapshot.state.nodes],
        deployments=[deployment_to_wire(deployment) for deployment in snapshot.state.deployments],
    )


def _change(change: Change) -> pb.ClusterDelta:
    match change:
        case NodeChanged():
            return pb.ClusterDelta(node=node_to_wire(change.node))
        case NodeLeft():
            return pb.ClusterDelta(node_left=change.node_id)
        case DeploymentChanged():
            return pb.ClusterDelta(deployment=deployment_to_wire(change.deployment))
        case DeploymentRemoved():
            return pb.ClusterDelta(deployment_removed=change.model)
