"""gRPC over the simulated network: replacements for `grpc.aio`'s channels and servers.

The generated stubs and servicers are the real ones, and every message is serialized and parsed. The
interface is what the services use of grpc.aio: calls that are read, written, awaited and cancelled,
deadlines, metadata, rich statuses, interceptors, graceful stops. Flow control is a window of bytes
per direction that the reader has not yet read.
"""

from __future__ import annotations

from typing import Any

import grpc

from ryzanstein.lab.simulation.network import SimulatedNetwork
from ryzanstein.lab.simulation.rpc.client import Channel
from ryzanstein.lab.simulation.rpc.server import Server


def install(network: SimulatedNetwork) -> None:
    """Makes `grpc.aio` create simulated channels and servers from now on."""
    aio: Any = grpc.aio
    aio.insecure_channel = lambda address, options=(), **_: Channel(network, address, options or ())
    aio.server = lambda interceptors=(), options=(), **_: Server(network, interceptors or ())
