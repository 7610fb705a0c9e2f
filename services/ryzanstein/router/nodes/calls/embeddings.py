"""Asks a node for the vectors of inputs."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

import grpc

from ryzanstein import clock, errors
from ryzanstein.embeddings import Embedded, EmbeddingRequest, EmbedInput
from ryzanstein.errors import Code, RyzansteinError
from ryzanstein.router.nodes.links.link import NodeLink
from ryzanstein.rpc.interceptors import REQUEST_ID
from ryzanstein.rpc.status import error_from_rpc
from ryzanstein.v1.embedding_pb2_grpc import EmbeddingServiceStub
from ryzanstein.wire.embeddings import embed_to_wire, embedded_from_wire


async def embed(link: NodeLink, request: EmbeddingRequest, inputs: Sequence[EmbedInput]) -> list[Embedded]:
    """Returns the vectors of some inputs of a request, before its deadline.

    Cancelled, or when the link ends, it also ends on the node. Raises UNAVAILABLE for a lost node,
    UNIMPLEMENTED for one of an earlier version, else the node's own error.
    """
    left_s = None if request.deadline is None else request.deadline - clock.unix_s()
    if left_s is not None and left_s <= 0:
        raise errors.deadline_exceeded()
    call = EmbeddingServiceStub(link.channel).Embed(
        embed_to_wire(request, inputs), timeout=left_s, metadata=((REQUEST_ID, request.request_id),)
    )
    try:
        answer = await call
    except grpc.aio.AioRpcError as failure:
        raise _error(link, failure) from None
    except asyncio.CancelledError:
        if (task := asyncio.current_task()) is not None and task.cancelling():
            raise
        raise errors.unavailable("LINK_DOWN", f"the link to node {link.node_id} ended") from None
    if len(answer.embeddings) != len(inputs):
        raise errors.internal(f"node {link.node_id} answered {len(answer.embeddings)} of {len(inputs)} inputs")
    return embedded_from_wire(answer)


def _error(link: NodeLink, failure: grpc.aio.AioRpcError) -> RyzansteinError:
    match failure.code():
        case grpc.StatusCode.UNIMPLEMENTED:
            text = f"node {link.node_id} is of an older version, which makes no embeddings"
            return RyzansteinError(text, Code.UNIMPLEMENTED, "NODES_TOO_OLD")
        case grpc.StatusCode.DEADLINE_EXCEEDED:
            return errors.deadline_exceeded()
    return error_from_rpc(failure)
