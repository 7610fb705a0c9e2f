"""Runs a command that dies with its parent: the kernel kills it when the parent ends.

Started by path in an isolated interpreter (`python -I -S tether.py PARENT_PID COMMAND...`), which
takes milliseconds and imports none of our code. The setting survives exec, so the service needs no
support for it (prctl(2), PR_SET_PDEATHSIG).
"""

import ctypes
import os
import signal
import sys

PR_SET_PDEATHSIG = 1


def tether(parent_pid: int, command: list[str]) -> None:
    """Becomes `command`, which dies with the thread of the parent that started this process."""
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(PR_SET_PDEATHSIG, signal.SIGKILL) != 0:
        raise OSError(ctypes.get_errno(), "prctl(PR_SET_PDEATHSIG)")
    if os.getppid() != parent_pid:
        raise SystemExit("the parent process has ended")  # it died before prctl took effect
    os.execv(command[0], command)


if __name__ == "__main__":
    tether(int(sys.argv[1]), sys.argv[2:])
