"""The HTTP behind `/metrics`: the library's answers, and bounds on how many ask at once and how long each may take."""

from __future__ import annotations

import sys
import threading
import time
from http import HTTPStatus
from http.server import ThreadingHTTPServer
from socket import SHUT_RDWR, socket
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
    """One request: 400 for what cannot be read, 405 for another method than GET."""

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
        """The client is at fault, also where the library says 501 (another method) or 505 (another version of HTTP)."""
        super().send_error(_AT_FAULT.get(code, code), message, explain)

    def send_response(self, code: int, message: str | None = None) -> None:
        super().send_response(code, message)
        if code == HTTPStatus.METHOD_NOT_ALLOWED:
            self.send_header("Allow", "GET")

    def do_GET(self) -> None:
        try:
            choose_encoder(self.headers.get("Accept", ""))
            parse_qs(urlsplit(self.path).query)
        except (ValueError, TypeError):  # what the library makes of versions that are no numbers
            self.send_error(400)
        else:
            super().do_GET()


class BoundedServer(ThreadingHTTPServer):
    """A thread per request, but only so many, and each only so long. Connections beyond that are closed at once."""

    daemon_threads = True

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        self._room = threading.BoundedSemaphore(_MAX_THREADS)
        self._ends: dict[socket, float] = {}
        super().__init__(*args, **kwargs)

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
        """Twice a second: whoever took too long reads and writes no more."""
        now = time.monotonic()
        for request, end in list(self._ends.items()):
            if now >= end:
                self._ends.pop(request, None)
                _shut(request)

    def handle_error(self, request: Any, client_address: Any) -> None:
        """A client that goes away, or is too slow, is no error of ours."""
        error = sys.exc_info()[1]
        if not isinstance(error, OSError):
            log.error("metrics request failed", error=repr(error)[:512], exc_info=error)


def _shut(request: socket) -> None:
    try:
        request.shutdown(SHUT_RDWR)
    except OSError:  # it has ended in this moment
        return
