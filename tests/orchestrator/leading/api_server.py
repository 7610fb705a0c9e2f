"""A small API server of Kubernetes: Leases alone, with its optimistic concurrency."""

from __future__ import annotations

import json
import ssl
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

PATH = "/apis/coordination.k8s.io/v1/namespaces/ns/leases"


class FakeApiServer:
    """Keeps Leases. `status` is answered instead, if it is set; `tokens` are the Authorization headers that came."""

    def __init__(self, context: ssl.SSLContext | None = None) -> None:
        """`context`: it speaks TLS."""
        self.leases: dict[str, dict[str, Any]] = {}
        self.version, self.status = 10, 0
        self.tokens: list[str] = []
        self._lock = threading.Lock()
        outer = self

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                outer.handle(self, None)

            def do_POST(self) -> None:
                outer.handle(self, self.rfile.read(int(self.headers["Content-Length"])))

            do_PUT = do_POST

            def log_message(self, *_: Any) -> None:
                """It tells nobody."""

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        if context is not None:
            self._server.socket = context.wrap_socket(self._server.socket, server_side=True)
        self.url = f"http{'' if context is None else 's'}://127.0.0.1:{self._server.server_address[1]}"
        self._thread = threading.Thread(target=self._server.serve_forever, args=(0.02,))
        self._thread.start()

    def close(self) -> None:
        self._server.shutdown()
        self._thread.join()
        self._server.server_close()

    def handle(self, handler: BaseHTTPRequestHandler, body: bytes | None) -> None:
        self.tokens.append(handler.headers.get("Authorization", ""))
        with self._lock:
            status, answer = (self.status, {}) if self.status else self._answer(handler.command, handler.path, body)
        text = json.dumps(answer).encode()
        handler.send_response(status)
        handler.send_header("Content-Length", str(len(text)))
        handler.end_headers()
        handler.wfile.write(text)

    def _answer(self, method: str, path: str, body: bytes | None) -> tuple[int, dict[str, Any]]:
        lease = json.loads(body or b"{}")
        name = lease["metadata"]["name"] if method == "POST" else path.rpartition("/")[2]
        expected = PATH if method == "POST" else f"{PATH}/{name}"
        held = self.leases.get(name)
        if path != expected or (held is None and method != "POST"):
            return 404, {}
        if method == "GET":
            assert held is not None
            return 200, held
        version = lease["metadata"].pop("resourceVersion", "")
        if held is not None and (method == "POST" or version != held["metadata"]["resourceVersion"]):
            return 409, {}
        if held is None or lease["spec"] != held["spec"] or lease["metadata"] != _unversioned(held):
            self.version += 1
        lease["metadata"]["resourceVersion"] = str(self.version)
        self.leases[name] = lease
        return 201 if held is None else 200, lease


def _unversioned(lease: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in lease["metadata"].items() if name != "resourceVersion"}
