"""A Redis that loses nothing: it writes each command to disk before it answers."""

from __future__ import annotations

from pathlib import Path

from ryzanstein.addresses import join_address
from ryzanstein.cli.processes.host import Host
from ryzanstein.lab.chaos.machines.child import Child, wait_listening
from ryzanstein.lab.chaos.machines.network import program

PORT = 6379


class RedisServer:
    """A Redis server. `kill` sends SIGKILL; `start` continues with what is on disk."""

    def __init__(self, host: Host, directory: Path, port: int = PORT) -> None:
        directory.mkdir(parents=True, exist_ok=True)
        self._address, self._port = host.address, port
        settings = {
            "bind": host.address,
            "port": str(port),
            "dir": str(directory),
            "save": "",
            "appendonly": "yes",
            "appendfsync": "always",
            "protected-mode": "no",
        }
        flags = [part for name, value in settings.items() for part in (f"--{name}", value)]
        self._child = Child((program("redis-server"), *flags), host, directory / "redis.log")

    @property
    def url(self) -> str:
        return f"redis://{join_address(self._address, self._port)}/0"

    @property
    def running(self) -> bool:
        return self._child.running

    def start(self) -> None:
        """Starts the server and returns when it listens."""
        self._child.start()
        wait_listening(self._address, self._port)

    def kill(self) -> None:
        self._child.kill()
