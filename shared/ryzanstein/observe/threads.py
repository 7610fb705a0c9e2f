"""The threads of a process as the kernel sees them: read from /proc, so also those of a process that hangs."""

from __future__ import annotations

import os
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

_TICKS_PER_S = os.sysconf("SC_CLK_TCK")
_USER_TIME, _SYSTEM_TIME = 11, 12  # of the fields of proc_pid_stat(5) after the name
NOT_RUNNING = frozenset("TtZX")
"""States in which a thread answers nothing: it is stopped, traced, or has ended."""


@dataclass(frozen=True, slots=True)
class KernelThread:
    """A thread. `state` is the letter of proc_pid_stat(5); `waits_in` the function of the kernel in which it sleeps.

    `cpu_s` is the time that it has computed so far. `waits_in` is empty for a thread that runs, and where the kernel hides it.
    """

    tid: int
    name: str
    state: str
    waits_in: str
    cpu_s: float


def threads_of(pid: int) -> list[KernelThread]:
    """Returns the threads of a process, the first one first; empty when it has ended."""
    found = []
    with suppress(OSError):
        for tid in sorted(int(name) for name in os.listdir(f"/proc/{pid}/task")):
            with suppress(OSError):  # it has ended meanwhile
                found.append(_thread(tid, Path(f"/proc/{pid}/task/{tid}")))
    return found


def cpu_since(before: Mapping[int, float], thread: KernelThread) -> float:
    """Returns the time that a thread has computed since `before`, which has the earlier times by thread."""
    return max(0.0, thread.cpu_s - before.get(thread.tid, thread.cpu_s))


def handles_signal(pid: int, tid: int, number: int) -> bool:
    """Returns whether a signal waits for a thread, or is being handled by it. Raises OSError when it has ended."""
    fields = dict(line.split(":", 1) for line in Path(f"/proc/{pid}/task/{tid}/status").read_text().splitlines())
    bit = 1 << (number - 1)
    return bool((int(fields["SigPnd"], 16) | int(fields["SigBlk"], 16)) & bit)


def _thread(tid: int, folder: Path) -> KernelThread:
    _, _, rest = (folder / "stat").read_text().rpartition(")")
    fields = rest.split()
    cpu_s = (int(fields[_USER_TIME]) + int(fields[_SYSTEM_TIME])) / _TICKS_PER_S
    return KernelThread(tid, (folder / "comm").read_text().strip(), fields[0], _waits_in(folder), cpu_s)


def _waits_in(folder: Path) -> str:
    try:
        name = (folder / "wchan").read_text().strip()
    except OSError:
        return ""
    return "" if name == "0" else name
