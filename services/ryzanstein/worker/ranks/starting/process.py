"""One rank's process as the agent sees it, with a pidfd that reports its end.

See `forking` for how it is created.
Its resident memory is what the kernel counts (proc_pid_status(5)).
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import subprocess
import threading
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import psutil
import structlog

from ryzanstein.worker.ranks.health.last_words import LastWords
from ryzanstein.worker.ranks.health.lifesign import LifeSign
from ryzanstein.worker.ranks.health.stacks import asked
from ryzanstein.worker.ranks.messages import RankSpec
from ryzanstein.worker.ranks.starting.fork_server import exit_code
from ryzanstein.worker.ranks.starting.source import Endable
from ryzanstein.worker.supervision.stacks import ProcessStacks, kernel_stacks


@dataclass(frozen=True, slots=True)
class Resident:
    """Resident bytes: now, and the peak since the process began.

    Pages of libraries and other mapped files count as well.
    """

    now_bytes: int
    peak_bytes: int


def resident(pid: int | str = "self") -> Resident:
    """Returns the resident memory of a process. Raises OSError when there is no such process."""
    fields = dict(line.split(":", 1) for line in Path(f"/proc/{pid}/status").read_text().splitlines())
    return Resident(_bytes(fields["VmRSS"]), _bytes(fields["VmHWM"]))


def private_bytes(pid: int | str = "self") -> int:
    """Returns the memory that is not backed by files: what a machine needs room for.

    Pages that a rank shares with its fork server until either writes to them count for both.
    Raises OSError when there is no such process.
    """
    fields = dict(line.split(":", 1) for line in Path(f"/proc/{pid}/status").read_text().splitlines())
    return sum(_bytes(fields.get(name, "0 kB")) for name in ("RssAnon", "RssShmem"))  # a zombie has none


def _bytes(field: str) -> int:
    return int(field.removesuffix("kB")) * 1024


log = structlog.get_logger(__name__)

_KILL_WAIT_S = 10.0


def thread_environment(spec: RankSpec) -> dict[str, str]:
    """Returns the variables about threads that a rank's libraries read when they are loaded.

    numpy gets no pool of its own: a rank has no use for one, and its threads would be in the
    process that ranks are forked from.
    """
    threads = str(spec.threads)
    num_spins = spec.openmp_spins if spec.spins else 0
    spins = {} if spec.spins and not num_spins else {"GOMP_SPINCOUNT": str(num_spins)}
    return {"OMP_NUM_THREADS": threads, "MKL_NUM_THREADS": threads, "OPENBLAS_NUM_THREADS": "1", **spins}


class WatchedProcess:
    """A process of the agent or of its fork server; takes over the pidfd.

    `over` resolves within milliseconds of its end. `exited` resolves to the exit code, negative for
    a signal, when `ended` has been called.
    """

    def __init__(self, pid: int, pidfd: int) -> None:
        loop = asyncio.get_running_loop()
        self.pid = pid
        self.over: asyncio.Future[None] = loop.create_future()
        self.exited: asyncio.Future[int] = loop.create_future()
        self._pidfd = pidfd
        loop.add_reader(pidfd, self._on_over)

    def _on_over(self) -> None:
        if not self.over.done():
            asyncio.get_running_loop().remove_reader(self._pidfd)
            self.over.set_result(None)

    def ended(self, code: int) -> None:
        """Records how the process ended, as reported by its parent or found otherwise.

        The first report counts.
        """
        if not self.exited.done():
            self._on_over()
            os.close(self._pidfd)
            self.exited.set_result(code)

    def find_code(self) -> int | None:
        """Returns the exit code, found without the parent, or None.

        An orphan may be this process's child by now, and a zombie shows its code. None: its parent
        has reaped it, or it runs.
        """
        if self.exited.done():
            return self.exited.result()
        with contextlib.suppress(ChildProcessError):
            result = os.waitid(os.P_PIDFD, self._pidfd, os.WEXITED | os.WNOHANG)
            return None if result is None else exit_code(result)
        return zombie_code(self.pid)

    def send_signal(self, number: signal.Signals) -> None:
        """Sends a signal. Does nothing if the process has ended."""
        if not self.exited.done():
            with contextlib.suppress(ProcessLookupError):
                signal.pidfd_send_signal(self._pidfd, number)

    @property
    def stopped(self) -> bool:
        """Returns whether the process was stopped (SIGSTOP, a debugger) and does not run."""
        try:
            return psutil.Process(self.pid).status() in (psutil.STATUS_STOPPED, psutil.STATUS_TRACING_STOP)
        except psutil.NoSuchProcess:
            return False

    @property
    def resident_bytes(self) -> int:
        """Returns the resident memory; 0 when the process has ended."""
        try:
            return psutil.Process(self.pid).memory_info().rss
        except psutil.NoSuchProcess:
            return 0

    @property
    def private_bytes(self) -> int:
        """Returns the memory that is not backed by files; 0 when the process has ended."""
        try:
            return private_bytes(self.pid)
        except OSError:
            return 0


class RankProcess(WatchedProcess):
    """The process of one rank.

    `dying` resolves when it is being killed, before its end is visible.
    """

    def __init__(self, rank: int, pid: int, pidfd: int, life_sign: LifeSign, last_words: LastWords) -> None:
        super().__init__(pid, pidfd)
        self.rank = rank
        self._last_words, self._asking = last_words, asyncio.Lock()
        loop = asyncio.get_running_loop()
        self.dying: asyncio.Future[None] = loop.create_future()
        self._life_sign = life_sign
        threading.Thread(target=self._watch, args=(loop,), name=f"rank-{rank}-lifesign", daemon=True).start()

    def ended(self, code: int) -> None:
        """See `WatchedProcess.ended`."""
        super().ended(code)
        self._life_sign.give_up()
        self._last_words.close()

    @property
    def crash(self) -> str:
        """Returns the stacks that it wrote when it crashed; empty if it did not."""
        return self._last_words.crash

    async def stacks(self, watched_s: float) -> ProcessStacks:
        """Returns where its threads are, and what they computed within `watched_s`."""
        if self.exited.done():
            return ProcessStacks(f"rank {self.rank}", self.pid)
        (seen,) = await kernel_stacks([(f"rank {self.rank}", self.pid)], watched_s)
        async with self._asking:
            return seen if self.exited.done() else await asked(seen, self._last_words)

    def _watch(self, loop: asyncio.AbstractEventLoop) -> None:
        if self._life_sign.watch():
            with contextlib.suppress(RuntimeError):  # the loop ended first
                loop.call_soon_threadsafe(self.dying.set_result, None)


def watched(child: subprocess.Popen[bytes]) -> int:
    """Returns a pidfd of a child. One that cannot be watched is ended. Raises OSError."""
    try:
        return os.pidfd_open(child.pid)
    except OSError:
        child.kill()
        child.wait()
        raise


def zombie_code(pid: int) -> int | None:
    """Returns the exit code of a process that has ended and was not reaped.

    It is read from proc_pid_stat(5).
    """
    try:
        state, *fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except (FileNotFoundError, ProcessLookupError):
        return None
    return os.waitstatus_to_exitcode(int(fields[-1])) if state == "Z" else None


async def end(processes: Sequence[Endable], grace_s: float) -> None:
    """Sends SIGTERM, and SIGKILL to what still runs after the grace; returns when all have ended.

    Without grace it sends SIGKILL at once.
    """
    running = [process for process in processes if not process.exited.done()]
    if grace_s > 0 and running:
        _signal(running, signal.SIGTERM)
        await asyncio.wait([process.exited for process in running], timeout=grace_s)
        running = [process for process in running if not process.exited.done()]
    if running:
        _signal(running, signal.SIGKILL)
        _, alive = await asyncio.wait([process.exited for process in running], timeout=_KILL_WAIT_S)
        if alive:
            # It is in an uninterruptible system call (a driver): its memory stays taken, but the
            # node goes on.
            log.error("process survived SIGKILL", pids=[process.pid for process in running if not process.exited.done()])


def _signal(processes: Sequence[Endable], number: signal.Signals) -> None:
    for process in processes:
        process.send_signal(number)


def exit_text(code: int) -> str:
    """Returns "died of SIGKILL" or "exited with code 1"."""
    return f"died of {signal.Signals(-code).name}" if code < 0 else f"exited with code {code}"
