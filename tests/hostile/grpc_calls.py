"""Sends bytes as the request of a call, whatever its kind, and tells how that ended."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable
from typing import Any

import grpc
from tests.hostile.grpc_corpus import Method

CALL_S = 30.0  # of a machine that does much else
# What says that something broke in there, and not in the request.
BROKEN = {grpc.StatusCode.UNKNOWN, grpc.StatusCode.INTERNAL, grpc.StatusCode.DATA_LOSS}


async def outcome(channel: grpc.aio.Channel, method: Method, *requests: bytes) -> grpc.StatusCode:
    """The status. Of a stream that answers, OK at its first answer; then it is left."""
    if method.request_streaming:
        kind = channel.stream_stream if method.response_streaming else channel.stream_unary
        call: Any = kind(method.path)(iter(requests), timeout=CALL_S)
    else:
        kind = channel.unary_stream if method.response_streaming else channel.unary_unary
        call = kind(method.path)(requests[0], timeout=CALL_S)
    try:
        await (anext(aiter(call), None) if method.response_streaming else call)
    except grpc.aio.AioRpcError as error:
        return error.code()
    finally:
        call.cancel()
    return grpc.StatusCode.OK


async def all_outcomes(
    address: str, calls: Iterable[tuple[Method, bytes]], at_once: int = 16
) -> list[tuple[Method, bytes, grpc.StatusCode]]:
    """Of each of these calls, over one channel."""
    room = asyncio.Semaphore(at_once)

    async def one(channel: grpc.aio.Channel, method: Method, request: bytes) -> tuple[Method, bytes, grpc.StatusCode]:
        async with room:
            return method, request, await outcome(channel, method, request)

    options = (("grpc.max_send_message_length", -1), ("grpc.use_local_subchannel_pool", 1))
    async with grpc.aio.insecure_channel(address, options=options) as channel:
        return await asyncio.gather(*(one(channel, method, request) for method, request in calls))
