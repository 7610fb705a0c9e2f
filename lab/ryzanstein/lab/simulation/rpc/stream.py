"""A call on a connection of its own: what replaces `ryzanstein.rpc.http2.dialing.open_stream`.

It has no tasks: a message is sent when it is given, and received in a callback, as by the real one.
"""

from __future__ import annotations

import grpc

from ryzanstein.lab.simulation.machine.network import SimulatedConnection, SimulatedNetwork
from ryzanstein.lab.simulation.rpc.flow import WINDOW_BYTES, Metadata, process, rewritten
from ryzanstein.lab.simulation.rpc.server import CallDetails, ServerCall, ServerSession
from ryzanstein.rpc.http2.call_end import CallEnd
from ryzanstein.rpc.http2.client_stream import MessageReceiver
from ryzanstein.v1 import worker_pb2 as worker

CONNECT = "/ryzanstein.v1.WorkerService/Connect"


class SimulatedClientStream:
    """Has the interface of `ClientStream`. Knows the requests of one method: a version may send them rewritten."""

    def __init__(self, network: SimulatedNetwork, address: str, receiver: MessageReceiver) -> None:
        self._process = process()
        self._receiver = receiver
        self.connection: SimulatedConnection | None = None
        self._server: ServerCall | None = None
        self._held: bytes | None = None
        self._unread = 0
        self._over = self._closed = False
        network.connect(self._process, address, self, self._connected)

    @property
    def ready(self) -> bool:
        return self._held is None and not self._over

    @property
    def holds(self) -> bool:
        return self._held is not None

    def send(self, message: bytes) -> None:
        if self._process.rewrite is not None:
            message = rewritten(self._process, worker.ConnectRequest.FromString(message)).SerializeToString()
        if self._server is None or self._unread >= WINDOW_BYTES:
            self._held = message
        else:
            self._send(self._server, message)

    def close(self) -> None:
        self._over = self._closed = True
        if self.connection is None:
            return
        if self._server is not None and self.connection.alive:
            self.connection.to_server.send(self._server.cancel)
        if self.connection.alive:
            self.connection.end_of(self._process, silently=False)

    def _connected(self, connection: SimulatedConnection | None) -> None:
        if connection is None:
            self.finish(grpc.StatusCode.UNAVAILABLE, "failed to connect to all addresses")
            return
        self.connection = connection
        if self._closed:
            connection.end_of(self._process, silently=False)
            return
        session = connection.server_end
        assert isinstance(session, ServerSession)
        self._server = ServerCall(self, connection, session, CallDetails(CONNECT, ()), None)
        connection.to_server.send(self._server.begin)
        self._send_held()

    def _send_held(self) -> None:
        if self._held is not None and self._server is not None and not self._over and self._unread < WINDOW_BYTES:
            held, self._held = self._held, None
            self._send(self._server, held)
            self._receiver.writable()

    def _send(self, server: ServerCall, message: bytes) -> None:
        assert self.connection is not None
        self._unread += len(message)
        self.connection.to_server.send(server.receive, message)

    # Called by the server and the connection.

    def begun(self, metadata: Metadata) -> None:
        """Implements `ClientEnd`. Nobody reads the metadata."""

    def receive(self, data: bytes) -> None:
        if not self._over:
            self._receiver.message(data)
        if self._server is not None:
            self._server.window.read(len(data))

    def written(self, size: int) -> None:
        self._unread -= size
        if self._held is not None:
            self._process.call_later(0.0, self._send_held)

    def finish(self, code: grpc.StatusCode, details: str = "", trailing: Metadata = ()) -> None:
        if self._server is not None:
            self._server.window.read(0)
        if not self._over:
            self._over = True
            self._receiver.ended(CallEnd(code, details))

    def connection_lost(self, why: str) -> None:
        """Implements `network.End`."""
        self.finish(grpc.StatusCode.UNAVAILABLE, why)
