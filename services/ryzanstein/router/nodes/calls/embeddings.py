"""Asks a node for the vectors of inputs."""

from __future__ import annotations

from collections.abc import Sequence

from ryzanstein import clock, errors
from ryzanstein.embeddings import Embedded, EmbeddingRequest, EmbedInput
from ryzanstein.errors import Code, RyzansteinError
from ryzanstein.router.nodes.calls.answer import answer_of
from ryzanstein.router.nodes.links.link import NodeLink
from ryzanstein.rpc.interceptors import REQUEST_ID
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
        answer = await answer_of(link, call, "makes no embeddings")
    except RyzansteinError as error:
        if error.code is Code.DEADLINE_EXCEEDED:
            raise errors.deadline_exceeded() from None
        raise
    if len(answer.embeddings) != len(inputs):
        raise errors.internal(f"node {link.node_id} answered {len(answer.embeddings)} of {len(inputs)} inputs")
    return embedded_from_wire(answer)
