"""AdapterService on a node: operators register adapters here where no orchestrator does."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from grpc.aio import ServicerContext

from ryzanstein import errors
from ryzanstein.adapters import NodeAdapter
from ryzanstein.auth.audit.audit_record import Facts
from ryzanstein.auth.audit.auditor import Auditor
from ryzanstein.generation.prompts import name_fault
from ryzanstein.v1 import adapter_pb2 as pb
from ryzanstein.v1 import worker_pb2 as worker
from ryzanstein.v1.adapter_pb2_grpc import AdapterServiceServicer
from ryzanstein.wire.adapters import adapter_to_wire
from ryzanstein.worker.agent.adapters.registry import RegisteredAdapter
from ryzanstein.worker.agent.models import NodeModels
from ryzanstein.worker.agent.node import NodeAgent
from ryzanstein.worker.config import MAX_PATH_CHARS

Context = ServicerContext[Any, Any]


class AdapterServicer(AdapterServiceServicer):
    """A thin adapter from gRPC to the registries of the node's agents."""

    def __init__(self, models: NodeModels, auditor: Auditor) -> None:
        self._models, self._auditor = models, auditor

    async def LoadAdapter(self, request: pb.LoadAdapterRequest, context: Context) -> pb.LoadAdapterResponse:
        node = self._node(request.model)
        async with self._auditor.act(context, "LoadAdapter", request.name, _facts(node, request.name)) as act:
            _check_name(request.name, node)
            added = await node.adapters.add(request.name, _path(request.path), pinned=request.pinned)
            act.after = _facts(node, request.name)
        return pb.LoadAdapterResponse(adapter=_status(node, added))

    async def UnloadAdapter(self, request: pb.UnloadAdapterRequest, context: Context) -> pb.UnloadAdapterResponse:
        node = self._node(request.model)
        async with self._auditor.act(context, "UnloadAdapter", request.name, _facts(node, request.name)):
            if not node.adapters.remove(request.name):
                raise errors.not_found("model", request.name)
        return pb.UnloadAdapterResponse()

    async def ListAdapters(self, request: pb.ListAdaptersRequest, context: Context) -> pb.ListAdaptersResponse:
        node = self._node(request.model)
        registered = sorted(node.adapters.registry, key=lambda each: each.ref.name)
        refused = [
            pb.AdapterStatus(adapter=_named(name, refusal.revision), model=node.model_name, refusal=refusal.why)
            for name, refusal in sorted(node.adapters.refused.items())
        ]
        return pb.ListAdaptersResponse(adapters=[*(_status(node, each) for each in registered), *refused])

    def _node(self, model: str) -> NodeAgent:
        """Returns the agent of a model.

        Raises NOT_FOUND for a model that the node does not have, FAILED_PRECONDITION where its engine takes no adapters.
        """
        node = self._models.of(model).node
        if model not in ("", node.model_name):
            raise errors.not_found("model", model)
        if not node.adapters.able:
            raise errors.failed_precondition("ENGINE_LACKS", "the engine beside this node has its own adapters")
        return node


def _check_name(name: str, node: NodeAgent) -> None:
    if fault := name_fault(name):
        raise errors.invalid("name", fault, name[:160])
    if name in (node.model_name, *node.other_models):
        raise errors.invalid("name", "must not be that of a model", name)


def _path(path: str) -> Path:
    if not 1 <= len(path) <= MAX_PATH_CHARS or "\0" in path:
        raise errors.invalid("path", f"must have 1 to {MAX_PATH_CHARS} characters and no NUL")
    if not Path(path).is_absolute():
        raise errors.invalid("path", "must be absolute", path[:160])
    return Path(path)


def _status(node: NodeAgent, adapter: RegisteredAdapter) -> pb.AdapterStatus:
    resident = node.version.adapters.has(adapter.ref.digest)
    return pb.AdapterStatus(
        adapter=adapter_to_wire(NodeAdapter(adapter.ref, adapter.revision, resident)),
        model=node.model_name,
        path=str(adapter.path),
        pinned=adapter.pinned,
        bytes=adapter.num_bytes,
    )


def _named(name: str, revision: int) -> worker.NodeAdapter:
    return worker.NodeAdapter(adapter=worker.AdapterRef(name=name), revision=revision)


def _facts(node: NodeAgent, name: str) -> Facts | None:
    found = node.adapters.registry.get(name)
    return None if found is None else {"adapter": name, "digest": found.ref.digest.hex(), "path": str(found.path)}
