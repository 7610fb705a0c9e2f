"""A process that is killed with its group, and never another's."""

from __future__ import annotations

import os
import signal
import sys
import time
from pathlib import Path

import psutil
import pytest

from ryzanstein.cli.processes.process_group import ProcessGroup

SLEEPS = [sys.executable, "-S", "-c", "import time; time.sleep(60)"]
LEAVES_ONE = [
    sys.executable,
    "-S",
    "-c",
    "import os, time\nif os.fork():\n    os._exit(3)\ntime.sleep(60)",
]


def started(command: list[str], tmp_path: Path) -> ProcessGroup:
    with (tmp_path / "log").open("wb") as log:
        return ProcessGroup(command, log)


def members(group: int) -> list[int]:
    """Those that run."""
    found = []
    for process in psutil.process_iter(["pid", "status"]):
        try:
            if os.getpgid(process.pid) == group and process.info["status"] != psutil.STATUS_ZOMBIE:
                found.append(process.pid)
        except ProcessLookupError:
            continue
    return found


def test_the_id_of_a_process_that_ended_is_its_own_until_what_it_left_is_killed(tmp_path: Path) -> None:
    group = started(LEAVES_ONE, tmp_path)
    assert group.wait(10)
    assert group.code == 3
    assert len(members(group.pid)) == 1
    assert psutil.Process(group.pid).status() == psutil.STATUS_ZOMBIE, "nobody else gets its id"
    group.kill()
    assert not psutil.pid_exists(group.pid)
    deadline = time.monotonic() + 10
    while members(group.pid):
        assert time.monotonic() < deadline
        time.sleep(0.01)
    assert group.code == 3


def test_a_group_is_killed_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    group = started(SLEEPS, tmp_path)
    assert (group.code, group.wait(0.01)) == (None, False)
    group.kill()
    assert group.code == -signal.SIGKILL
    monkeypatch.setattr(os, "killpg", None)
    group.kill()
    group.send(signal.SIGTERM)
    assert group.wait(0)


def test_a_signal_reaches_the_process_and_its_end_is_seen(tmp_path: Path) -> None:
    group = started(SLEEPS, tmp_path)
    group.send(signal.SIGTERM)
    assert group.wait(10)
    assert group.code == -signal.SIGTERM
    group.send(signal.SIGTERM)
    group.kill()
