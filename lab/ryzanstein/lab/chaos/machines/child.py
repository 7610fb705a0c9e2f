"""A program besides the services (a Redis, a proxy, a spinner) as a child that ends with us.

It may run on a separate host.
"""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

from ryzanstein.addresses import join_address
from ryzanstein.cli.processes import tether
from ryzanstein.cli.processes.host import LOCAL, Host
from ryzanstein.cli.processes.service_process import ServiceFailedError

_POLL_S = 0.01


class Child:
    """A child process.

    Start it from the main thread: the kernel ends it with the thread that started it.

    `log` gets its output.
    """

    def __init__(
        self, command: Sequence[str], host: Host = LOCAL, log: Path | None = None, *, interactive: bool = False
    ) -> None:
        self._command = (sys.executable, "-I", "-S", tether.__file__, str(os.getpid()), *host.prefix, *command)
        self._log = log
        self._interactive = interactive
        self._process: subprocess.Popen[str] | None = None

    def start(self) -> None:
        pipe = subprocess.PIPE if self._interactive else subprocess.DEVNULL
        with open(self._log or os.devnull, "a") as log:
            message = subprocess.PIPE if self._interactive else log
            self._process = subprocess.Popen(
                self._command, stdin=pipe, stdout=message, stderr=log, text=True, bufsize=1, start_new_session=True
            )

    def tell(self, command: str) -> None:
        """Sends a command line and waits for the answer line.

        Raises ServiceFailedError if the process is gone.
        """
        process = self._process
        if process is None or process.stdin is None:
            raise ServiceFailedError(f"{self._command[-1]} is not running")
        with suppress(BrokenPipeError):
            process.stdin.write(f"{command}\n")
        self.listen()

    def listen(self) -> None:
        """Waits for a line. Raises ServiceFailedError if the process ends instead."""
        if self._process is None or self._process.stdout is None or not self._process.stdout.readline():
            raise ServiceFailedError(f"{' '.join(self._command[5:])} ended")

    @property
    def pid(self) -> int | None:
        """Returns the process id, or None if it does not run."""
        return None if self._process is None else self._process.pid

    @property
    def running(self) -> bool:
        return self._process is not None and self._process.poll() is None

    def kill(self) -> None:
        """Sends SIGKILL and waits for the end. Does nothing if it does not run."""
        process, self._process = self._process, None
        if process is None:
            return
        if process.returncode is None:  # not reaped: its id is that of nobody else
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        _close(process)

    def release(self) -> None:
        """Ends a child that ends with its standard input, and waits for that."""
        process, self._process = self._process, None
        if process is not None and process.stdin is not None:
            process.stdin.close()
            process.wait()
            _close(process)


def _close(process: subprocess.Popen[str]) -> None:
    for stream in (process.stdin, process.stdout):
        if stream is not None:
            with suppress(OSError):
                stream.close()


def wait_listening(address: str, port: int, timeout_s: float = 10.0) -> None:
    """Returns when connections are accepted there. Raises ServiceFailedError on timeout."""
    deadline = time.monotonic() + timeout_s
    while True:
        try:
            socket.create_connection((address, port), timeout=1.0).close()
            return
        except OSError as error:
            if time.monotonic() > deadline:
                raise ServiceFailedError(f"nothing listens on {join_address(address, port)}: {error}") from None
        time.sleep(_POLL_S)
