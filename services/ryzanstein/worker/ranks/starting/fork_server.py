"""The process that ranks are forked from.

It imports what they need, once, and forks one rank for each request of the agent. A program of
ranks is a module that calls `main`; the agent's side is `forking.ForkServer`. A fork has only the
thread that called it, so nothing that is imported here may start threads, and nothing may touch a
device before the fork. One packet of the socket pair is one message, with the descriptors that
belong to it.
"""

from __future__ import annotations

import argparse
import gc
import os
import select
import signal
import socket
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from pathlib import Path

import msgspec

from ryzanstein.worker.ranks.health import last_words
from ryzanstein.worker.ranks.health.lifesign import LifeSign
from ryzanstein.worker.ranks.starting.lifeline import die_with

PACKET_BYTES = 2**16
_MAX_FDS = 253  # SCM_MAX_FD of the kernel
_STANDARD_FDS = 3


class ForkRank(msgspec.Struct, frozen=True):
    """A request of the agent to fork a rank. Descriptors come with it.

    The rank has them under `numbers`: its channel to the agent first, and at the end the file of its
    last words (`last_words`) and its sign of life (`lifesign`).
    """

    rank: int
    numbers: list[int]


class RankForked(msgspec.Struct, tag=True, frozen=True):
    """A rank that runs; its pidfd comes with this message.

    `threads` counts the server's threads at the fork: more than one endanger the rank.
    """

    rank: int
    pid: int
    threads: int


class RankNotForked(msgspec.Struct, tag=True, frozen=True):
    """A rank that could not be forked: no process, memory or descriptor is left. Nothing else changed."""

    message: str


class RankEnded(msgspec.Struct, tag=True, frozen=True):
    """A rank that has been reaped. The code is negative for a signal."""

    pid: int
    code: int


class ServerFailed(msgspec.Struct, tag=True, frozen=True):
    """The reason why the server ends."""

    message: str


ServerMessage = RankForked | RankNotForked | RankEnded | ServerFailed


@dataclass(frozen=True, slots=True)
class Fork:
    """What a forked process becomes: a rank with these descriptors.

    The server received them under other numbers.
    """

    rank: int
    nice: int
    server: int
    numbers: Sequence[int]
    received: Sequence[int]

    def become(self, run: Callable[[int, int], int]) -> int:
        """Makes this process the rank: lifeline, process group, descriptors, priority.

        Returns its exit code.
        """
        die_with(self.server)
        os.setpgid(0, 0)
        Path("/proc/self/comm").write_text(f"rank-{self.rank}")  # its command line is the server's
        own_only(self.received, self.numbers)
        *_, words, sign = self.numbers
        last_words.keep(words)
        life_sign = LifeSign(sign)
        os.close(sign)
        with life_sign.displayed(self.nice):
            return run(self.rank, self.numbers[0])


def main(prepare: Callable[[], None], run: Callable[[int, int], int]) -> int:
    """Serves the agent until it closes the socket. Every fork calls `run`.

    `run` gets the rank and its channel's descriptor. Returns the exit code, of the server or of a
    rank.
    """
    parser = argparse.ArgumentParser(description="Forks the ranks of a node; started by the agent.")
    for name in ("--parent", "--fd"):
        parser.add_argument(name, type=int, required=True)
    parser.add_argument("--nice", type=int, default=0)
    arguments = parser.parse_args()
    die_with(arguments.parent)
    last_words.ignore_questions()
    agent = socket.socket(fileno=arguments.fd)
    try:
        prepare()
        gc.freeze()  # a collection in a rank would write to, and so copy, every page that they share
        fork = Forks(agent, arguments.nice).serve()
    except Exception as error:
        agent.send(msgspec.msgpack.encode(ServerFailed(f"{type(error).__name__}: {error}"[:1024])))
        return 1
    return 0 if fork is None else fork.become(run)


class Forks:
    """The running ranks by their pidfds, and the agent's socket.

    `nice` is the ranks' niceness, so that the agent has priority. This also matters when they die:
    the agent's connections close when its memory has been released, and the memory of its ranks is
    released at the same time.
    """

    def __init__(self, agent: socket.socket, nice: int) -> None:
        self._agent = agent
        self._nice = nice
        self._poll = select.poll()
        self._poll.register(agent, select.POLLIN)

    def serve(self) -> Fork | None:
        """Serves requests; returns in every fork, and in the server when the agent closes its end."""
        while True:
            for fd, _ in self._poll.poll():
                if fd != self._agent.fileno():
                    self._reap(fd)
                    continue
                data, received, _, _ = socket.recv_fds(self._agent, PACKET_BYTES, _MAX_FDS, socket.MSG_CMSG_CLOEXEC)
                if not data:
                    return None
                request = msgspec.msgpack.decode(data, type=ForkRank)
                fork = Fork(request.rank, self._nice, os.getpid(), request.numbers, received)
                if self._is_fork(fork):
                    return fork

    def _is_fork(self, fork: Fork) -> bool:
        """Forks; returns True in the new process, False here.

        A failure concerns this rank alone: the server and its other ranks go on.
        """
        answer: RankForked | RankNotForked
        try:
            answer, pidfds = _forked(fork)
        except OSError as error:
            answer, pidfds = RankNotForked(f"{type(error).__name__}: {error}"[:1024]), []
        if os.getpid() != fork.server:
            self._agent.detach()  # or the destructor would close whatever has its number then
            return True
        for fd in fork.received:
            os.close(fd)
        for pidfd in pidfds:
            self._poll.register(pidfd, select.POLLIN)
        socket.send_fds(self._agent, [msgspec.msgpack.encode(answer)], pidfds)
        return False

    def _reap(self, pidfd: int) -> None:
        result = os.waitid(os.P_PIDFD, pidfd, os.WEXITED)
        assert result is not None
        self._poll.unregister(pidfd)
        os.close(pidfd)
        self._agent.send(msgspec.msgpack.encode(RankEnded(result.si_pid, exit_code(result))))


def _forked(fork: Fork) -> tuple[RankForked, list[int]]:
    """Forks; returns the answer and the rank's pidfd, which the rank itself does not have. Raises OSError."""
    if len(fork.received) != len(fork.numbers):
        raise OSError(f"received {len(fork.received)} of {len(fork.numbers)} descriptors: too many are open")
    threads = len(os.listdir("/proc/self/task"))
    pid = os.fork()
    forked = RankForked(fork.rank, pid, threads)
    if pid == 0:
        return forked, []
    try:
        return forked, [os.pidfd_open(pid)]
    except OSError:
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
        raise


def exit_code(result: os.waitid_result) -> int:
    """Returns the exit code as subprocess does: negative for a signal."""
    return result.si_status if result.si_code == os.CLD_EXITED else -result.si_status


def own_only(fds: Sequence[int], numbers: Sequence[int]) -> None:
    """Moves descriptors to other numbers, and closes all others except the standard ones."""
    kept = {*range(_STANDARD_FDS), *numbers}
    aside = [_aside(fd, kept) for fd in fds]
    for fd, number in zip(aside, numbers, strict=True):
        os.dup2(fd, number, inheritable=False)
    for fd in {int(name) for name in os.listdir("/proc/self/fd")} - kept:
        os.closerange(fd, fd + 1)  # one of them was the listing's own


def _aside(fd: int, numbers: Collection[int]) -> int:
    """Returns the same descriptor under a number that is not to be overwritten."""
    while fd in numbers:
        fd = os.dup(fd)
    return fd
