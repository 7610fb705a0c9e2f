"""A gRPC server of another version of the protocol: methods of one service, by name."""

from __future__ import annotations

import asyncio
import json
import sys
from collections.abc import AsyncIterator, Callable
from typing import Any

import grpc
from tests.compat.wires import PACKAGE, Wire, visible


def report(event: str, **fields: Any) -> None:
    """Writes one line for the test to read."""
    print(json.dumps({"event": event, **fields}), flush=True)


def report_message(event: str, message: Any) -> None:
    report(event, message=visible(message))


async def serve(wire: Wire, service: str, methods: dict[str, Callable[..., Any]]) -> None:
    """Serves the methods on a free port of 127.0.0.1, until the process is killed."""
    handlers = {}
    for name, behaviour in methods.items():
        method = wire.method(service, name)
        kind = f"{'stream' if method.client_streaming else 'unary'}_{'stream' if method.server_streaming else 'unary'}"
        handlers[name] = getattr(grpc, f"{kind}_rpc_method_handler")(
            behaviour,
            request_deserializer=wire.message(method.input_type.name).FromString,
            response_serializer=lambda message: message.SerializeToString(),
        )
    server = grpc.aio.server(options=[("grpc.so_reuseport", 0)])
    server.add_generic_rpc_handlers([grpc.method_handlers_generic_handler(f"{PACKAGE}.{service}", handlers)])
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    report("serving", port=port)
    await server.wait_for_termination()


async def lines() -> AsyncIterator[dict[str, Any]]:
    """Yields the lines of standard input, each an object."""
    reader = asyncio.StreamReader()
    await asyncio.get_running_loop().connect_read_pipe(lambda: asyncio.StreamReaderProtocol(reader), sys.stdin)
    while line := await reader.readline():
        yield json.loads(line)
