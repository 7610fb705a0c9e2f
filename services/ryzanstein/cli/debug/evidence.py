"""Asks all services of a cluster what they do at this moment."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING

from google.protobuf.duration_pb2 import Duration
from google.protobuf.message import Message

from ryzanstein.auth.peers.peer import Peer
from ryzanstein.errors import RyzansteinError
from ryzanstein.rpc.client import Dialer
from ryzanstein.rpc.status import answered
from ryzanstein.survey.reach import ANY_NODE, ORCHESTRATOR, KeyedRouter
from ryzanstein.survey.views import ClusterStatus
from ryzanstein.v1 import debug_pb2 as pb
from ryzanstein.v1.debug_pb2_grpc import DebugServiceStub

if TYPE_CHECKING:
    from ryzanstein.v1.debug_pb2_grpc import DebugServiceAsyncStub

TIMEOUT_S = 5.0


@dataclass(frozen=True, slots=True)
class Service:
    """A service that is asked: one router, whose port is a public one, or another with the role that its certificate shows."""

    name: str
    address: str
    router: KeyedRouter | None = None
    peer: Peer | None = None


@dataclass(frozen=True, slots=True)
class Evidence:
    """What a service says of itself; `error` says why parts are missing."""

    service: Service
    requests: tuple[pb.FoundRequest, ...] = ()
    stacks: pb.DumpStacksResponse | None = None
    diagnostics: pb.GetDiagnosticsResponse | None = None
    error: str = ""

    @property
    def name(self) -> str:
        return self.service.name


@dataclass(frozen=True, slots=True)
class Questions:
    """What to ask: for requests by id or age, and for more of the service."""

    id: str = ""
    older_than_s: float = 0.0
    diagnostics: bool = False


def services_of(view: ClusterStatus, orchestrator: str, router: KeyedRouter) -> list[Service]:
    """Returns the services of a cluster: the router that is asked, all nodes, the orchestrator."""
    name = view.router.router_id or "router"
    nodes = [Service(each.node.node_id, each.node.address, peer=ANY_NODE) for each in view.nodes if not each.further]
    return [
        Service(name, router.address, router=router),
        *nodes,
        *(Service("orchestrator", each.strip(), peer=ORCHESTRATOR) for each in orchestrator.split(",")),
    ]


async def ask_all(services: list[Service], dialer: Dialer, questions: Questions) -> list[Evidence]:
    """Returns what each service says, in their order. All are asked at once."""
    return list(await asyncio.gather(*(_ask(service, dialer, questions) for service in services)))


async def _ask(service: Service, dialer: Dialer, questions: Questions) -> Evidence:
    find = pb.FindRequestsRequest(id=questions.id, older_than=Duration(seconds=int(questions.older_than_s)))
    try:
        async with _open(service, dialer) as stub:
            found, stacks = await asyncio.gather(
                answered(stub.FindRequests(find, timeout=TIMEOUT_S)),
                answered(stub.DumpStacks(pb.DumpStacksRequest(), timeout=TIMEOUT_S)),
            )
            diagnostics: pb.GetDiagnosticsResponse | None = None
            if questions.diagnostics:
                diagnostics = await answered(stub.GetDiagnostics(pb.GetDiagnosticsRequest(), timeout=TIMEOUT_S))
            return Evidence(service, tuple(found.requests), stacks, diagnostics)
    except RyzansteinError as error:
        return Evidence(service, error=f"{error.code.name}: {error.message}")


@asynccontextmanager
async def _open(service: Service, dialer: Dialer) -> AsyncIterator[DebugServiceAsyncStub]:
    if service.router is not None:
        async with service.router.open() as channel:
            yield DebugServiceStub(channel)
    else:
        assert service.peer is not None
        async with dialer.open(service.address, service.peer) as channel:
            yield DebugServiceStub(channel)


def seconds(span: Duration) -> float:
    return span.ToNanoseconds() / 1e9


def as_dict(message: Message) -> dict[str, object]:
    """Returns a message for scripts, fields by their names in the protos."""
    from google.protobuf.json_format import MessageToDict

    fields: dict[str, object] = MessageToDict(message, preserving_proto_field_name=True)
    return fields
