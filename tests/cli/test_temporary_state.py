"""A cluster without a state directory leaves no conversation behind, even if it is killed."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from ryzanstein.cli.processes.temporary_state import TemporaryState, remove_left

OWNER = """
import sys
from ryzanstein.cli.processes.temporary_state import TemporaryState
state = TemporaryState()
(state.path / "sessions.sqlite").write_text("a conversation")
print(state.path, flush=True)
sys.stdin.read()
"""


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch) -> Path:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    return tmp_path


def test_the_folder_of_a_killed_process_is_removed_by_the_next_and_that_of_a_living_one_stays(folder) -> None:
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    owners = [subprocess.Popen([sys.executable, "-c", OWNER], **pipes) for _ in range(2)]
    paths = [Path(owner.stdout.readline().strip()) for owner in owners]
    assert [path.parent for path in paths] == [folder, folder]
    owners[0].kill()
    owners[0].communicate()
    state = TemporaryState()
    assert sorted(folder.iterdir()) == sorted([paths[1], state.path])
    assert (paths[1] / "sessions.sqlite").exists()
    assert state.path.stat().st_mode & 0o777 == 0o700
    owners[1].communicate()
    state.remove()
    remove_left()
    assert list(folder.iterdir()) == []


def test_what_is_not_such_a_folder_stays(folder) -> None:
    elsewhere = folder / "elsewhere"
    elsewhere.mkdir()
    (elsewhere / "owner").write_text("1\n")
    (folder / "ryzanstein-link").symlink_to(elsewhere)
    (folder / "ryzanstein-file").write_text("")
    (folder / "ryzanstein-without-lock").mkdir()
    new = folder / "ryzanstein-new"  # of a process that is about to take the lock
    new.mkdir()
    (new / "owner").touch()
    remove_left()
    assert len(list(folder.iterdir())) == 5


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give a folder away")
def test_another_users_folder_stays(folder) -> None:
    left = TemporaryState()
    os.close(left._lock)
    os.chown(left.path, 12345, 12345)
    remove_left()
    assert left.path.exists()
    os.chown(left.path, 0, 0)
    remove_left()
    assert not left.path.exists()


INTERRUPTED = """
import os, signal
from pathlib import Path
from ryzanstein.cli.processes.cluster import ClusterSpec, LocalCluster
from ryzanstein.cli.processes import temporary_state
cluster = LocalCluster(ClusterSpec(Path("model")))
folder = cluster.state_dir
def interrupted(*_):
    os.kill(os.getpid(), signal.SIGINT)
cluster._stop_together = interrupted
remove = temporary_state.TemporaryState.remove
def interrupted_again(state):
    interrupted()
    remove(state)
temporary_state.TemporaryState.remove = interrupted_again
try:
    cluster.stop()
except KeyboardInterrupt:
    print("interrupted", folder.exists())
"""


def test_an_interrupt_of_the_stop_leaves_no_folder(tmp_path: Path) -> None:
    """Neither one while services have their grace, nor one more while the folder is removed."""
    environment = {**os.environ, "TMPDIR": str(tmp_path)}
    done = subprocess.run(
        [sys.executable, "-c", INTERRUPTED], env=environment, capture_output=True, text=True, timeout=30, check=True
    )
    assert done.stdout == "interrupted False\n"
    assert list(tmp_path.iterdir()) == []
