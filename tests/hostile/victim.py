"""A router and a node as processes, and what is seen of them from outside."""

from __future__ import annotations

import contextlib
import json
import os
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, NamedTuple

import httpx

_START_S = 60


class Lag(NamedTuple):
    """Of an event loop: how late it woke, and how long it computed without looking at anything else."""

    late_s: float
    busy_s: float


@dataclass
class Victim:
    """A running router. `http` talks to it over a connection of its own."""

    process: subprocess.Popen[str]
    probe_port: int
    ports: dict[str, int]
    log: Path
    http: httpx.Client = field(default_factory=lambda: httpx.Client(timeout=60, trust_env=False))

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.ports['http_port']}"

    def lag(self) -> Lag:
        """The worst since it was last asked."""
        with socket.create_connection(("127.0.0.1", self.probe_port), timeout=60) as probe:
            return Lag(*map(float, b"".join(iter(lambda: probe.recv(64), b"")).split()))

    def post(self, path: str, content: bytes) -> httpx.Response:
        return self.http.post(self.url + path, content=content, headers={"Content-Type": "application/json"})

    def metric(self, name: str) -> float:
        """The sum over all labels."""
        text = httpx.get(f"http://127.0.0.1:{self.ports['metrics_port']}/metrics", trust_env=False, timeout=60).text
        return sum(float(line.rsplit(" ", 1)[1]) for line in text.splitlines() if line.split("{")[0].split(" ")[0] == name)

    @property
    def errors(self) -> list[str]:
        """Lines of its log that are errors, or no log lines at all. On a busy machine it may warn that it stood still."""
        lines = self.log.read_text().splitlines()
        return [line for line in lines if not line.startswith("{") or json.loads(line)["level"] not in ("info", "warning")]

    @property
    def resident_bytes(self) -> int:
        pages = int(Path(f"/proc/{self.process.pid}/statm").read_text().split()[1])
        return pages * os.sysconf("SC_PAGE_SIZE")

    @property
    def num_descriptors(self) -> int:
        return len(os.listdir(f"/proc/{self.process.pid}/fd"))


@contextlib.contextmanager
def victim(**settings: object) -> Iterator[Victim]:
    """A router that is ready, with one scripted node."""
    with contextlib.ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        node = stack.enter_context(_process("node", stack.enter_context((folder / "node.log").open("w"))))
        flags = {"nodes": f"127.0.0.1:{_port(node)}", "grpc-port": 0, "http-port": 0, "state-dir": folder / "state", **settings}
        words = [word for name, value in flags.items() for word in (f"--{name}", str(value))]
        log = folder / "router.log"
        process = stack.enter_context(_process("watched_router", stack.enter_context(log.open("w")), *words))
        made = Victim(process, _port(process), _ports(log), log)
        stack.callback(made.http.close)
        _wait_until_ready(made)
        yield made


@contextlib.contextmanager
def _process(name: str, log: IO[str], *flags: str) -> Iterator[subprocess.Popen[str]]:
    command = (sys.executable, "-m", f"tests.hostile.{name}", *flags)
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=log, text=True, cwd=Path(__file__).parents[2]) as process:
        try:
            yield process
        finally:
            process.kill()


def _port(process: subprocess.Popen[str]) -> int:
    assert process.stdout is not None
    return int(process.stdout.readline())


def _ports(log: Path) -> dict[str, int]:
    end = time.monotonic() + _START_S
    while time.monotonic() < end:
        for line in log.read_text().splitlines():
            entry = json.loads(line)
            if entry["event"] == "serving":
                return {name: entry[name] for name in ("grpc_port", "http_port", "metrics_port")}
        time.sleep(0.05)
    raise TimeoutError("the router does not serve")


def _wait_until_ready(made: Victim) -> None:
    end = time.monotonic() + _START_S
    while made.http.get(f"{made.url}/readyz").status_code != 200:
        if time.monotonic() > end:
            raise TimeoutError("the router has no node")
        time.sleep(0.05)
