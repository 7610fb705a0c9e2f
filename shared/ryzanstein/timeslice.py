"""How soon the kernel lets this process run when something arrives for it, on cores that it shares.

Linux's fair scheduler (EEVDF: Stoica and Abdel-Wahab, 1995; with slices of a task's own since Linux 6.12) runs the task whose
virtual deadline is nearest, and a short slice brings that nearer. Whoever passes messages on asks for short slices: its share
of the processor stays what it is, but a beat or a token does not wait until the tensor work beside it has had its turn.
"""

from __future__ import annotations

import ctypes
import os
import platform
import struct

SHORT_NS = 100_000  # the least that the kernel takes
_KERNELS_OWN = 0
_SYSCALL = {"x86_64": 314, "aarch64": 274}  # sched_setattr(2), in the tables of the architectures
_ATTRIBUTES = struct.Struct("=IIQiIQQQ")  # struct sched_attr: size, policy, flags, nice, priority, runtime, deadline, period


def ask_for_short_slices() -> bool:
    """For this thread and those that it starts. False: the kernel does not know of it or does not allow it; nothing changed.

    Processes that it starts inherit it, see `take_usual_slices`.
    """
    return _ask(SHORT_NS)


def take_usual_slices() -> bool:
    """Undoes what a parent asked for: long computations are better off with the kernel's own slices."""
    return _ask(_KERNELS_OWN)


def _ask(slice_ns: int) -> bool:
    number = _SYSCALL.get(platform.machine())
    if number is None or os.sched_getscheduler(0) != os.SCHED_OTHER:
        return False
    nice = os.getpriority(os.PRIO_PROCESS, 0)
    attributes = _ATTRIBUTES.pack(_ATTRIBUTES.size, os.SCHED_OTHER, 0, nice, 0, slice_ns, 0, 0)
    return bool(ctypes.CDLL(None).syscall(number, 0, attributes, 0) == 0)
