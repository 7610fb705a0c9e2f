"""The gRPC face for other routers."""

from __future__ import annotations

from typing import Any

import grpc

from ryzanstein.router.core.clustered import ClusteredCore
from ryzanstein.router.faces.grpc.call import Calls
from ryzanstein.v1 import peer_pb2 as pb
from ryzanstein.v1.peer_pb2_grpc import PeerServiceServicer

_Context = grpc.aio.ServicerContext[Any, Any]


class PeerServicer(PeerServiceServicer):
    """`PeerService` over a journalled core."""

    def __init__(self, core: ClusteredCore, calls: Calls) -> None:
        self._core = core
        self._calls = calls

    async def InterruptGeneration(
        self, request: pb.InterruptGenerationRequest, context: _Context
    ) -> pb.InterruptGenerationResponse:
        with self._calls.call("InterruptGeneration", context) as call:
            interrupted = await self._core.interrupt_for_peer(request.generation_id, call.owner_id)
            return pb.InterruptGenerationResponse(interrupted=interrupted)

    async def CheckSession(self, request: pb.CheckSessionRequest, context: _Context) -> pb.CheckSessionResponse:
        with self._calls.call("CheckSession", context) as call:
            return pb.CheckSessionResponse(held=self._core.holds_session_for_peer(request.session_id, call.owner_id))
