"""A console as a process, with its link."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from urllib.parse import urlsplit


class ConsoleProcess:
    """A console and its link. It is started on the port that it had before."""

    def __init__(self, folder: Path, routers: str, *flags: str, orchestrator: str = "127.0.0.1:9") -> None:
        self.folder, self._routers, self._flags, self._orchestrator = folder, routers, flags, orchestrator
        self.port = 0
        self.start()

    def start(self) -> None:
        """Starts it, on the port that it had before."""
        self.log = self.folder / f"console-{time.monotonic_ns()}.log"
        command = [sys.executable, "-P", "-m", "ryzanstein.console", "--port", str(self.port), "--router", self._routers]
        command += ["--orchestrator", self._orchestrator, "--drain-grace-s", "0", "--log-level", "info"]
        command += ["--state-dir", str(self.folder / "state"), *self._flags]
        environment = {name: value for name, value in os.environ.items() if not name.startswith("RYZANSTEIN_")}
        with self.log.open("wb") as log:
            self.process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=log, env=environment, text=True)
        self.link = self._next_link()
        self.url = self.link.partition("#")[0]
        self.port = urlsplit(self.url).port or 0

    @property
    def metrics_url(self) -> str:
        serving = json.loads(next(line for line in self.log.read_text().splitlines() if "serving" in line))
        return f"http://127.0.0.1:{serving['metrics_port']}/metrics"

    def _next_link(self) -> str:
        assert self.process.stdout is not None
        line = self.process.stdout.readline().strip()
        assert line, self.log.read_text()
        return line

    def another_link(self) -> str:
        self.process.send_signal(signal.SIGUSR1)
        return self._next_link()

    def stop(self, number: signal.Signals = signal.SIGTERM) -> int:
        """Ends it and returns its exit code."""
        if self.process.poll() is None:
            self.process.send_signal(number)
        code = self.process.wait(30)
        assert self.process.stdout is not None
        self.process.stdout.close()
        return code
