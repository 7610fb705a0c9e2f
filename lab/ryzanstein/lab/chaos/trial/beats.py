"""Counts the beats of nodes. To a node it is one more router, which never submits anything."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterable
from contextlib import asynccontextmanager, suppress

import grpc

from ryzanstein.rpc.client import open_channel
from ryzanstein.v1 import worker_pb2 as worker
from ryzanstein.v1 import worker_pb2_grpc as worker_grpc

_ROUTER_ID = "chaos-listener"


class BeatCounter:
    """A counter of beats. `count` grows while in `listening`."""

    def __init__(self) -> None:
        self.count = 0

    @asynccontextmanager
    async def listening(self, addresses: Iterable[str]) -> AsyncIterator[None]:
        """Connects to each node at host:port, as far as it answers."""
        tasks = [asyncio.create_task(self._listen(address)) for address in addresses]
        try:
            yield
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    async def _listen(self, address: str) -> None:
        async with open_channel(address, retries=False) as channel:
            call = worker_grpc.WorkerServiceStub(channel).Connect()
            with suppress(grpc.aio.AioRpcError):
                await call.write(worker.ConnectRequest(hello=worker.RouterHello(router_id=_ROUTER_ID)))
                async for frame in call:
                    self.count += frame.HasField("beat")
