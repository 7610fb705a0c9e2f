"""Ensures that a rank never outlives its agent: the kernel kills it however the agent dies."""

from __future__ import annotations

import ctypes
import os
import signal

_PR_SET_PDEATHSIG = 1  # linux/prctl.h


def die_with(parent: int) -> None:
    """Requests SIGKILL at the parent's death; exits at once when the parent is already gone.

    The signal is sent when the *thread* that spawned this process ends: spawn ranks from the
    agent's main thread.
    """
    if ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), "prctl(PR_SET_PDEATHSIG)")
    if os.getppid() != parent:
        os._exit(1)
