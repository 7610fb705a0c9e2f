"""Who holds a state directory, and what happens to the lock when that one ends."""

from __future__ import annotations

import os
import stat
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from ryzanstein.cli.processes.ports import InUseError
from ryzanstein.cli.up.state_lock import held

HOLD = """
import sys
from pathlib import Path
from ryzanstein.cli.up.state_lock import held

with held(Path(sys.argv[1])):
    print("held", flush=True)
    sys.stdin.read()
"""


@pytest.fixture
def holder(tmp_path: Path) -> Iterator[subprocess.Popen[str]]:
    """Another process that holds the directory `state`."""
    command = [sys.executable, "-c", HOLD, str(tmp_path / "state")]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "held\n"
        yield process
        process.kill()


def test_a_held_directory_is_refused_with_its_name_and_the_holders_process(
    tmp_path: Path, holder: subprocess.Popen[str]
) -> None:
    message = f"state directory {tmp_path / 'state'} is in use by process {holder.pid};"
    with pytest.raises(InUseError, match=message), held(tmp_path / "state"):
        pass


def test_who_is_killed_holds_nothing_any_more(tmp_path: Path, holder: subprocess.Popen[str]) -> None:
    holder.kill()
    holder.wait()
    assert (tmp_path / "state" / "lock").read_text() == f"{holder.pid}\n"
    with held(tmp_path / "state"):
        assert (tmp_path / "state" / "lock").read_text() == f"{os.getpid()}\n"


def test_a_directory_that_is_made_is_for_its_owner_alone(tmp_path: Path) -> None:
    with held(tmp_path / "a" / "state"):
        assert stat.S_IMODE((tmp_path / "a" / "state").stat().st_mode) == 0o700
        assert stat.S_IMODE((tmp_path / "a" / "state" / "lock").stat().st_mode) == 0o600


def test_a_directory_that_cannot_be_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    directory = tmp_path / "file" / "state"
    with pytest.raises(InUseError, match=rf"{directory} cannot be used \(Not a directory\); .*--state-dir"), held(directory):
        pass
