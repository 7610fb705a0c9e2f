"""A redis-server of the tests' own."""

from __future__ import annotations

import socket
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest


class RedisServer:
    """A real redis-server on one port, without persistence: what it forgets at a restart it forgets."""

    def __init__(self, program: str, directory: Path) -> None:
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            self.port = probe.getsockname()[1]
        self._program = program
        self._directory = directory
        self.process: subprocess.Popen[bytes] | None = None

    @property
    def url(self) -> str:
        return f"redis://127.0.0.1:{self.port}/0"

    def start(self) -> None:
        flags = ("--port", str(self.port), "--bind", "127.0.0.1", "--save", "", "--appendonly", "no")
        with (self._directory / "redis.log").open("ab") as log:
            self.process = subprocess.Popen([self._program, *flags], cwd=self._directory, stdout=log, stderr=log)
        deadline = time.monotonic() + 10
        while not self._answers():
            assert time.monotonic() < deadline, "redis-server did not start"
            time.sleep(0.01)

    def kill(self) -> None:
        if self.process is not None:
            self.process.kill()
            self.process.wait()
            self.process = None

    def _answers(self) -> bool:
        try:
            with socket.create_connection(("127.0.0.1", self.port), timeout=1) as connection:
                connection.sendall(b"PING\r\n")
                return connection.recv(16).startswith(b"+PONG")
        except OSError:
            return False


@pytest.fixture
def redis_server(part: Callable[[str], str], tmp_path: Path) -> Iterator[RedisServer]:
    server = RedisServer(part("redis-server"), tmp_path)
    server.start()
    yield server
    server.kill()
