"""Compilers that run at once, as one process group that never outlives its caller.

A guard leads the group. It waits for the end of a pipe that only this process holds: when this
process ends, however it ends, the guard kills what still compiles and removes the folder.

It imports nothing that needs more than the standard library, see `compiling`.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from threading import Event, Lock

from ryzanstein.process.allotment import whole_cores

CPU_S = 600
"""Processor time of one compiler: a busy machine needs more time, but not more of this. The largest source takes 30 s."""
_WALL_S = 3600.0  # for one that sleeps
_GUARD = Path(__file__).with_name("compiler_guard.py")
_LIMITED = f'ulimit -S -t {CPU_S} && exec "$@"'


class NotBuilt(Exception):
    """There is no library: no compiler, it failed, or none is packaged for this CPU."""


@dataclass(frozen=True, slots=True)
class Compilers:
    """The group, by the process id of its guard, and the folder in which it works."""

    group: int
    folder: Path
    _killed: Event = field(default_factory=Event)
    _reaped: Event = field(default_factory=Event)
    _lock: Lock = field(default_factory=Lock)

    def run_all(self, commands: Sequence[Sequence[str]]) -> None:
        """Runs compilers on all cores of this process, the first commands first. The first failure ends the others.

        Raises NotBuilt.
        """
        with ThreadPoolExecutor(whole_cores()) as threads:
            running = [threads.submit(self.run, command) for command in commands]
            try:
                for each in running:
                    each.result()
            except BaseException:
                self.kill()
                threads.shutdown(wait=False, cancel_futures=True)
                raise

    def kill(self) -> None:
        """Ends all that runs, and the guard. The group is of no use after that.

        Does nothing once the guard has been reaped: the group may be another's then.
        """
        self._killed.set()
        with self._lock, suppress(ProcessLookupError):
            if not self._reaped.is_set():
                os.killpg(self.group, signal.SIGKILL)

    def end(self, guard: subprocess.Popen[bytes]) -> None:
        """Ends all that runs, and reaps the guard."""
        self.kill()
        with self._lock:
            self._reaped.set()
        guard.communicate()

    def run(self, command: Sequence[str]) -> None:
        """Runs one compiler or linker. Raises NotBuilt with its first complaint."""
        limited = ("/bin/sh", "-c", _LIMITED, "sh", *command)
        env = {**os.environ, "TMPDIR": str(self.folder)}
        with subprocess.Popen(
            limited,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            text=True,
            errors="replace",
            env=env,
            process_group=self.group,
        ) as process:
            if self._killed.is_set():  # it was being started when the others were ended
                self.kill()
                process.kill()
            try:
                _, stderr = process.communicate(timeout=_WALL_S)
            except subprocess.TimeoutExpired as error:
                process.kill()
                raise NotBuilt(f"{command[0]} took more than {_WALL_S:.0f} s") from error
        if process.returncode in (-signal.SIGXCPU, 128 + signal.SIGXCPU) or "CPU time limit" in stderr:
            raise NotBuilt(f"{command[0]} took more than {CPU_S} s of processor time")
        if process.returncode:
            raise NotBuilt(f"{command[0]}: {_complaint(stderr)}")


@contextmanager
def compilers(place: Path) -> Iterator[Compilers]:
    """Yields a group that works in a new folder below `place`. On exit nothing of it is left."""
    with tempfile.TemporaryDirectory(dir=place, ignore_cleanup_errors=True) as folder:
        command = (sys.executable, "-I", "-S", str(_GUARD), folder)
        guard = subprocess.Popen(command, stdin=subprocess.PIPE, process_group=0)
        group = Compilers(guard.pid, Path(folder))
        try:
            yield group
        finally:
            group.end(guard)


def _complaint(stderr: str) -> str:
    """Returns the first error of a compiler or linker, or the last line if there is none."""
    lines = stderr.strip().splitlines() or ["failed"]
    return next((line for line in lines if "error: " in line or "cannot find" in line), lines[-1])
