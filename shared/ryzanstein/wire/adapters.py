"""Adapters in the messages between nodes and routers."""

from __future__ import annotations

from ryzanstein import errors
from ryzanstein.adapters import MAX_ADAPTERS, AdapterReport, DeployedAdapter, DeployedAdapters, NodeAdapter
from ryzanstein.generation.request import AdapterRef
from ryzanstein.v1 import orchestrator_pb2 as orchestrator
from ryzanstein.v1 import worker_pb2 as worker
from ryzanstein.wire.requests import name_from_wire

DIGEST_BYTES = 32


def ref_to_wire(ref: AdapterRef | None) -> worker.AdapterRef | None:
    return None if ref is None else worker.AdapterRef(name=ref.name, digest=ref.digest)


def ref_from_wire(wire: worker.AdapterRef, field: str) -> AdapterRef:
    """Raises INVALID_ARGUMENT for a name or a digest out of its bounds."""
    name = name_from_wire(wire.name, f"{field}.name")
    if not name:
        raise errors.invalid(f"{field}.name", "must not be empty")
    if len(wire.digest) != DIGEST_BYTES:
        raise errors.invalid(f"{field}.digest", f"must have {DIGEST_BYTES} bytes", len(wire.digest))
    return AdapterRef(name, wire.digest)


def report_to_wire(report: AdapterReport) -> worker.NodeAdapters:
    replaced = (worker.AdapterRef(name=ref.name, digest=ref.digest) for ref in report.replaced)
    return worker.NodeAdapters(whole=report.whole, adapters=map(adapter_to_wire, report.adapters), replaced=replaced)


def adapter_to_wire(adapter: NodeAdapter) -> worker.NodeAdapter:
    return worker.NodeAdapter(adapter=ref_to_wire(adapter.ref), revision=adapter.revision, resident=adapter.resident)


def report_from_wire(wire: worker.NodeAdapters) -> AdapterReport:
    """Returns a report of at most MAX_ADAPTERS. What is out of its bounds is left out, since no request can name it."""
    found = ((_ref(each.adapter), each) for each in wire.adapters[:MAX_ADAPTERS])
    adapters = tuple(NodeAdapter(ref, each.revision, each.resident) for ref, each in found if ref is not None)
    replaced = filter(None, map(_ref, wire.replaced[:MAX_ADAPTERS]))
    return AdapterReport(adapters, wire.whole, tuple(replaced))


def _ref(wire: worker.AdapterRef) -> AdapterRef | None:
    try:
        return ref_from_wire(wire, "adapter")
    except errors.RyzansteinError:
        return None


def deployed_adapters_to_wire(deployed: DeployedAdapters) -> orchestrator.DeployedAdapters:
    return orchestrator.DeployedAdapters(digest=deployed.digest, adapters=map(deployed_adapter_to_wire, deployed.adapters))


def deployed_adapters_from_wire(wire: orchestrator.DeployedAdapters) -> DeployedAdapters:
    return DeployedAdapters(wire.digest, tuple(map(deployed_adapter_from_wire, wire.adapters)))


def deployed_adapter_to_wire(adapter: DeployedAdapter) -> orchestrator.DeployedAdapter:
    return orchestrator.DeployedAdapter(
        name=adapter.name, model=adapter.model, path=adapter.path, pinned=adapter.pinned, revision=adapter.revision
    )


def deployed_adapter_from_wire(wire: orchestrator.DeployedAdapter) -> DeployedAdapter:
    return DeployedAdapter(wire.name, wire.model, wire.path, wire.pinned, wire.revision)
