"""A child process and the group that it leads, killed together.

The child is not reaped before its group is killed: a process id that has been reaped may be that of
another process, and the group with that id another's group.
"""

from __future__ import annotations

import os
import select
import signal
import subprocess
from collections.abc import Sequence
from contextlib import suppress
from typing import IO


class ProcessGroup:
    """A process in a session of its own, started when created. Raises OSError if it cannot be started."""

    def __init__(self, command: Sequence[str], log: IO[bytes], output: IO[bytes] | None = None) -> None:
        """`output` is where its standard output goes; None: into the log too."""
        self._process = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=output or log, stderr=log, start_new_session=True
        )
        self.pid = self._process.pid
        try:
            self._pidfd = os.pidfd_open(self.pid)
        except OSError:
            os.killpg(self.pid, signal.SIGKILL)
            self._process.wait()
            raise
        self._code: int | None = None

    @property
    def code(self) -> int | None:
        """How the process ended, as `subprocess` has it; None while it runs."""
        if self._code is None:
            result = os.waitid(os.P_PIDFD, self._pidfd, os.WEXITED | os.WNOHANG | os.WNOWAIT)
            if result is not None:
                self._code = result.si_status if result.si_code == os.CLD_EXITED else -result.si_status
        return self._code

    def wait(self, timeout_s: float) -> bool:
        """Waits for the process to end. Returns whether it ended within the timeout."""
        if self.code is None:
            poll = select.poll()
            poll.register(self._pidfd, select.POLLIN)
            poll.poll(timeout_s * 1000)
        return self.code is not None

    def send(self, number: signal.Signals) -> None:
        """Sends a signal to the process alone. Does nothing if it ended."""
        if self.code is None:
            with suppress(ProcessLookupError):
                signal.pidfd_send_signal(self._pidfd, number)

    def kill(self) -> None:
        """Sends SIGKILL to the process and to all of its group, and waits for its end. Does so once."""
        if self._process.returncode is not None:  # reaped
            return
        with suppress(ProcessLookupError):
            os.killpg(self.pid, signal.SIGKILL)
        self._code = self._process.wait()
        os.close(self._pidfd)
