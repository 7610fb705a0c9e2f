"""How many generations of a dead router one other router takes over."""

from __future__ import annotations

import asyncio
from typing import Any

import grpc

from ryzanstein.rpc.status import error_from_rpc

ANSWERS = 12
ROOM = 3


async def outcome(call: Any) -> str:
    """`OK`, or the reason of the refusal."""
    try:
        await call
    except grpc.aio.AioRpcError as error:
        return error_from_rpc(error).reason
    return "OK"


async def test_a_router_takes_over_no_more_than_may_run(start_node: Any, start_routers: Any, new_client: Any) -> None:
    node = await start_node("a", step_s=0.05)
    (first,) = await start_routers(1, node)
    (second,) = await start_routers(1, node, max_running=ROOM)
    clients = [new_client() for _ in range(ANSWERS)]
    await asyncio.gather(*(client.ask(first, 400, until_tokens=1) for client in clients))
    await first.kill()
    attached = await asyncio.gather(*(outcome(client.come_back(second, client.seen.num_tokens + 1)) for client in clients))
    assert await second.value("generations_running") == ROOM
    assert (attached.count("OK"), attached.count("QUEUE_FULL")) == (ROOM, ANSWERS - ROOM)
