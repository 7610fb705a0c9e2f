"""Counts the beats of nodes. To a node it is one more router, which never submits anything."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager, suppress

import grpc

from ryzanstein.auth.peers.peer import Peer, PeerRole
from ryzanstein.rpc.client import Dialer
from ryzanstein.v1 import worker_pb2 as worker
from ryzanstein.v1 import worker_pb2_grpc as worker_grpc

LISTENER = "chaos-listener"


class BeatCounter:
    """A counter of beats. `count` grows while in `listening`."""

    def __init__(self, dialer: Dialer) -> None:
        self._dialer = dialer
        self.count = 0

    @asynccontextmanager
    async def listening(self, nodes: Mapping[str, str]) -> AsyncIterator[None]:
        """Connects to each node, host:port by id, as far as it answers."""
        tasks = [asyncio.create_task(self._listen(node_id, address)) for node_id, address in nodes.items()]
        try:
            yield
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    async def _listen(self, node_id: str, address: str) -> None:
        async with self._dialer.open(address, Peer(PeerRole.NODE, node_id), retries=False) as channel:
            call = worker_grpc.WorkerServiceStub(channel).Connect()
            with suppress(grpc.aio.AioRpcError):
                await call.write(worker.ConnectRequest(hello=worker.RouterHello(router_id=LISTENER)))
                async for frame in call:
                    self.count += frame.HasField("beat")
