"""An alert of the rules goes through a real Alertmanager to a webhook, and names its page."""

from __future__ import annotations

import json
import queue
import subprocess
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

NOTIFIED_WITHIN_S = 60.0


@pytest.fixture
def webhook() -> Iterator[tuple[str, queue.Queue[dict[str, Any]]]]:
    """The URL of a webhook, and the alerts that it was told of."""
    told: queue.Queue[dict[str, Any]] = queue.Queue()

    class Webhook(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            for alert in json.loads(self.rfile.read(int(self.headers["Content-Length"])))["alerts"]:
                told.put(alert)
            self.send_response(200)
            self.end_headers()

        def log_message(self, *_: object) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Webhook) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield f"http://127.0.0.1:{server.server_port}", told
        server.shutdown()
        thread.join()


@contextmanager
def alertmanager(program: str, folder: Path, address: str, url: str) -> Iterator[None]:
    """A real one that passes all alerts on at once."""
    route = {"receiver": "webhook", "group_by": ["..."], "group_wait": "1s", "group_interval": "1s", "repeat_interval": "1h"}
    receivers = [{"name": "webhook", "webhook_configs": [{"url": url}]}]
    (folder / "alertmanager.yml").write_text(json.dumps({"route": route, "receivers": receivers}))
    command = (
        program,
        f"--config.file={folder / 'alertmanager.yml'}",
        f"--storage.path={folder / 'alertmanager'}",
        f"--web.listen-address={address}",
        "--cluster.listen-address=",
        "--log.level=error",
    )
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        yield
    finally:
        process.terminate()
        process.wait(20)


@pytest.mark.timeout(180)
def test_an_alert_reaches_a_webhook_and_names_its_page(
    world: Any, part: Callable[[str], str], webhook: Any, tmp_path: Path, all_ready: None
) -> None:
    url, told = webhook
    with alertmanager(part("prometheus-alertmanager"), tmp_path, world.prometheus.alertmanager, url):
        world.cluster.kill("router-1")
        while (alert := told.get(timeout=NOTIFIED_WITHIN_S))["labels"]["alertname"] != "RyzansteinRouterDown":
            pass
    assert alert["status"] == "firing"
    assert alert["labels"]["severity"] == "page"
    assert alert["annotations"]["runbook_url"] == "docs/operate/runbooks/router-died.md"
    assert alert["annotations"]["summary"]
