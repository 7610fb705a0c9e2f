"""The members of a cluster: nodes, their beats and loads, and deployments."""

from __future__ import annotations

from ryzanstein.cluster import Beat, Deployment, Load, Node, NodeState
from ryzanstein.v1 import orchestrator_pb2 as orchestrator
from ryzanstein.v1 import worker_pb2 as worker
from ryzanstein.wire.timestamps import timestamp, unix_s


def load_to_wire(load: Load) -> worker.Load:
    return worker.Load(**{name: getattr(load, name) for name in Load.__dataclass_fields__})


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
    )


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
    )


def deployment_to_wire(deployment: Deployment) -> orchestrator.Deployment:
    return orchestrator.Deployment(model=deployment.model, path=deployment.path, replicas=deployment.replicas)


def deployment_from_wire(wire: orchestrator.Deployment) -> Deployment:
    return Deployment(wire.model, wire.path, wire.replicas)
