"""The gRPC face for operators: reports the router's links."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import grpc
from google.protobuf.duration_pb2 import Duration

from ryzanstein.router.nodes.breaker import BreakerState
from ryzanstein.router.nodes.report import LinkLoss, LinkReport
from ryzanstein.router.nodes.roster import Roster
from ryzanstein.v1 import router_pb2 as pb
from ryzanstein.v1 import worker_pb2 as worker
from ryzanstein.v1.router_pb2_grpc import RouterServiceServicer
from ryzanstein.wire.timestamps import timestamp

_Context = grpc.aio.ServicerContext[Any, Any]

_BREAKER = {
    BreakerState.CLOSED: pb.BREAKER_STATE_CLOSED,
    BreakerState.HALF_OPEN: pb.BREAKER_STATE_HALF_OPEN,
    BreakerState.OPEN: pb.BREAKER_STATE_OPEN,
}


class RouterServicer(RouterServiceServicer):
    """`RouterService` over this router's links. `protection` says how the router is protected now."""

    def __init__(self, links: Roster, protection: Callable[[], worker.Protection]) -> None:
        self._links, self._protection = links, protection

    async def GetRouterStatus(self, request: pb.GetRouterStatusRequest, context: _Context) -> pb.GetRouterStatusResponse:
        return pb.GetRouterStatusResponse(
            router_id=self._links.router_id,
            links=map(_link, self._links.reports()),
            recent_losses=map(_loss, self._links.recent_losses),
            protection=self._protection(),
        )


def _link(report: LinkReport) -> pb.LinkStatus:
    return pb.LinkStatus(
        node_id=report.node_id,
        address=report.address,
        up=report.up,
        suspicion=report.suspicion,
        breaker=_BREAKER[report.breaker],
        inflight=report.inflight,
        state=worker.NodeState.ValueType(report.state),
        reason=report.reason,
        clock_skew=Duration(seconds=round(report.clock_skew_s)),
        failure=report.failure,
        engine=report.engine.name,
        unsupported=sorted(report.engine.unsupported),
        continues_inexactly=not report.engine.continues_exactly,
        reserve=report.reserve,
    )


def _loss(loss: LinkLoss) -> pb.LinkLoss:
    return pb.LinkLoss(time=timestamp(loss.at), node_id=loss.node_id, cause=loss.cause, inflight=loss.inflight)
