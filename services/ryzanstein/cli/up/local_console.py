"""The console that `ryzanstein up` runs beside its cluster: a process of its own, for this machine alone.

Whoever has its link is logged in. The link is read from a pipe and is never written to a file.
"""

from __future__ import annotations

import os
import select
import signal
import sys
import time
from pathlib import Path

from ryzanstein.cli.processes import tether
from ryzanstein.cli.processes.cluster import LocalCluster
from ryzanstein.cli.processes.process_group import ProcessGroup
from ryzanstein.cli.processes.service_log import ServiceLog
from ryzanstein.files.private_files import opener

_HOST = "127.0.0.1"
_START_S = 60.0
_STOP_S = 5.0
_LOG_BYTES, _LOG_FILES = 8 * 2**20, 2
_MOST_CHARS = 4096


class NoConsole(Exception):
    """The console did not start. The message is a sentence for people."""


class LocalConsole:
    """A console as a child process, which `KeptService` can keep running. It ends with this process."""

    name = "console"

    def __init__(self, cluster: LocalCluster, port: int) -> None:
        """`port` 0: a free one."""
        self.log_path: Path = cluster.state_dir / "console.log"
        spec = cluster.spec
        flags = {
            "host": _HOST,
            "port": port,
            "router": ",".join(cluster.router_addresses),
            "orchestrator": cluster.orchestrator_address,
            "state_dir": cluster.state_dir / "console",
            "key_file": spec.api_key_file,
            "ca": None if spec.router_tls is None else spec.router_tls.ca,
            "tls_dir": cluster.tls_dir,
            "drain_grace_s": 0,
            "log_file_bytes": _LOG_BYTES,
            "log_files": _LOG_FILES,
        }
        given = [f"--{name.replace('_', '-')}={value}" for name, value in flags.items() if value is not None]
        self._command = [sys.executable, "-P", "-m", "ryzanstein.console", *given]
        self._process: ProcessGroup | None = None
        self._output = -1

    @property
    def pid(self) -> int:
        return 0 if self._process is None else self._process.pid

    @property
    def running(self) -> bool:
        return self._process is not None and self._process.code is None

    @property
    def ending(self) -> str:
        """Returns how it ended, for people."""
        code = None if self._process is None else self._process.code
        why = ServiceLog(self.log_path).refusal()
        return f"ended with exit code {code}" + ("" if why is None else f" ({why})")

    def start(self) -> None:
        """Starts it and returns at once. Raises OSError."""
        tethered = [sys.executable, "-I", "-S", tether.__file__, str(os.getpid()), *self._command]
        self._close_output()
        self._output, ours = os.pipe()
        try:
            with open(self.log_path, "ab", opener=opener) as log, open(ours, "wb", closefd=False) as output:
                self._process = ProcessGroup(tethered, log, output)
        finally:
            os.close(ours)

    def first_link(self) -> str:
        """Returns where the page is, as soon as it is there. Raises NoConsole."""
        deadline = time.monotonic() + _START_S
        while not (link := self.link(max(0.0, deadline - time.monotonic()))):
            if not self.running:
                raise NoConsole(f"no console: it {self.ending}; its log is {self.log_path}")
            if time.monotonic() >= deadline:
                raise NoConsole(f"no console: it did not start within {_START_S:g} s; its log is {self.log_path}")
        return link

    def link(self, timeout_s: float = 0.0) -> str:
        """Returns a link that it has printed since the last one; empty: none, or it has ended."""
        if self._output < 0 or not select.select([self._output], [], [], timeout_s)[0]:
            return ""
        said = os.read(self._output, _MOST_CHARS).decode(errors="replace").split()
        if not said:
            self._close_output()
            if self._process is not None:
                self._process.wait(_STOP_S)
        return said[-1] if said else ""

    def stop(self) -> None:
        """Ends it, by force if it does not end by itself. Answers that run go on in the cluster."""
        if self._process is not None:
            self._process.send(signal.SIGTERM)
            self._process.wait(_STOP_S)
        self.kill()

    def kill(self) -> None:
        if self._process is not None:
            self._process.kill()
        self._close_output()

    def _close_output(self) -> None:
        if self._output >= 0:
            os.close(self._output)
            self._output = -1
