"""Who may call what. What is not in a table, nobody may call.

`PEER_RULES` are the methods between services, by the role in the caller's certificate. They count
where TLS is on: without it, a network is what protects them.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType

from ryzanstein.auth.peers.peer import Peer, PeerRole


@dataclass(frozen=True, slots=True)
class PeerNeed:
    """The roles that may call a method. `itself`: so may the service that serves it, as a node that stops itself does."""

    roles: frozenset[PeerRole]
    itself: bool = False

    def admits(self, peer: Peer, server: Peer) -> bool:
        """Whether this peer may call the method of this server."""
        return peer.role in self.roles or (self.itself and peer == server)


def _only(*roles: PeerRole, itself: bool = False) -> PeerNeed:
    return PeerNeed(frozenset(roles), itself)


_NODE = _only(PeerRole.NODE)
_ROUTER = _only(PeerRole.ROUTER)
_OPERATOR = _only(PeerRole.OPERATOR)
_ADAPTING = _only(PeerRole.ROUTER, PeerRole.OPERATOR)  # a router for callers with the scope `adapters`
_WATCHERS = _only(PeerRole.ROUTER, PeerRole.OPERATOR, PeerRole.MONITOR)
_ANYBODY = _only(*PeerRole)

OPEN = "/grpc.health.v1.Health/"
"""The methods that need no role: probes ask them."""
_REFLECTION = ("grpc.reflection.v1", "grpc.reflection.v1alpha")

PEER_RULES: Mapping[str, PeerNeed] = MappingProxyType(
    {
        "/ryzanstein.v1.OrchestratorService/RegisterNode": _NODE,
        "/ryzanstein.v1.OrchestratorService/Heartbeat": _NODE,
        "/ryzanstein.v1.OrchestratorService/LeaveNode": _NODE,
        "/ryzanstein.v1.OrchestratorService/WatchCluster": _WATCHERS,
        "/ryzanstein.v1.OrchestratorService/ListNodes": _WATCHERS,
        "/ryzanstein.v1.OrchestratorService/ListDeployments": _WATCHERS,
        "/ryzanstein.v1.OrchestratorService/DeployModel": _OPERATOR,
        "/ryzanstein.v1.OrchestratorService/RemoveModel": _OPERATOR,
        "/ryzanstein.v1.OrchestratorService/DeployAdapter": _ADAPTING,
        "/ryzanstein.v1.OrchestratorService/RemoveAdapter": _ADAPTING,
        "/ryzanstein.v1.OrchestratorService/ListDeployedAdapters": _WATCHERS,
        "/ryzanstein.v1.OrchestratorService/DrainNode": _OPERATOR,
        "/ryzanstein.v1.OrchestratorService/ListAudit": _OPERATOR,
        "/ryzanstein.v1.OrchestratorService/UndrainNode": _OPERATOR,
        "/ryzanstein.v1.WorkerService/Connect": _ROUTER,
        "/ryzanstein.v1.WorkerService/CountPromptTokens": _ROUTER,
        "/ryzanstein.v1.WorkerService/GetStatus": _only(PeerRole.ROUTER, PeerRole.OPERATOR, PeerRole.MONITOR, itself=True),
        "/ryzanstein.v1.WorkerService/LoadModel": _OPERATOR,
        "/ryzanstein.v1.WorkerService/UnloadModel": _OPERATOR,
        "/ryzanstein.v1.WorkerService/Drain": _only(PeerRole.OPERATOR, itself=True),
        "/ryzanstein.v1.WorkerService/Undrain": _OPERATOR,
        "/ryzanstein.v1.WorkerService/Profile": _OPERATOR,
        "/ryzanstein.v1.WorkerService/RecordProfile": _OPERATOR,
        "/ryzanstein.v1.TextService/Tokenize": _ROUTER,
        "/ryzanstein.v1.TextService/Detokenize": _ROUTER,
        "/ryzanstein.v1.EmbeddingService/Embed": _ROUTER,
        "/ryzanstein.v1.AdapterService/LoadAdapter": _OPERATOR,
        "/ryzanstein.v1.AdapterService/UnloadAdapter": _OPERATOR,
        "/ryzanstein.v1.AdapterService/ListAdapters": _ADAPTING,
        "/ryzanstein.v1.PageService/OfferPages": _NODE,
        "/ryzanstein.v1.PageService/SendPages": _NODE,
        "/ryzanstein.v1.PageService/FetchPages": _NODE,
        "/ryzanstein.v1.PeerService/InterruptGeneration": _ROUTER,
        "/ryzanstein.v1.PeerService/CheckSession": _ROUTER,
        # One router reads and cancels at another what its clients ask for.
        "/ryzanstein.v1.InferenceService/AttachGeneration": _ROUTER,
        "/ryzanstein.v1.InferenceService/CancelGeneration": _ROUTER,
        **{f"/ryzanstein.v1.DebugService/{name}": _OPERATOR for name in ("DumpStacks", "FindRequests", "GetDiagnostics")},
        **{f"/{package}.ServerReflection/ServerReflectionInfo": _ANYBODY for package in _REFLECTION},
    }
)
