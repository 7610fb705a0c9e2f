"""The members of a cluster: nodes, their beats and loads, and deployments."""

from __future__ import annotations

from typing import Protocol

from ryzanstein.cluster import (
    DEFAULT_LIMITS,
    OWN_ENGINE,
    Beat,
    Deployment,
    EngineTraits,
    Instruction,
    Load,
    LoadProgress,
    MemberAddresses,
    ModelNeed,
    ModelReport,
    Node,
    NodeReport,
    NodeState,
    Numerics,
    RolloutLimits,
)
from ryzanstein.generation.request import NO_DEFAULTS
from ryzanstein.leaders.epochs import LeaderEpoch
from ryzanstein.v1 import orchestrator_pb2 as orchestrator
from ryzanstein.v1 import worker_pb2 as worker
from ryzanstein.wire.adapters import deployed_adapters_from_wire, deployed_adapters_to_wire
from ryzanstein.wire.requests import sampling_defaults_from_wire, sampling_defaults_to_wire
from ryzanstein.wire.timestamps import duration, seconds, timestamp, unix_s

_MAX_NUMERICS_CHARS, _MAX_DIGEST_BYTES = 1024, 64
_MAX_PHASE_CHARS = 16
_MAX_CONTENT_CHARS = 64
_MAX_ENGINE_CHARS, _MAX_UNSUPPORTED, _MAX_UNSUPPORTED_CHARS = 128, 64, 64


def load_to_wire(load: Load) -> worker.Load:
    return worker.Load(
        running=load.running,
        waiting=load.waiting,
        capacity=load.capacity,
        kv_blocks_used=load.kv_blocks_used,
        kv_blocks_total=load.kv_blocks_total,
    )


def load_from_wire(wire: worker.Load) -> Load:
    return Load(wire.running, wire.waiting, wire.capacity, wire.kv_blocks_used, wire.kv_blocks_total)


def beat_to_wire(beat: Beat) -> worker.Beat:
    return worker.Beat(
        sequence=beat.sequence,
        state=worker.NodeState.ValueType(beat.state),
        model=beat.model,
        context_length=beat.context_length,
        load=load_to_wire(beat.load),
        step=beat.step,
        reason=beat.reason,
        time=timestamp(beat.time),
        profiling=beat.profiling,
        other_models=beat.other_models,
        numerics=beat.numerics.computed,
        weights_digest=beat.numerics.weights,
        sampling_defaults=sampling_defaults_to_wire(beat.sampling_defaults),
        unsupported=sorted(beat.engine.unsupported),
        engine=beat.engine.name,
        continues_inexactly=not beat.engine.continues_exactly,
        reserve=beat.reserve,
        quiet=beat.quiet,
    )


def beat_from_wire(wire: worker.Beat) -> Beat:
    return Beat(
        wire.sequence,
        NodeState(wire.state),
        wire.model,
        wire.context_length,
        load_from_wire(wire.load),
        wire.step,
        wire.reason,
        unix_s(wire.time),
        wire.profiling,
        tuple(wire.other_models),
        Numerics(wire.numerics[:_MAX_NUMERICS_CHARS], wire.weights_digest[:_MAX_DIGEST_BYTES]),
        sampling_defaults_from_wire(wire.sampling_defaults) if wire.HasField("sampling_defaults") else NO_DEFAULTS,
        _engine_from_wire(wire),
        wire.reserve,
        wire.quiet,
    )


def _engine_from_wire(wire: worker.Beat) -> EngineTraits:
    """Returns what a beat says of the engine. Names over the bounds are left out: no field has such a name."""
    if not (wire.engine or wire.unsupported or wire.continues_inexactly):
        return OWN_ENGINE
    names = frozenset(name for name in wire.unsupported[:_MAX_UNSUPPORTED] if 0 < len(name) <= _MAX_UNSUPPORTED_CHARS)
    return EngineTraits(wire.engine[:_MAX_ENGINE_CHARS], names, not wire.continues_inexactly)


def node_to_wire(node: Node) -> orchestrator.Node:
    return orchestrator.Node(
        node_id=node.node_id,
        address=node.address,
        incarnation=node.incarnation,
        tp=node.tp,
        state=worker.NodeState.ValueType(node.state),
        model=node.model,
        context_length=node.context_length,
        load=load_to_wire(node.load),
        drain_requested=node.drain_requested,
        join_time=timestamp(node.join_time),
        beat_time=timestamp(node.beat_time),
        models=map(model_report_to_wire, node.models),
        memory_bytes=node.memory_bytes,
        tls_address=node.tls_address,
        host=node.host,
        zone=node.zone,
    )


def node_from_wire(wire: orchestrator.Node) -> Node:
    return Node(
        node_id=wire.node_id,
        address=wire.address,
        incarnation=wire.incarnation,
        tp=wire.tp,
        state=NodeState(wire.state),
        model=wire.model,
        context_length=wire.context_length,
        load=load_from_wire(wire.load),
        drain_requested=wire.drain_requested,
        join_time=unix_s(wire.join_time),
        beat_time=unix_s(wire.beat_time),
        models=tuple(map(model_report_from_wire, wire.models)),
        memory_bytes=wire.memory_bytes,
        tls_address=wire.tls_address,
        host=wire.host,
        zone=wire.zone,
    )


def model_report_to_wire(report: ModelReport) -> orchestrator.ModelReport:
    return orchestrator.ModelReport(
        model=report.model,
        path=report.path,
        revision=report.revision,
        state=worker.NodeState.ValueType(report.state),
        context_length=report.context_length,
        load=load_to_wire(report.load),
        reason=report.reason,
        memory_bytes=report.memory_bytes,
        started_with=report.started_with,
        asleep=report.asleep,
        next_revision=report.next_revision,
        next_state=worker.NodeState.ValueType(report.next_state),
        next_reason=report.next_reason,
        progress=None if report.progress is None else _progress_to_wire(report.progress),
        content=report.content,
    )


def _progress_to_wire(progress: LoadProgress) -> orchestrator.LoadProgress:
    return orchestrator.LoadProgress(
        phase=progress.phase,
        loaded_bytes=progress.loaded_bytes,
        total_bytes=progress.total_bytes,
        packed_bytes=progress.packed_bytes,
        pack_bytes=progress.pack_bytes,
    )


def model_report_from_wire(wire: orchestrator.ModelReport) -> ModelReport:
    return ModelReport(
        wire.model,
        wire.path,
        wire.revision,
        NodeState(wire.state),
        wire.context_length,
        load_from_wire(wire.load),
        wire.reason,
        wire.memory_bytes,
        wire.started_with,
        wire.asleep,
        wire.next_revision,
        NodeState(wire.next_state),
        wire.next_reason,
        _progress_from_wire(wire.progress) if wire.HasField("progress") else None,
        wire.content[:_MAX_CONTENT_CHARS],
    )


def _progress_from_wire(wire: orchestrator.LoadProgress) -> LoadProgress:
    phase = wire.phase[:_MAX_PHASE_CHARS]
    return LoadProgress(phase, wire.loaded_bytes, wire.total_bytes, wire.packed_bytes, wire.pack_bytes)


class _SaysLeader(Protocol):
    leader_epoch: int
    leader_id: str


def leader_from_wire(wire: _SaysLeader) -> LeaderEpoch:
    return LeaderEpoch(wire.leader_epoch, wire.leader_id)


class _KnowsLeader(Protocol):
    known_epoch: int
    known_leader_id: str


def known_leader_from_wire(wire: _KnowsLeader) -> LeaderEpoch:
    return LeaderEpoch(wire.known_epoch, wire.known_leader_id)


def heartbeat_to_wire(node_id: str, lease_id: str, report: NodeReport, sequence: int = 0) -> orchestrator.HeartbeatRequest:
    return orchestrator.HeartbeatRequest(
        node_id=node_id,
        lease_id=lease_id,
        beat=None if report.beat is None else beat_to_wire(report.beat),
        models=map(model_report_to_wire, report.models),
        memory_bytes=report.memory_bytes,
        needs=[orchestrator.ModelNeed(path=need.path, bytes=need.bytes, error=need.error) for need in report.needs],
        members_digest=report.members_digest,
        adapters_digest=report.adapters_digest,
        starts=report.starts,
        takes_member_changes=report.takes_member_changes,
        sequence=sequence,
    )


def node_report_from_wire(wire: orchestrator.HeartbeatRequest) -> NodeReport:
    return NodeReport(
        beat_from_wire(wire.beat) if wire.HasField("beat") else None,
        tuple(map(model_report_from_wire, wire.models)),
        wire.memory_bytes,
        tuple(ModelNeed(need.path, need.bytes, need.error) for need in wire.needs),
        wire.members_digest if wire.HasField("members_digest") else None,
        wire.adapters_digest if wire.HasField("adapters_digest") else None,
        dict(wire.starts),
        wire.takes_member_changes,
    )


def instruction_to_wire(instruction: Instruction) -> orchestrator.HeartbeatResponse:
    deployments = [_served_to_wire(deployment) for deployment in instruction.deployments]
    return orchestrator.HeartbeatResponse(
        deployment=deployments[0] if deployments else None,
        drain=instruction.drain,
        deployments=deployments,
        plural=instruction.plural,
        measure_paths=instruction.measure_paths,
        members=None if instruction.members is None else _members_to_wire(instruction.members),
        adapters=None if instruction.adapters is None else deployed_adapters_to_wire(instruction.adapters),
    )


def instruction_from_wire(wire: orchestrator.HeartbeatResponse) -> Instruction:
    if wire.plural:
        deployments = tuple(map(deployment_from_wire, wire.deployments))
    else:
        deployments = (deployment_from_wire(wire.deployment),) if wire.HasField("deployment") else ()
    members = _members_from_wire(wire.members) if wire.HasField("members") else None
    adapters = deployed_adapters_from_wire(wire.adapters) if wire.HasField("adapters") else None
    return Instruction(
        deployments, wire.drain, tuple(wire.measure_paths), wire.plural, members, adapters, leader_from_wire(wire)
    )


def _members_to_wire(members: MemberAddresses) -> orchestrator.MemberAddresses:
    return orchestrator.MemberAddresses(
        digest=members.digest, addresses=members.addresses, since=members.since, removed=members.removed
    )


def _members_from_wire(wire: orchestrator.MemberAddresses) -> MemberAddresses:
    return MemberAddresses(wire.digest, tuple(wire.addresses), wire.since, tuple(wire.removed))


def deployment_to_wire(deployment: Deployment) -> orchestrator.Deployment:
    wire = _served_to_wire(deployment)
    wire.min_replicas, wire.max_replicas = deployment.min_replicas, deployment.max_replicas
    wire.earlier_path = deployment.earlier_path
    if deployment.rollout != DEFAULT_LIMITS:
        wire.rollout.CopyFrom(_limits_to_wire(deployment.rollout))
    return wire


def _served_to_wire(deployment: Deployment) -> orchestrator.Deployment:
    """Returns what a node needs to know to serve it."""
    wire = orchestrator.Deployment(
        model=deployment.model, path=deployment.path, replicas=deployment.replicas, revision=deployment.revision
    )
    if deployment.idle_unload_s:
        wire.idle_unload.CopyFrom(duration(deployment.idle_unload_s))
    return wire


def _limits_to_wire(limits: RolloutLimits) -> orchestrator.RolloutLimits:
    return orchestrator.RolloutLimits(
        max_unavailable=limits.max_unavailable,
        min_ready=None if limits.min_ready_s is None else duration(limits.min_ready_s),
        progress=None if limits.progress_s is None else duration(limits.progress_s),
        max_failed=limits.max_failed,
        allow_outage=limits.allow_outage,
    )


def deployment_from_wire(wire: orchestrator.Deployment) -> Deployment:
    return Deployment(
        wire.model,
        wire.path,
        wire.replicas,
        wire.revision,
        seconds(wire.idle_unload),
        wire.min_replicas,
        wire.max_replicas,
        _limits_from_wire(wire.rollout) if wire.HasField("rollout") else DEFAULT_LIMITS,
        wire.earlier_path,
    )


def _limits_from_wire(wire: orchestrator.RolloutLimits) -> RolloutLimits:
    return RolloutLimits(
        wire.max_unavailable if wire.HasField("max_unavailable") else None,
        seconds(wire.min_ready) if wire.HasField("min_ready") else None,
        seconds(wire.progress) if wire.HasField("progress") else None,
        wire.max_failed if wire.HasField("max_failed") else None,
        wire.allow_outage,
    )
