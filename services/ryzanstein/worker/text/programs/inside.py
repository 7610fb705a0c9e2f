"""What a program does first: it reads its arguments, and binds itself to its agent and to its bounds.

It imports little: what a process has in memory before it is bounded counts as its own.
"""

from __future__ import annotations

import argparse
import resource
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from ryzanstein.worker.ranks.starting.lifeline import die_with

PAGE_BYTES = resource.getpagesize()


@dataclass(frozen=True, slots=True)
class ProgramArguments:
    """What the agent says: the descriptor of the socket to it, and the bounds of a job."""

    fd: int
    memory_bytes: int
    cpu_s: float


def begin(name: str, description: str) -> ProgramArguments:
    """Reads the arguments. The process is called `name` from now on and ends with the agent.

    If the machine runs out of memory, the kernel kills it before others.
    """
    parser = argparse.ArgumentParser(description=f"{description}; started by the agent.")
    for option in ("--parent", "--fd", "--memory-bytes"):
        parser.add_argument(option, type=int, required=True)
    parser.add_argument("--cpu-s", type=float, required=True)
    arguments = parser.parse_args()
    die_with(arguments.parent)
    Path("/proc/self/comm").write_text(name)
    with suppress(OSError):
        Path("/proc/self/oom_score_adj").write_text("1000")
    return ProgramArguments(arguments.fd, arguments.memory_bytes, arguments.cpu_s)


def bound_memory(memory_bytes: int) -> None:
    """Limits this process to so much memory beyond what it has taken. It leaves no core dump."""
    limit = pages()[0] * PAGE_BYTES + memory_bytes
    resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))


def pages() -> list[int]:
    """Returns the pages of this process: of its address space, resident, and resident of files."""
    return [int(number) for number in Path("/proc/self/statm").read_text().split()[:3]]
