"""Servers beside the browser: the page and its modules, a proxy that cuts a connection once, and the browser itself."""

from __future__ import annotations

import contextlib
import http.server
import json
import queue
import shutil
import socket
import subprocess
import tempfile
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import urlencode

BROWSERS = ("chromium", "chromium-browser", "google-chrome")
_HERE = Path(__file__).parent
_PAGE = b'<!doctype html><meta charset="utf-8"><script type="module" src="/checks.mjs"></script>'


class PageServer(http.server.ThreadingHTTPServer):
    """Serves the page, and `openai` from the folder of its npm package; takes one report."""

    daemon_threads = True

    def __init__(self, openai: Path) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.openai = openai
        self.reports: queue.Queue[dict[str, Any]] = queue.Queue()
        self.origin = f"http://127.0.0.1:{self.server_port}"
        threading.Thread(target=self.serve_forever, daemon=True).start()


class _Handler(http.server.BaseHTTPRequestHandler):
    server: PageServer

    def do_GET(self) -> None:
        path = self.path.partition("?")[0]
        if path == "/":
            self._answer("text/html", _PAGE)
        elif path == "/checks.mjs":
            self._answer("text/javascript", (_HERE / "checks.mjs").read_bytes())
        elif path.startswith("/openai/") and (file := self.server.openai / path.removeprefix("/openai/")).is_file():
            self._answer("text/javascript", file.read_bytes())
        else:
            self.send_error(404)

    def do_POST(self) -> None:
        self.server.reports.put(json.loads(self.rfile.read(int(self.headers["Content-Length"]))))
        self._answer("text/plain", b"")

    def _answer(self, kind: str, content: bytes) -> None:
        self.send_response(200)
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)

    def log_message(self, format: str, *args: object) -> None:
        """Prints nothing."""


class CuttingProxy:
    """Forwards connections to a port. The first one ends after `after_bytes` of its answer."""

    def __init__(self, port: int, after_bytes: int) -> None:
        self._port, self._left = port, after_bytes
        self.cut = 0
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.url = f"http://127.0.0.1:{self._listener.getsockname()[1]}"
        threading.Thread(target=self._accept, daemon=True).start()

    def close(self) -> None:
        self._listener.close()

    def _accept(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                client, _ = self._listener.accept()
                threading.Thread(target=self._serve, args=(client,), daemon=True).start()

    def _serve(self, client: socket.socket) -> None:
        with client, contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", self._port)) as server:
            asking = threading.Thread(target=self._forward, args=(client, server), daemon=True)
            asking.start()
            self._forward(server, client, is_answer=True)
            asking.join()

    def _forward(self, source: socket.socket, to: socket.socket, is_answer: bool = False) -> None:
        with contextlib.suppress(OSError):
            while data := source.recv(1024):
                if is_answer and not self.cut:
                    self._left -= len(data)
                    if self._left < 0:
                        self.cut += 1
                        break
                to.sendall(data)
        for each in (source, to):
            with contextlib.suppress(OSError):
                each.shutdown(socket.SHUT_RDWR)


@contextlib.contextmanager
def page_server(openai: Path) -> Iterator[PageServer]:
    server = PageServer(openai)
    try:
        yield server
    finally:
        server.shutdown()
        server.server_close()


def report_of(page: PageServer, timeout_s: float, **parameters: str) -> dict[str, Any]:
    """Opens the page in a new browser, and returns what it reports."""
    program = next((found for name in BROWSERS if (found := shutil.which(name))), None)
    assert program, f"a browser is needed, one of {', '.join(BROWSERS)}: bash .ci/parts browser"
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as profile:
        flags = ("--headless=new", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--no-first-run")
        flags += (
            "--disable-background-networking",
            "--disable-component-update",
            "--no-proxy-server",
            f"--user-data-dir={profile}",
        )
        command = (program, *flags, f"--user-data-dir={profile}", f"{page.origin}/?{urlencode(parameters)}")
        with open(Path(profile) / "log", "wb") as log:
            browser = subprocess.Popen(command, stdout=log, stderr=subprocess.STDOUT)
        try:
            return page.reports.get(timeout=timeout_s)
        except queue.Empty:
            raise AssertionError((Path(profile) / "log").read_text(errors="replace")[-3000:]) from None
        finally:
            browser.terminate()
            browser.wait(20)
