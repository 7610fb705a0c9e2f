"""One rank's process as the agent sees it: spawned with inherited descriptors, its end noticed through a pidfd."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence

import psutil
import structlog

from ryzanstein.worker.ranks.messages import RankSpec

log = structlog.get_logger(__name__)

RANK_COMMAND = (sys.executable, "-m", "ryzanstein.worker.ranks.rank")
_KILL_WAIT_S = 10.0


def openmp_environment(spec: RankSpec) -> dict[str, str]:
    """What the OpenMP runtime of a rank reads before anything else runs."""
    threads = str(spec.threads)
    spins = {"GOMP_SPINCOUNT": str(spec.openmp_spins)} if spec.openmp_spins else {}
    return {"OMP_NUM_THREADS": threads, "MKL_NUM_THREADS": threads, **spins}


class RankProcess:
    """Spawned when made, in the caller's thread, in a process group of its own: a terminal's Ctrl-C is the agent's business.

    The command gets `--rank`, `--parent` (a process id, see `lifeline`) and `--fd` (the channel to the agent). `exited`
    resolves to the exit code, negative for a signal, within milliseconds of the process's end.
    """

    def __init__(self, rank: int, fd: int, more_fds: Sequence[int], env: Mapping[str, str], command: Sequence[str]) -> None:
        loop = asyncio.get_running_loop()
        arguments = ("--rank", str(rank), "--parent", str(os.getpid()), "--fd", str(fd))
        self._process = subprocess.Popen(
            (*command, *arguments),
            pass_fds=(fd, *more_fds),
            env={**os.environ, **env},
            stdin=subprocess.DEVNULL,
            process_group=0,
        )
        self.rank = rank
        self.pid = self._process.pid
        self.exited: asyncio.Future[int] = loop.create_future()
        self._pidfd = os.pidfd_open(self.pid)
        loop.add_reader(self._pidfd, self._on_exit)

    def _on_exit(self) -> None:
        code = self._process.poll()
        if code is not None:
            asyncio.get_running_loop().remove_reader(self._pidfd)
            os.close(self._pidfd)
            self.exited.set_result(code)

    def send_signal(self, number: signal.Signals) -> None:
        """Does nothing to a process that has ended."""
        self._process.send_signal(number)

    @property
    def stopped(self) -> bool:
        """The process was stopped (SIGSTOP, a debugger) and does not run."""
        try:
            return psutil.Process(self.pid).status() in (psutil.STATUS_STOPPED, psutil.STATUS_TRACING_STOP)
        except psutil.NoSuchProcess:
            return False

    @property
    def resident_bytes(self) -> int:
        """0 when the process has ended."""
        try:
            return psutil.Process(self.pid).memory_info().rss
        except psutil.NoSuchProcess:
            return 0


async def end(processes: Sequence[RankProcess], grace_s: float) -> None:
    """SIGTERM, and SIGKILL to what runs after the grace; without grace SIGKILL at once. Returns when all have ended."""
    running = [process for process in processes if not process.exited.done()]
    if grace_s > 0 and running:
        _signal(running, signal.SIGTERM)
        await asyncio.wait([process.exited for process in running], timeout=grace_s)
        running = [process for process in running if not process.exited.done()]
    if running:
        _signal(running, signal.SIGKILL)
        _, alive = await asyncio.wait([process.exited for process in running], timeout=_KILL_WAIT_S)
        if alive:
            # In an uninterruptible system call (a driver): its memory stays taken, but the node goes on.
            log.error("rank outlives SIGKILL", pids=[process.pid for process in running if not process.exited.done()])


def _signal(processes: Sequence[RankProcess], number: signal.Signals) -> None:
    for process in processes:
        process.send_signal(number)


def exit_text(code: int) -> str:
    """ "died of SIGKILL" or "exited with code 1"."""
    return f"died of {signal.Signals(-code).name}" if code < 0 else f"exited with code {code}"
