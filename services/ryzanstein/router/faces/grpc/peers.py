"""The gRPC face for other routers, on a port of its own.

Relayed readers come by `InferenceService`, of which only the two methods for generations that run are
here. So they find this router at one address, whatever its version and theirs.
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import aclosing
from typing import Any

import grpc

from ryzanstein import errors
from ryzanstein.router.core.clustered import ClusteredCore
from ryzanstein.router.core.peers import apart
from ryzanstein.router.faces.grpc.call import Calls, PeerCall
from ryzanstein.v1 import inference_pb2 as inference
from ryzanstein.v1 import peer_pb2 as pb
from ryzanstein.v1.inference_pb2_grpc import InferenceServiceServicer
from ryzanstein.v1.peer_pb2_grpc import PeerServiceServicer
from ryzanstein.wire.events import event_to_wire

_Context = grpc.aio.ServicerContext[Any, Any]


class PeerServicer(PeerServiceServicer):
    """`PeerService` over a journalled core."""

    def __init__(self, core: ClusteredCore, calls: Calls) -> None:
        self._core = core
        self._calls = calls

    async def InterruptGeneration(
        self, request: pb.InterruptGenerationRequest, context: _Context
    ) -> pb.InterruptGenerationResponse:
        with self._calls.peer_call("InterruptGeneration", context) as call:
            interrupted = await self._core.interrupt_for_peer(request.generation_id, call.owner_id)
            return pb.InterruptGenerationResponse(interrupted=interrupted)

    async def CheckSession(self, request: pb.CheckSessionRequest, context: _Context) -> pb.CheckSessionResponse:
        with self._calls.peer_call("CheckSession", context) as call:
            return pb.CheckSessionResponse(held=self._core.holds_session_for_peer(request.session_id, call.owner_id))


class RelayServicer(InferenceServiceServicer):
    """What other routers call for their clients: to read or cancel a generation of this router."""

    def __init__(self, core: ClusteredCore, calls: Calls) -> None:
        self._core = core
        self._calls = calls

    async def AttachGeneration(
        self, request: inference.AttachGenerationRequest, context: _Context
    ) -> AsyncIterator[inference.AttachGenerationResponse]:
        with self._calls.peer_call("AttachGeneration", context) as call:
            _check_addressed(call)
            # The relaying router then knows at once that this one is alive.
            await context.send_initial_metadata(())
            from_index = dict(request.from_index)
            following = self._core.follow(
                request.generation_id, from_index, call.owner_id, whole=call.whole, tenant=call.tenant
            )
            async with aclosing(following) as events:
                async for event in events:
                    for part in apart(event):
                        yield inference.AttachGenerationResponse(event=event_to_wire(part))

    async def CancelGeneration(
        self, request: inference.CancelGenerationRequest, context: _Context
    ) -> inference.CancelGenerationResponse:
        with self._calls.peer_call("CancelGeneration", context) as call:
            _check_addressed(call)
            await self._core.cancel(request.generation_id, call.owner_id, tenant=call.tenant)
            return inference.CancelGenerationResponse()


def _check_addressed(call: PeerCall) -> None:
    """Raises INVALID_ARGUMENT for a call that names no owner: a client has come to the wrong port."""
    if not call.owner_id:
        raise errors.invalid("x-ryzanstein-owner", "must be given: this port is for other routers")
