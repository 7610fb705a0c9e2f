"""A call on a connection of its own: what replaces `ryzanstein.rpc.http2.dialing.open_stream`."""

from __future__ import annotations

import asyncio
from typing import Any

import grpc

from ryzanstein.lab.simulation.machine.network import SimulatedNetwork
from ryzanstein.lab.simulation.rpc.client import Channel
from ryzanstein.rpc.http2.call_end import CallEnd
from ryzanstein.rpc.http2.client_stream import MessageReceiver
from ryzanstein.v1 import worker_pb2 as worker

CONNECT = "/ryzanstein.v1.WorkerService/Connect"


class SimulatedClientStream:
    """Has the interface of `ClientStream`. Knows the requests of one method: a version may send them rewritten."""

    def __init__(self, network: SimulatedNetwork, address: str, receiver: MessageReceiver) -> None:
        self._channel = Channel(network, address, ())
        self._receiver = receiver
        self._call: Any = self._channel.stream_stream(CONNECT, worker.ConnectRequest.SerializeToString, bytes)()
        self._writing: asyncio.Task[None] | None = None
        self._over = False
        self._reading = asyncio.get_running_loop().create_task(self._read())

    @property
    def ready(self) -> bool:
        return self._writing is None and not self._over

    @property
    def holds(self) -> bool:
        return self._writing is not None

    def send(self, message: bytes) -> None:
        self._writing = asyncio.get_running_loop().create_task(self._call.write(worker.ConnectRequest.FromString(message)))
        self._writing.add_done_callback(self._written)

    def close(self) -> None:
        self._over = True
        self._call.cancel()
        self._reading.cancel()
        asyncio.get_running_loop().create_task(self._channel.close())

    def _written(self, writing: asyncio.Task[None]) -> None:
        self._writing = None
        # Of an error the reader hears, too.
        if not writing.cancelled() and writing.exception() is None and not self._over:
            self._receiver.writable()

    async def _read(self) -> None:
        try:
            while (data := await self._call.read()) is not grpc.aio.EOF:
                if self._over:
                    return
                self._receiver.message(data)
            end = CallEnd(grpc.StatusCode.OK)
        except grpc.aio.AioRpcError as error:
            end = CallEnd(error.code(), error.details() or "")
        if not self._over:
            self._over = True
            self._receiver.ended(end)
