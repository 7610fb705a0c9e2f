"""How soon the kernel runs this process when something arrives for it, on cores that it shares.

Linux's fair scheduler (EEVDF: Stoica and Abdel-Wahab, 1995; with a slice per task since Linux 6.12)
runs the task whose virtual deadline is nearest, and a short slice brings that nearer. Processes
that forward messages request short slices: their share of the processor stays the same, but a beat
or a token does not wait until tensor work on the same core has had its turn.
"""

from __future__ import annotations

import ctypes
import os
import platform
import struct

SHORT_NS = 100_000  # the least that the kernel accepts
_KERNELS_OWN = 0
_SYSCALL = {"x86_64": 314, "aarch64": 274}  # sched_setattr(2), in the tables of the architectures
_ATTRIBUTES = struct.Struct("=IIQiIQQQ")  # struct sched_attr: size, policy, flags, nice, priority, runtime, deadline, period


def ask_for_short_slices() -> bool:
    """Requests short slices for this thread and the threads that it starts.

    Returns False, and changes nothing, if the kernel does not support or allow it. Child processes
    inherit the setting, see `take_usual_slices`.
    """
    return _ask(SHORT_NS)


def take_usual_slices() -> bool:
    """Undoes a parent's request: long computations are better off with the kernel's own slices."""
    return _ask(_KERNELS_OWN)


def _ask(slice_ns: int) -> bool:
    number = _SYSCALL.get(platform.machine())
    if number is None or os.sched_getscheduler(0) != os.SCHED_OTHER:
        return False
    nice = os.getpriority(os.PRIO_PROCESS, 0)
    attributes = _ATTRIBUTES.pack(_ATTRIBUTES.size, os.SCHED_OTHER, 0, nice, 0, slice_ns, 0, 0)
    return bool(ctypes.CDLL(None).syscall(number, 0, attributes, 0) == 0)
