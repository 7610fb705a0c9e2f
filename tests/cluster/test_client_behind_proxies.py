"""The Python client behind proxies that cut what is idle, and behind a line that forgets a connection."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from ryzanstein.cli.processes.cluster import ClusterSpec, LocalCluster
from ryzanstein.cli.processes.ports import free_ports
from ryzanstein.client import Answer, Client, Text
from ryzanstein.demo import MODEL_DIR

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(300)]

QUESTION: dict[str, Any] = {"messages": "Count from 1 to 90.", "temperature": 0, "max_tokens": 300, "ignore_eos": True}
CUT_MS, FROZEN_S = 400, 3.0
FORGOTTEN_S = 20.0
"""Longer than the client waits for the answer to a ping."""


def nginx(port: int, router: str, folder: Path) -> str:
    temporary = "\n".join(f"{kind}_temp_path {folder};" for kind in ("client_body", "proxy", "fastcgi", "uwsgi", "scgi"))
    return f"""
{"user root;" if os.geteuid() == 0 else ""}
daemon off; worker_processes 1; pid {folder}/nginx.pid; error_log {folder}/error.log;
events {{ worker_connections 64; }}
http {{
    access_log off; {temporary}
    keepalive_timeout {CUT_MS}ms;
    grpc_read_timeout {CUT_MS}ms; grpc_send_timeout {CUT_MS}ms;
    server {{ listen 127.0.0.1:{port} http2; location / {{ grpc_pass grpc://{router}; }} }}
}}
"""


def haproxy(port: int, router: str, folder: Path) -> str:
    return f"""
defaults
    mode http
    timeout connect 5s
    timeout client {CUT_MS}ms
    timeout server {CUT_MS}ms
frontend clients
    bind 127.0.0.1:{port} proto h2
    default_backend routers
backend routers
    server router {router} proto h2
"""


PROXIES: dict[str, tuple[Callable[[int, str, Path], str], tuple[str, ...]]] = {
    "nginx": (nginx, ("-e", "stderr", "-c")),
    "haproxy": (haproxy, ("-db", "-f")),
}


@pytest.fixture(scope="module")
def cluster() -> Iterator[LocalCluster]:
    """Its router keeps an answer without a reader for longer than this machine needs to come back."""
    spec = ClusterSpec(MODEL_DIR, num_nodes=1, tp=1, router_flags=("--reattach-window-s", "120"))
    with LocalCluster(spec) as started:
        yield started


@pytest.fixture(scope="module")
def undisturbed(cluster: LocalCluster) -> Answer:
    with Client(cluster.router_address) as client:
        return client.chat(**QUESTION)


def wait_listening(port: int) -> None:
    deadline = time.monotonic() + 20
    while True:
        try:
            socket.create_connection(("127.0.0.1", port), 1).close()
            return
        except OSError:
            assert time.monotonic() < deadline
            time.sleep(0.05)


@pytest.fixture(params=list(PROXIES))
def behind(request: pytest.FixtureRequest, part: Callable[[str], str], cluster: LocalCluster, tmp_path: Path) -> Iterator[str]:
    """The address of a proxy that cuts what has been idle for 400 ms: streams, and connections."""
    written, arguments = PROXIES[request.param]
    (port,) = free_ports(1)
    configuration = tmp_path / "proxy.conf"
    configuration.write_text(written(port, cluster.router_address, tmp_path))
    command = [part(request.param), *arguments, str(configuration)]
    with subprocess.Popen(command, cwd=tmp_path) as proxy:
        wait_listening(port)
        yield f"127.0.0.1:{port}"
        proxy.terminate()


@pytest.mark.long
def test_an_answer_outlives_what_a_proxy_cuts(behind: str, cluster: LocalCluster, undisturbed: Answer) -> None:
    """A node that is frozen for seconds makes its stream idle. Then the client itself is idle, and asks again."""
    node = cluster.services["node-0"]
    frozen = threading.Timer(FROZEN_S, lambda: os.kill(node.pid, signal.SIGCONT))
    with Client(behind, learn_routers=False) as client:
        with client.stream(**QUESTION) as stream:
            for event in stream:
                # Texts that come together are one event.
                if isinstance(event, Text) and event.first_index >= 20 and frozen.ident is None:
                    os.kill(node.pid, signal.SIGSTOP)
                    frozen.start()
        frozen.join()
        assert stream.answer.reattaches > 0
        assert (stream.answer.token_ids, stream.answer.finish_reason) == (undisturbed.token_ids, "length")
        time.sleep(5 * CUT_MS / 1e3)
        assert client.chat(**QUESTION).token_ids == undisturbed.token_ids
        assert [model.name for model in client.models()] == ["demo"]


@pytest.mark.lab
def test_a_connection_that_a_line_has_forgotten_is_opened_again(cluster: LocalCluster, undisturbed: Answer) -> None:
    """As behind a router that translates addresses: nobody closes the connection, and nothing arrives on it any more."""
    (port,) = free_ports(1)
    command = (sys.executable, "-P", "-m", "ryzanstein.lab.chaos.machines.proxy", f"127.0.0.1:{port}", cluster.router_address)
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as line:
        assert line.stdin is not None
        assert line.stdout is not None
        assert line.stdout.readline() == "ready\n"

        def tell(what: str) -> None:
            print(what, file=line.stdin, flush=True)
            assert line.stdout is not None
            assert line.stdout.readline() == "done\n"

        with Client(f"127.0.0.1:{port}", learn_routers=False) as client:
            assert client.chat(**QUESTION).token_ids == undisturbed.token_ids
            tell("blackhole")
            time.sleep(FORGOTTEN_S)
            tell("pass")
            assert client.chat(**QUESTION).token_ids == undisturbed.token_ids
            forgotten = False
            with client.stream(**QUESTION) as stream:
                for event in stream:
                    # Texts that come together are one event.
                    if isinstance(event, Text) and event.first_index >= 20 and not forgotten:
                        forgotten = True
                        tell("blackhole")
                        threading.Timer(FORGOTTEN_S, tell, ["pass"]).start()
            assert stream.answer.token_ids == undisturbed.token_ids
            assert stream.answer.reattaches > 0
        line.stdin.close()
