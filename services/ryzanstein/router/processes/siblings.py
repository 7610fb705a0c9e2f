"""Several processes of one service, forked from one that only watches them.

A process that ends is started again, and so is one that hangs: each beats once a second through a pipe, from its event loop.
The watcher has no event loop and no threads, so it can fork at any time. Processes share the memory of what was imported
before.

A process that cannot start is tried a few times. Then all end with its exit code, so that whatever runs the service sees that.
"""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import os
import signal
import time
from collections.abc import Callable
from dataclasses import dataclass

import structlog

from ryzanstein.process.service_process import BAD_SETTINGS, FAILED, STOPPED

log = structlog.get_logger(__name__)

BEAT_S = 1.0
_STOPS = (signal.SIGTERM, signal.SIGINT)
_WATCHED = (*_STOPS, signal.SIGHUP, signal.SIGCHLD)
_LOOK_S = 1.0
_PR_SET_PDEATHSIG = 1


@dataclass(frozen=True, slots=True)
class Patience:
    """How long a process may take, in seconds.

    `start_s` until its first beat, `silent_s` between beats, `stop_s` from SIGTERM to its end. One that ends before it has
    run for `steady_s` has failed to start; after `max_failures` such ends in a row there are no further tries.
    """

    start_s: float = 120.0
    silent_s: float = 30.0
    stop_s: float = 60.0
    steady_s: float = 10.0
    max_failures: int = 3
    pause_s: float = 1.0


class Heart:
    """Beats for the process of this number, through the pipe that its watcher reads."""

    def __init__(self, number: int, pipe: int) -> None:
        self.number = number
        self._pipe = pipe

    async def beat(self) -> None:
        """Beats until cancelled. A full pipe means that the watcher is stopped, which is not this process's fault."""
        while True:
            with contextlib.suppress(BlockingIOError):
                os.write(self._pipe, b".")
            await asyncio.sleep(BEAT_S)


Run = Callable[[Heart], int]
"""Runs one process, and returns its exit code."""


@dataclass(slots=True)
class _Sibling:
    """The process of one number; `pid` 0: it does not run, and is started at `start_at`."""

    number: int
    pid: int = 0
    pipe: int = -1
    began_at: float = 0.0
    seen_at: float = 0.0
    """When it beat last; 0: it has not."""
    start_at: float = 0.0
    failures: int = 0
    killed: bool = False


class Siblings:
    """Runs `count` processes of a service. Call `watch` in a process that has no threads."""

    def __init__(self, count: int, run: Run, patience: Patience | None = None) -> None:
        self._run = run
        self._patience = patience or Patience()
        self._siblings = [_Sibling(number) for number in range(count)]
        self._stop_by: float | None = None
        self._code = STOPPED

    def watch(self) -> int:
        """Starts the processes and watches them until SIGTERM or SIGINT. Returns the exit code, also in each process."""
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)  # ignored, as some wrappers leave it, ends could not be waited for
        before = signal.pthread_sigmask(signal.SIG_BLOCK, _WATCHED)
        looked_at = time.monotonic()
        while self._stop_by is None or any(each.pid for each in self._siblings):
            for sibling in self._siblings:
                if not sibling.pid and self._stop_by is None and sibling.start_at <= time.monotonic():
                    heart = self._started(sibling)
                    if heart is not None:  # this is the new process
                        signal.pthread_sigmask(signal.SIG_SETMASK, before)
                        return self._run(heart)
            came = signal.sigtimedwait(_WATCHED, _LOOK_S)
            now = time.monotonic()
            if now - looked_at > self._patience.silent_s / 2:
                self._forgive(now)  # this process was stopped: it has heard nobody
            looked_at = now
            if came is not None and came.si_signo in _STOPS:
                self._stop()
            elif came is not None and came.si_signo == signal.SIGHUP:
                self._signal(signal.SIGHUP)
            self._hear(now)
            self._reap(now)
        return self._code

    def _started(self, sibling: _Sibling) -> Heart | None:
        """Forks. Returns the heart of the new process in that one, and None in this one."""
        reading, writing = os.pipe()
        os.set_blocking(reading, False)
        os.set_blocking(writing, False)
        parent = os.getpid()
        try:
            pid = os.fork()
        except OSError as error:
            os.close(reading)
            os.close(writing)
            log.error("process not started", number=sibling.number, why=error.strerror)
            sibling.start_at = time.monotonic() + self._patience.pause_s
            return None
        if not pid:
            os.close(reading)
            for other in self._siblings:
                if other.pipe >= 0:
                    os.close(other.pipe)
            signal.signal(signal.SIGHUP, signal.SIG_IGN)  # until it wants to know of it
            _end_with(parent)
            return Heart(sibling.number, writing)
        os.close(writing)
        sibling.pid, sibling.pipe, sibling.killed = pid, reading, False
        sibling.began_at, sibling.seen_at = time.monotonic(), 0.0
        log.info("process started", number=sibling.number, pid=pid)
        return None

    def _hear(self, now: float) -> None:
        """Reads beats, and kills processes that are silent."""
        for sibling in self._siblings:
            if not sibling.pid:
                continue
            with contextlib.suppress(BlockingIOError):
                if os.read(sibling.pipe, 4096):
                    sibling.seen_at = now
            quiet_s = now - (sibling.seen_at or sibling.began_at)
            bound_s = self._patience.silent_s if sibling.seen_at else self._patience.start_s
            late = self._stop_by is not None and now >= self._stop_by
            if not sibling.killed and (late or quiet_s > bound_s):
                why = "it did not stop in time" if late else f"no sign of life for {quiet_s:.0f} s"
                log.error("process killed", number=sibling.number, pid=sibling.pid, why=why)
                sibling.killed = True
                os.kill(sibling.pid, signal.SIGKILL)

    def _reap(self, now: float) -> None:
        """Notes the processes that have ended, and when they are started again."""
        for sibling in self._siblings:
            if not sibling.pid or not os.waitid(os.P_PID, sibling.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT):
                continue
            _, status = os.waitpid(sibling.pid, 0)
            os.close(sibling.pipe)
            sibling.pid, sibling.pipe = 0, -1
            self._ended(sibling, os.waitstatus_to_exitcode(status), now)

    def _ended(self, sibling: _Sibling, code: int, now: float) -> None:
        if self._stop_by is not None:
            self._code = self._code or (FAILED if code < 0 else code)
            return
        steady = now - sibling.began_at >= self._patience.steady_s
        sibling.failures = 1 if steady else sibling.failures + 1
        log.error("process ended", number=sibling.number, code=code, failures=sibling.failures)
        if code == BAD_SETTINGS or sibling.failures >= self._patience.max_failures:
            self._code = code if code > 0 else FAILED
            self._stop()
        sibling.start_at = now + self._patience.pause_s * (2 ** (sibling.failures - 1) if not steady else 1)

    def _stop(self) -> None:
        """Asks all processes to stop. Who asks twice, as a wrapper and the kubelet may, takes no time from them."""
        if self._stop_by is None:
            self._stop_by = time.monotonic() + self._patience.stop_s
            self._signal(signal.SIGTERM)

    def _signal(self, number: signal.Signals) -> None:
        for sibling in self._siblings:
            if sibling.pid:
                os.kill(sibling.pid, number)  # not reaped yet, so the number is still its own

    def _forgive(self, now: float) -> None:
        for sibling in self._siblings:
            sibling.began_at = now if not sibling.seen_at else sibling.began_at
            sibling.seen_at = now if sibling.seen_at else 0.0


def _end_with(parent: int) -> None:
    """Has the kernel send this process SIGTERM when the watcher dies, which nobody else would start again."""
    prctl = getattr(ctypes.CDLL(None), "prctl", None)
    if prctl is not None:
        prctl(_PR_SET_PDEATHSIG, int(signal.SIGTERM), 0, 0, 0)
    if os.getppid() != parent:
        os.kill(os.getpid(), signal.SIGTERM)
