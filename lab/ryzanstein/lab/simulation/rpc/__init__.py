"""gRPC over the simulated network: replacements for `grpc.aio`'s channels and servers.

The generated stubs and servicers are the real ones, and every message is serialized and parsed. The
interface is what the services use of grpc.aio: calls that are read, written, awaited and cancelled,
deadlines, metadata, rich statuses, interceptors, graceful stops. Flow control is a window of bytes
per direction that the reader has not yet read.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import grpc

from ryzanstein.lab.simulation.machine.network import SimulatedNetwork
from ryzanstein.lab.simulation.rpc.client import Channel
from ryzanstein.lab.simulation.rpc.server import Server
from ryzanstein.lab.simulation.rpc.stream import CONNECT, SimulatedClientStream
from ryzanstein.rpc import server as rpc_server
from ryzanstein.rpc.http2 import dialing
from ryzanstein.rpc.http2.client_stream import MessageReceiver

Options = Sequence[tuple[str, Any]]


def install(network: SimulatedNetwork) -> None:
    """Makes `grpc.aio` create simulated channels and servers, and `rpc.http2` simulated streams and servers, from now on.

    Called with a parameter that is not simulated, they raise TypeError.
    """

    def insecure_channel(target: str, options: Options | None = None) -> Channel:
        return Channel(network, target, options or ())

    def server(
        *, interceptors: Sequence[grpc.aio.ServerInterceptor], options: Options, maximum_concurrent_rpcs: int | None = None
    ) -> Server:
        # The options and the bound on calls have no effect here.
        return Server(network, interceptors)

    def builtin(interceptors: Sequence[grpc.aio.ServerInterceptor], *_: Any, **__: Any) -> Server:
        return Server(network, interceptors)

    async def open_stream(address: str, method: str, receiver: MessageReceiver, *_: Any) -> SimulatedClientStream:
        if method != CONNECT:
            raise TypeError(f"{method} is not simulated")
        return SimulatedClientStream(network, address, receiver)

    aio: Any = grpc.aio
    aio.insecure_channel, aio.server = insecure_channel, server
    ours: Any = rpc_server
    ours.Http2Server = builtin
    stream: Any = dialing
    stream.open_stream = open_stream
