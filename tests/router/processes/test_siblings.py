"""The watcher of several processes, with real ones: what ends or hangs is started again, and all end together."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest

PROGRAM = """
import asyncio, os, sys, time
from pathlib import Path
from ryzanstein.router.processes.siblings import Heart, Patience, Siblings

folder, conduct = Path(sys.argv[1]), sys.argv[2]

async def live(heart):
    folder.joinpath(f"{heart.number}.{os.getpid()}").touch()
    loop, ended = asyncio.get_running_loop(), asyncio.Event()
    loop.add_signal_handler(15, ended.set)
    beating = asyncio.create_task(heart.beat())
    if conduct == "hangs" and heart.number == 1 and len(list(folder.glob("1.*"))) == 1:
        await asyncio.sleep(0.1)
        time.sleep(1000)
    await ended.wait()
    if conduct == "stays":
        time.sleep(1000)

def run(heart):
    if conduct == "fails":
        folder.joinpath(f"{heart.number}.{os.getpid()}").touch()
        return 7
    asyncio.run(live(heart))
    return 0

if conduct == "scarce":
    fork, left = os.fork, [2]
    def scarce():
        left[0] -= 1
        if left[0] >= 0:
            raise OSError(11, "no more processes")
        return fork()
    os.fork = scarce

patience = Patience(start_s=20, silent_s=3, stop_s=1, steady_s=0.2, pause_s=0.05)
sys.exit(Siblings(2, run, patience).watch())
"""


@contextlib.contextmanager
def watcher(folder: Path, conduct: str = "") -> Iterator[subprocess.Popen[bytes]]:
    process = subprocess.Popen([sys.executable, "-c", PROGRAM, str(folder), conduct], stdout=subprocess.DEVNULL)
    try:
        yield process
    finally:
        for each in [*psutil.Process(process.pid).children(), process] if process.poll() is None else [process]:
            each.kill()
        process.wait()


def wait_until(reached: Callable[[], bool], limit_s: float = 20.0) -> None:
    deadline = time.monotonic() + limit_s
    while not reached():
        assert time.monotonic() < deadline
        time.sleep(0.02)


def begun(folder: Path, number: int) -> list[int]:
    """The processes that have had this number."""
    return [int(path.name.partition(".")[2]) for path in folder.glob(f"{number}.*")]


def both(folder: Path) -> bool:
    return bool(begun(folder, 0)) and bool(begun(folder, 1))


def test_a_process_that_is_killed_is_started_again_and_the_other_is_left_alone(tmp_path: Path) -> None:
    with watcher(tmp_path) as process:
        wait_until(lambda: both(tmp_path))
        (killed,), (left,) = begun(tmp_path, 0), begun(tmp_path, 1)
        os.kill(killed, signal.SIGKILL)
        wait_until(lambda: len(begun(tmp_path, 0)) == 2)
        assert begun(tmp_path, 1) == [left]
        process.terminate()
        assert process.wait(20) == 0
        assert not any(map(psutil.pid_exists, (*begun(tmp_path, 0), left)))


@pytest.mark.long
def test_a_process_that_hangs_is_killed_and_started_again(tmp_path: Path) -> None:
    with watcher(tmp_path, "hangs") as process:
        wait_until(lambda: len(begun(tmp_path, 1)) == 2)
        assert len(begun(tmp_path, 0)) == 1
        process.terminate()
        assert process.wait(20) == 0


def test_what_cannot_start_ends_all_with_its_exit_code(tmp_path: Path) -> None:
    with watcher(tmp_path, "fails") as process:
        assert process.wait(20) == 7
    assert 3 <= max(len(begun(tmp_path, number)) for number in (0, 1)) <= 4


def test_a_process_that_the_system_has_no_room_for_is_started_later(tmp_path: Path) -> None:
    with watcher(tmp_path, "scarce") as process:
        wait_until(lambda: both(tmp_path))
        time.sleep(0.3)
        for _ in range(3):  # who asks more than once takes no time from what runs
            process.terminate()
        assert process.wait(20) == 0


def test_what_does_not_stop_in_time_is_killed(tmp_path: Path) -> None:
    with watcher(tmp_path, "stays") as process:
        wait_until(lambda: both(tmp_path))
        time.sleep(0.3)
        process.send_signal(signal.SIGINT)
        assert process.wait(20) == 1


def test_no_process_outlives_its_watcher(tmp_path: Path) -> None:
    with watcher(tmp_path) as process:
        wait_until(lambda: both(tmp_path))
        time.sleep(0.3)
        process.kill()
        process.wait(20)
        pids = [*begun(tmp_path, 0), *begun(tmp_path, 1)]
        wait_until(lambda: not any(map(psutil.pid_exists, pids)))


@pytest.mark.long
def test_a_watcher_that_was_suspended_blames_nobody(tmp_path: Path) -> None:
    with watcher(tmp_path) as process:
        wait_until(lambda: both(tmp_path))
        time.sleep(1.2)
        process.send_signal(signal.SIGSTOP)
        time.sleep(4.0)
        process.send_signal(signal.SIGCONT)
        time.sleep(1.5)
        assert (len(begun(tmp_path, 0)), len(begun(tmp_path, 1))) == (1, 1)
        process.terminate()
        assert process.wait(20) == 0
