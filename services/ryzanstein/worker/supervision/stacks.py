"""Where the threads of an engine's processes are: what an engine group answers when it is asked."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass

from ryzanstein.observe.threads import cpu_since, threads_of


@dataclass(frozen=True, slots=True)
class ThreadStack:
    """A thread. `stack` has its Python frames, the newest first; empty: it has none, or did not answer.

    `state` is the letter of proc_pid_stat(5), `waits_in` the function of the kernel in which it sleeps.
    `cpu_s` is the time that it computed while it was watched: one that spins shows there.
    """

    tid: int
    name: str
    state: str
    waits_in: str
    cpu_s: float
    stack: str = ""

    @property
    def where(self) -> str:
        """Returns the innermost function, such as "_wait (shm.py, line 88)"; empty without a stack."""
        for line in self.stack.splitlines():
            file, separator, place = line.strip().partition('", line ')
            if separator:
                number, _, function = place.partition(" in ")
                return f"{function} ({file.rpartition('/')[2]}, line {number})"
        return ""


@dataclass(frozen=True, slots=True)
class ProcessStacks:
    """The threads of one process of an engine: a rank, or a process of a server that is not ours. Empty: it has ended."""

    name: str
    pid: int
    threads: Sequence[ThreadStack] = ()


async def kernel_stacks(processes: Sequence[tuple[str, int]], watched_s: float) -> list[ProcessStacks]:
    """Returns the threads of processes that cannot be asked for their frames, by name and process id."""
    before = {pid: {thread.tid: thread.cpu_s for thread in threads_of(pid)} for _, pid in processes}
    await asyncio.sleep(watched_s)
    return [
        ProcessStacks(
            name,
            pid,
            [
                ThreadStack(each.tid, each.name, each.state, each.waits_in, cpu_since(before[pid], each))
                for each in threads_of(pid)
            ],
        )
        for name, pid in processes
    ]
