"""The answer of a node to a call beside its stream, or the error in the router's terms."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable
from typing import TypeVar

import grpc

from ryzanstein import errors
from ryzanstein.errors import Code, RyzansteinError
from ryzanstein.router.nodes.links.link import NodeLink
from ryzanstein.rpc.status import error_from_rpc

_T = TypeVar("_T")


async def answer_of(link: NodeLink, call: Awaitable[_T], lacks: str) -> _T:
    """Returns the answer to a call on the link's channel.

    Raises UNAVAILABLE when the link ends, NODES_TOO_OLD when the node does not know the call (`lacks`
    says what a node of that version does not do), else the node's own error.
    """
    try:
        return await call
    except grpc.aio.AioRpcError as failure:
        if failure.code() is grpc.StatusCode.UNIMPLEMENTED:
            raise too_old(link, lacks) from None
        raise error_from_rpc(failure) from None
    except asyncio.CancelledError:
        if (task := asyncio.current_task()) is not None and task.cancelling():
            raise
        # Nobody cancelled this task: the channel was closed under the call.
        raise errors.unavailable("LINK_DOWN", f"the link to node {link.node_id} ended") from None


def too_old(link: NodeLink, lacks: str) -> RyzansteinError:
    return RyzansteinError(f"node {link.node_id} is of an older version, which {lacks}", Code.UNIMPLEMENTED, "NODES_TOO_OLD")
