"""Services of today as processes, and peers of other versions as processes beside them."""

from __future__ import annotations

import json
import queue
import shutil
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any

import pytest

from ryzanstein.cli.processes.ports import free_ports
from ryzanstein.cli.processes.service_process import Flags, ServiceProcess
from ryzanstein.demo import MODEL_DIR

ROOT = Path(__file__).parents[2]
WAIT_S = 60.0
Line = dict[str, Any]
Token = tuple[int, str]


class Peer:
    """A peer of another version: a module of this folder as a process, with lines of JSON in and out."""

    def __init__(self, module: str, *arguments: str) -> None:
        command = [sys.executable, "-m", f"tests.compat.{module}", *arguments]
        pipe = subprocess.PIPE
        self.process = subprocess.Popen(command, cwd=ROOT, stdin=pipe, stdout=pipe, text=True)
        self._lines: queue.SimpleQueue[str] = queue.SimpleQueue()
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def send(self, **line: Any) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(json.dumps(line) + "\n")
        self.process.stdin.flush()

    def until(self, holds: Callable[[Line], object], timeout_s: float = WAIT_S) -> list[Line]:
        """Returns the next lines up to the first for which the condition holds."""
        seen: list[Line] = []
        deadline = time.monotonic() + timeout_s
        while not seen or not holds(seen[-1]):
            try:
                line = self._lines.get(timeout=max(0.01, deadline - time.monotonic()))
            except queue.Empty:
                raise AssertionError(f"not in {timeout_s} s: the last of {len(seen)} lines {seen[-3:]}") from None
            assert line, f"the peer ended after {seen[-3:]}"
            seen.append(json.loads(line))
        return seen

    def event(self, name: str, timeout_s: float = WAIT_S) -> Line:
        """Returns the next report of this event."""
        return self.until(lambda line: line.get("event") == name, timeout_s)[-1]

    def end(self) -> None:
        """Ends the requests of a call; returns when the process has ended."""
        assert self.process.stdin is not None
        self.process.stdin.close()
        self.process.wait(WAIT_S)

    def kill(self) -> None:
        self.process.kill()
        self.process.wait()

    def close(self) -> None:
        self.kill()
        self._reader.join()
        for pipe in (self.process.stdin, self.process.stdout):
            assert pipe is not None
            with suppress(BrokenPipeError):
                pipe.close()

    def _read(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            self._lines.put(line)
        self._lines.put("")


class Processes:
    """Starts processes, and ends them all with the test."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._stack = ExitStack()

    def peer(self, module: str, *arguments: str) -> Peer:
        peer = Peer(module, *arguments)
        self._stack.callback(peer.close)
        return peer

    def call(self, address: str, method: str, version: str = "earlier", **request: Any) -> Peer:
        """Opens a call, such as "WorkerService/Connect", with its first request."""
        peer = self.peer("peer_call", version, address, *method.split("/"))
        peer.send(**request)
        return peer

    def node(
        self, node_id: str, answer: Sequence[tuple[int, str]], step_s: float, version: str = "earlier"
    ) -> tuple[Peer, str]:
        """Starts a node of another version; returns it and its address."""
        path = self._folder / f"{node_id}.json"
        path.write_text(json.dumps(answer))
        peer = self.peer("peer_node", version, node_id, str(path), str(step_s))
        return peer, f"127.0.0.1:{peer.event('serving')['port']}"

    def orchestrator(self, version: str = "earlier") -> tuple[Peer, str]:
        """Starts an orchestrator of another version; returns it and its address."""
        peer = self.peer("peer_orchestrator", version)
        return peer, f"127.0.0.1:{peer.event('serving')['port']}"

    def service(self, service: str, name: str, **flags: str | int | float) -> ServiceProcess:
        """Starts a service of today; returns when it is ready."""
        grpc_port, metrics_port = free_ports(2)
        settings: Flags = {"grpc_port": grpc_port, "metrics_port": metrics_port, **flags}
        process = ServiceProcess(name, service, settings, (), self._folder / f"{name}.log")
        self._stack.callback(process.kill)
        process.start()
        process.wait_ready(time.monotonic() + WAIT_S)
        return process

    def router(self, *nodes: str) -> tuple[ServiceProcess, str]:
        """Starts a router of today for these nodes; returns it and the URL of its HTTP API."""
        (port,) = free_ports(1)
        flags: Flags = {"http_port": port, "nodes": ",".join(nodes), "state_dir": str(self._folder / "router")}
        return self.service("router", "router", **flags), f"http://127.0.0.1:{port}"

    def worker(self, name: str = "today", **flags: str | int | float) -> ServiceProcess:
        """Starts a node of today that serves the demo model; returns when it is ready."""
        defaults: Flags = {"node_id": name, "model": str(MODEL_DIR), "tp": 1, "threads_per_rank": 1}
        return self.service("worker", name, **{**defaults, **flags})

    def copy_of_demo(self, name: str) -> Path:
        """Returns the directory of a further model."""
        return Path(shutil.copytree(MODEL_DIR, self._folder / name))

    def close(self) -> None:
        self._stack.close()


@pytest.fixture
def processes(tmp_path: Path) -> Iterator[Processes]:
    made = Processes(tmp_path)
    yield made
    made.close()


def pytest_collection_modifyitems(items: Sequence[pytest.Item]) -> None:
    for item in items:
        if "/tests/compat/" in str(item.path):
            item.add_marker(pytest.mark.cluster)
