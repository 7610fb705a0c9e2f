"""A node that routers reach through our proxy.

The node advertises the proxy's address instead of its own.
"""

from __future__ import annotations

import sys
from pathlib import Path

from ryzanstein.addresses import join_address
from ryzanstein.cli.processes.host import Host
from ryzanstein.cli.processes.service_process import Flags
from ryzanstein.lab.chaos.machines.child import Child

_NODE_PORT = 7001
_PROXY_PORT = 7000


class DelayedNode:
    """The proxy of one node, on the node's host.

    No other program uses the host, so its ports are free.
    """

    def __init__(self, host: Host, log: Path, *, secure: bool = False) -> None:
        self._address, self._secure = host.address, secure
        listen, target = join_address(host.address, _PROXY_PORT), join_address(host.address, _NODE_PORT)
        command = (sys.executable, "-P", "-m", "ryzanstein.lab.chaos.machines.proxy", listen, target)
        self._child = Child(command, host, log, interactive=True)

    @property
    def settings(self) -> Flags:
        """Returns the settings of the node."""
        return {
            "grpc_port": _NODE_PORT,
            "advertise_address": join_address(self._address, _PROXY_PORT),
            **({"tls_port": _NODE_PORT} if self._secure else {}),
        }

    def start(self) -> None:
        """Starts the proxy and returns when it listens."""
        self._child.start()
        self._child.listen()

    def kill(self) -> None:
        self._child.kill()

    def delay(self, seconds: float) -> None:
        """Sets the delay, each way, from now on; 0: none."""
        self._child.tell(f"delay {seconds}")
