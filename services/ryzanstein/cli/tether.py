"""Runs a command that dies with its parent: the kernel kills it as soon as the process that started it is gone.

Started by path in an isolated interpreter (`python -I -S tether.py PARENT_PID COMMAND...`), which costs milliseconds and
imports nothing of ours. The setting survives exec, so that a service needs to know nothing of it (prctl(2), PR_SET_PDEATHSIG).
"""

import ctypes
import os
import signal
import sys

PR_SET_PDEATHSIG = 1


def tether(parent_pid: int, command: list[str]) -> None:
    """Becomes `command`. The parent's thread that started this process is what it dies with."""
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(PR_SET_PDEATHSIG, signal.SIGKILL) != 0:
        raise OSError(ctypes.get_errno(), "prctl(PR_SET_PDEATHSIG)")
    if os.getppid() != parent_pid:
        raise SystemExit("the parent is gone")  # it died before the kernel was told
    os.execv(command[0], command)


if __name__ == "__main__":
    tether(int(sys.argv[1]), sys.argv[2:])
