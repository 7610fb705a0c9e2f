"""One service as a child process: started tethered to this one, watched, stopped, killed.

It knows that a service is `python -P -m ryzanstein.<service> --flags`, speaks grpc.health.v1 and logs
to standard error. It knows nothing about clusters.
"""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

from ryzanstein.addresses import join_address
from ryzanstein.auth.peers.peer import Peer, PeerRole
from ryzanstein.cli.processes import tether
from ryzanstein.cli.processes.host import LOCAL, Host
from ryzanstein.cli.processes.process_group import ProcessGroup
from ryzanstein.cli.processes.service_log import ServiceLog
from ryzanstein.files.private_files import opener
from ryzanstein.rpc.client import PLAIN, Dialer, open_blocking_channel

_POLL_S = 0.05
_PEERS = {
    "orchestrator": Peer(PeerRole.ORCHESTRATOR),
    "worker": Peer(PeerRole.NODE),
    "router": Peer(PeerRole.ROUTER),
}

Flags = Mapping[str, str | int | float]
"""Settings by field name."""


class ServiceFailedError(Exception):
    """A service ended or did not become ready; the message says why, or has its last log lines."""


class ServiceProcess:
    """A service as a child process.

    It listens on its host's address at `grpc_port` and `metrics_port`, and logs into `log_path`.
    """

    def __init__(
        self,
        name: str,
        service: str,
        flags: Flags,
        extra_flags: Sequence[str],
        log_path: Path,
        *,
        host: Host = LOCAL,
        dialer: Dialer = PLAIN,
    ) -> None:
        self.name = name
        self._dialer = dialer
        self.kind = service
        self.log_path = log_path
        self.grpc_address = join_address(host.address, str(flags["grpc_port"]))
        self.metrics_url = f"http://{join_address(host.address, str(flags['metrics_port']))}/metrics"
        listening = {"host": host.address, **flags}
        self._command = [*host.prefix, sys.executable, "-P", "-m", f"ryzanstein.{service}", *_as_flags(listening), *extra_flags]
        self._process: ProcessGroup | None = None

    def dial(self) -> grpc.Channel:
        """Returns a channel to the service, which the caller closes."""
        return self._dialer.open_blocking(self.grpc_address, _PEERS[self.kind])

    def serves(self, health_service: str = "readiness") -> bool:
        """Returns whether its health service reports SERVING. One that cannot be reached does not."""
        return _serves(self.dial(), health_service)

    @property
    def pid(self) -> int:
        """Returns the id of the process. Raises ServiceFailedError if it was never started."""
        if self._process is None:
            raise ServiceFailedError(f"{self.name} was never started")
        return self._process.pid

    @property
    def running(self) -> bool:
        return self._process is not None and self._process.code is None

    @property
    def ending(self) -> str:
        """Returns how the process ended, for people."""
        code = None if self._process is None else self._process.code
        if code is None or code >= 0:
            return f"ended with exit code {code}"
        return f"was killed by signal {-code} ({signal.strsignal(-code)})"

    def start(self) -> None:
        """Starts the service in its own process group, so that a terminal's Ctrl-C reaches only us.

        Returns at once.

        Call it from a thread that lives as long as the service should: the kernel binds the death
        signal to the thread.
        """
        tethered = [sys.executable, "-I", "-S", tether.__file__, str(os.getpid()), *self._command]
        with open(self.log_path, "ab", opener=opener) as log:
            self._process = ProcessGroup(tethered, log)

    def wait_ready(self, deadline: float) -> None:
        """Returns when the health service `readiness` is SERVING.

        Raises ServiceFailedError if the service ends or `deadline` (time.monotonic()) passes.
        """
        wait_all_ready([self], deadline)

    def signal(self, number: signal.Signals) -> None:
        """Sends a signal to the service's own process, not to its ranks.

        Does nothing if it ended.
        """
        if self._process is not None:
            self._process.send(number)

    def wait_ended(self, timeout_s: float) -> bool:
        """Waits for the service to end. Returns whether it ended within the timeout."""
        return self._process is None or self._process.wait(timeout_s)

    def kill(self) -> None:
        """Sends SIGKILL to the service and its whole process group, and waits for its end."""
        if self._process is not None:
            self._process.kill()

    def log_tail(self, num_lines: int = 15) -> str:
        """Returns the last lines of its log."""
        return "\n".join(f"  {self.name} | {line}" for line in ServiceLog(self.log_path).tail(num_lines))

    def check_running(self) -> None:
        """Raises ServiceFailedError if the service ended."""
        if not self.running:
            code = None if self._process is None else self._process.code
            why = ServiceLog(self.log_path).refusal()
            visible = f"\n{self.log_tail()}" if why is None else f": {why}"
            raise ServiceFailedError(f"{self.name} ended with exit code {code}{visible}")


def wait_all_ready(services: Iterable[ServiceProcess], deadline: float) -> None:
    """Returns when all are ready.

    Raises ServiceFailedError when one ends or `deadline` (time.monotonic()) passes.
    """
    services = list(services)
    pending = services
    while pending := [service for service in pending if not service.serves()]:
        for service in services:
            service.check_running()
        if time.monotonic() > deadline:
            raise ServiceFailedError(f"{pending[0].name} did not become ready in time\n{pending[0].log_tail()}")
        time.sleep(_POLL_S)


def serves(address: str, health_service: str = "readiness", timeout_s: float = 1.0) -> bool:
    """Returns whether grpc.health.v1 at host:port reports SERVING.

    An unreachable address does not.
    """
    return _serves(open_blocking_channel(address), health_service, timeout_s)


def _serves(channel: grpc.Channel, health_service: str, timeout_s: float = 1.0) -> bool:
    with channel:
        try:
            request = health_pb2.HealthCheckRequest(service=health_service)
            answer = health_pb2_grpc.HealthStub(channel).Check(request, timeout=timeout_s)  # type: ignore[attr-defined]
        except grpc.RpcError:
            return False
    return bool(answer.status == health_pb2.HealthCheckResponse.SERVING)


def _as_flags(flags: Flags) -> list[str]:
    return [part for name, value in flags.items() for part in (f"--{name.replace('_', '-')}", str(value))]
