"""Starts a program, and kills it. Bounds what it may take, and how many may wait for it."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Annotated

from pydantic import Field

from ryzanstein import errors
from ryzanstein.bounds import LARGEST, PositiveSize
from ryzanstein.errors import RyzansteinError
from ryzanstein.worker.ranks.starting.process import WatchedProcess, end, exit_text, watched

ProgramSeconds = Annotated[float, Field(gt=0, le=60)]
ProgramMemory = Annotated[int, Field(ge=64 * 2**20, le=LARGEST)]


@dataclass(frozen=True, slots=True)
class ProgramBounds:
    """The bounds of one job, and of how many may wait."""

    cpu_s: ProgramSeconds
    """Processor seconds of one job."""
    memory_bytes: ProgramMemory
    """Memory of one job, beyond what its process has at start."""
    max_waiting: PositiveSize
    """Jobs that wait; more are refused."""

    def admit(self, num_waiting: int) -> None:
        """Raises RESOURCE_EXHAUSTED if so many wait that one more may not."""
        if num_waiting >= self.max_waiting:
            raise errors.queue_full(num_waiting, self.max_waiting)


class ProgramLost(Exception):
    """A program has ended, or does not answer. The message says how."""


@dataclass(frozen=True, slots=True)
class RunningProgram:
    """A program's process, and our end of the socket to it, which does not block."""

    process: WatchedProcess
    ours: socket.socket

    async def killed(self) -> int:
        """Kills the process if it runs; returns its exit code."""
        await end([self.process], 0.0)
        return self.process.exited.result()


@dataclass(frozen=True, slots=True)
class AgentProgram:
    """A program that the agent runs: what people call it, its module, and how it is spoken to.

    `environment` is added to the agent's.
    """

    title: str
    module: str
    socket_kind: socket.SocketKind
    environment: Mapping[str, str] = field(default_factory=dict)

    def start(self, bounds: ProgramBounds) -> RunningProgram:
        """Starts a process. OSError: there are no processes or descriptors left.

        It has a session of its own: a terminal's Ctrl-C is handled by the agent alone.
        """
        ours, theirs = socket.socketpair(socket.AF_UNIX, self.socket_kind)
        ours.setblocking(False)
        fd = theirs.fileno()
        identity = ("--parent", str(os.getpid()), "--fd", str(fd))
        limits = ("--memory-bytes", str(bounds.memory_bytes), "--cpu-s", str(bounds.cpu_s))
        command = (sys.executable, "-P", "-m", self.module, *identity, *limits)
        env = {**os.environ, **self.environment}
        try:
            popen = subprocess.Popen(command, pass_fds=(fd,), stdin=subprocess.DEVNULL, start_new_session=True, env=env)
            process = WatchedProcess(popen.pid, watched(popen))
        except OSError:
            ours.close()
            raise
        finally:
            theirs.close()
        process.over.add_done_callback(lambda _: process.ended(popen.wait()))
        return RunningProgram(process, ours)

    def ended(self, code: int, when: str = "") -> ProgramLost:
        """Returns the error of a process that ended, `when` it did."""
        return ProgramLost(f"{self.title} {exit_text(code)}{when}")

    def late(self) -> ProgramLost:
        """Returns the error of a process that was killed because it did not answer in time."""
        return ProgramLost(f"{self.title} timed out")

    def silent(self) -> RyzansteinError:
        """Returns the error of a caller who got no answer."""
        return errors.unavailable("NODE_NOT_READY", f"the node's {self.title} is not responding")
