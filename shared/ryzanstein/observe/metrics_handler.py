"""The HTTP handler of `/metrics`: the library's, with bounds on concurrency and duration."""

from __future__ import annotations

import sys
import threading
import time
from http import HTTPStatus
from http.server import ThreadingHTTPServer
from socket import SHUT_RDWR, socket
from socketserver import TCPServer
from typing import Any
from urllib.parse import parse_qs, urlsplit

import structlog
from prometheus_client import MetricsHandler
from prometheus_client.exposition import choose_encoder

log = structlog.get_logger(__name__)

_MAX_THREADS = 16
_MAX_SECONDS = 10.0  # for a whole request and its answer
_SILENCE_S = 5.0
_MAX_LINE_BYTES = 8192
_AT_FAULT: dict[int, int] = {
    HTTPStatus.NOT_IMPLEMENTED: HTTPStatus.METHOD_NOT_ALLOWED,
    HTTPStatus.HTTP_VERSION_NOT_SUPPORTED: HTTPStatus.BAD_REQUEST,
}


class BoundedHandler(MetricsHandler):
    """A handler of one request: 400 if it cannot be parsed, 405 for methods other than GET."""

    raw_requestline: bytes
    timeout = _SILENCE_S
    server_version = "ryzanstein"
    sys_version = ""

    def parse_request(self) -> bool:
        if len(self.raw_requestline) <= _MAX_LINE_BYTES:
            return super().parse_request()
        self.requestline, self.request_version, self.command = "", self.protocol_version, ""
        self.send_error(414)
        return False

    def send_error(self, code: int, message: str | None = None, explain: str | None = None) -> None:
        """Sends an error as the client's fault.

        The library would send 501 for another method and 505 for another version of HTTP.
        """
        super().send_error(_AT_FAULT.get(code, code), message, explain)

    def send_response(self, code: int, message: str | None = None) -> None:
        super().send_response(code, message)
        if code == HTTPStatus.METHOD_NOT_ALLOWED:
            self.send_header("Allow", "GET")

    def do_GET(self) -> None:
        try:
            choose_encoder(self.headers.get("Accept", ""))
            parse_qs(urlsplit(self.path).query)
        except (ValueError, TypeError):  # the library's errors for versions that are not numbers
            self.send_error(400)
        else:
            super().do_GET()


class BoundedServer(ThreadingHTTPServer):
    """A server with a thread per request, bounded in number and time.

    Connections beyond the bound are closed at once.
    """

    daemon_threads = True

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        self._room = threading.BoundedSemaphore(_MAX_THREADS)
        self._ends: dict[socket, float] = {}
        super().__init__(*args, **kwargs)

    def server_bind(self) -> None:
        """Binds. The library would also look up the host's full name, which waits for a name server that is away."""
        TCPServer.server_bind(self)
        self.server_name, self.server_port = str(self.server_address[0]), self.server_address[1]

    def process_request(self, request: Any, client_address: Any) -> None:
        if not self._room.acquire(blocking=False):
            self.shutdown_request(request)
            return
        self._ends[request] = time.monotonic() + _MAX_SECONDS
        super().process_request(request, client_address)

    def process_request_thread(self, request: Any, client_address: Any) -> None:
        try:
            super().process_request_thread(request, client_address)
        finally:
            self._ends.pop(request, None)
            self._room.release()

    def service_actions(self) -> None:
        """Shuts down, twice a second, the connections that took too long."""
        now = time.monotonic()
        for request, end in list(self._ends.items()):
            if now >= end:
                self._ends.pop(request, None)
                _shut(request)

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Logs errors, except those of a client that disconnects or is too slow."""
        error = sys.exc_info()[1]
        if not isinstance(error, OSError):
            log.error("metrics request failed", error=repr(error)[:512], exc_info=error)


def _shut(request: socket) -> None:
    try:
        request.shutdown(SHUT_RDWR)
    except OSError:  # it has just ended
        return
