"""The gRPC face for operators: reports the router's links, its figures, and the other routers."""

from __future__ import annotations

import time
from collections.abc import Awaitable, Callable, Sequence
from typing import Any

import grpc
from google.protobuf.duration_pb2 import Duration

from ryzanstein.router.faces.grpc.figures import figures_to_wire
from ryzanstein.router.journal.journal import Owner
from ryzanstein.router.nodes.breaker import BreakerState
from ryzanstein.router.nodes.report import LinkLoss, LinkReport
from ryzanstein.router.nodes.roster import Roster
from ryzanstein.router.telemetry import RouterTelemetry
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
    """`RouterService` over this router's links and its metrics.

    `protection` says how the router is protected now, `routers` which routers there are. `tls`: clients reach all of them with
    TLS.
    """

    def __init__(
        self,
        links: Roster,
        telemetry: RouterTelemetry,
        protection: Callable[[], worker.Protection],
        routers: Callable[[], Awaitable[Sequence[Owner]]],
        *,
        tls: bool,
    ) -> None:
        self._links, self._telemetry, self._protection, self._routers, self._tls = links, telemetry, protection, routers, tls
        self._start_time = timestamp(time.time())

    async def GetRouterStatus(self, request: pb.GetRouterStatusRequest, context: _Context) -> pb.GetRouterStatusResponse:
        return pb.GetRouterStatusResponse(
            router_id=self._links.router_id,
            links=map(_link, self._links.reports()),
            recent_losses=map(_loss, self._links.recent_losses),
            figures=figures_to_wire(self._telemetry, self._start_time),
            protection=self._protection(),
        )

    async def ListRouters(self, request: pb.ListRoutersRequest, context: _Context) -> pb.ListRoutersResponse:
        found = sorted(await self._routers(), key=lambda owner: owner.router_id)
        return pb.ListRoutersResponse(
            routers=[
                pb.RouterMember(
                    router_id=each.router_id,
                    address=each.public,
                    draining=not each.address,
                    tls=self._tls,
                    instance_id=each.instance_id,
                )
                for each in found
            ]
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
