"""The suite's client over WebSocket: all its generations on one socket, each with its own stream."""

from __future__ import annotations

import contextlib
import itertools
import json
from typing import Any

from tests.cluster.conformance.asked import Asked, Refusal, Reply
from tests.cluster.conformance.http_driver import bare, refusal, take_choice, take_usage
from websockets.exceptions import ConnectionClosed, InvalidStatus
from websockets.sync.client import ClientConnection, connect


class SocketDriver:
    streams = True

    def __init__(self, url: str) -> None:
        self._url = url.replace("http", "ws", 1) + "/v1/ws"
        self._stack = contextlib.ExitStack()
        self._sockets: dict[str, ClientConnection] = {}
        self._names = map(str, itertools.count())
        self._ids: dict[str, str] = {}

    def close(self) -> None:
        self._stack.close()

    def ask(self, asked: Asked) -> Reply:
        socket, stream = self._submitted(asked)
        return self._read(socket, stream, Reply())

    def begin(self, asked: Asked, num_tokens: int) -> Reply:
        """On a socket of its own, which is closed: to leave a stream is to leave its socket."""
        with self._connected(asked.tenant) as socket:
            return self._read(socket, self._submit(socket, asked), Reply(), num_tokens)

    def attach(self, reply: Reply) -> Reply:
        socket, stream = self._socket(""), next(self._names)
        seen = {str(choice): heard.next_index for choice, heard in reply.choices.items()}
        ended = [choice for choice, heard in reply.choices.items() if heard.reason]
        request = {"generation": self._ids[reply.generation], "from_index": seen, "ended": ended, "include_usage": True}
        self._send(socket, "attach", id=stream, **request)
        return self._read(socket, stream, reply)

    def cancelled(self, asked: Asked, num_tokens: int) -> Reply:
        socket, stream = self._submitted(asked)
        reply = self._read(socket, stream, Reply(), num_tokens)
        self._send(socket, "cancel", id=stream)
        return self._read(socket, stream, reply)

    def _submitted(self, asked: Asked) -> tuple[ClientConnection, str]:
        socket = self._socket(asked.tenant)
        return socket, self._submit(socket, asked)

    def _submit(self, socket: ClientConnection, asked: Asked) -> str:
        stream = next(self._names)
        body = asked.body(stream_options={"include_usage": True})
        self._send(socket, "submit", id=stream, url=asked.url, body=body, headers=asked.headers)
        return stream

    def _socket(self, tenant: str) -> ClientConnection:
        if tenant not in self._sockets:
            try:
                self._sockets[tenant] = self._stack.enter_context(self._connected(tenant))
            except InvalidStatus as refused:  # who calls is a matter of the handshake
                response = refused.response
                error = json.loads(response.body or b"{}")["error"]
                raise refusal(response.status_code, error, "Retry-After" in response.headers) from None
        return self._sockets[tenant]

    def _connected(self, tenant: str) -> connect:
        headers = {"X-Tenant-Id": tenant} if tenant else {}
        return connect(self._url, subprotocols=["ryzanstein.v1"], additional_headers=headers, proxy=None)  # type: ignore[list-item]

    @staticmethod
    def _send(socket: ClientConnection, kind: str, **fields: Any) -> None:
        socket.send(json.dumps({"type": kind, **fields}))

    def _read(self, socket: ClientConnection, stream: str, reply: Reply, until: int | None = None) -> Reply:
        while True:
            frame = json.loads(socket.recv(timeout=60))
            if frame.get("id") != stream:
                continue  # the end of a stream that was left, or the answer to a cancel
            match frame["type"]:
                case "accepted" | "started":
                    reply.generation = bare(frame["generation"])
                    self._ids[reply.generation] = frame["generation"]
                case "chunk":
                    self._take(frame, reply)
                    if until is not None and reply.num_read >= until:
                        return reply
                case "done":
                    return reply
                case "error":
                    raise self._refusal(frame)

    @staticmethod
    def _take(frame: dict[str, Any], reply: Reply) -> None:
        take_usage(frame["chunk"].get("usage"), reply)
        for delta in frame["chunk"]["choices"]:
            heard = reply.of(frame["choice"])
            take_choice(delta, heard)
            assert frame["index"] >= heard.next_index, "a token was repeated"
            heard.next_index = frame["index"]

    @staticmethod
    def _refusal(frame: dict[str, Any]) -> Refusal:
        return refusal(frame["status"], frame["error"], "retry_after_ms" in frame)

    # For the death of a router: streams that stay open beside others.

    def begin_alongside(self, asked: Asked, num_tokens: int) -> Reply:
        """Reads so many tokens and leaves the stream open, without credit for many more."""
        socket = self._socket(asked.tenant)
        stream = next(self._names)
        body = asked.body(stream_options={"include_usage": True})
        self._send(socket, "submit", id=stream, url=asked.url, body=body, credit=num_tokens + 10)
        return self._read(socket, stream, Reply(), num_tokens)

    def read_on(self) -> None:
        """Reads until the socket is gone. Raises ConnectionError."""
        try:
            while True:
                self._socket("").recv(timeout=60)
        except ConnectionClosed as closed:
            self._sockets.pop("")
            raise ConnectionError(str(closed)) from None

    def know(self, reply: Reply, other: SocketDriver) -> None:
        """Takes the id that a client has of its generation to another router."""
        self._ids[reply.generation] = other._ids[reply.generation]
