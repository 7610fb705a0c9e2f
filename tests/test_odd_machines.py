"""Where a home, a passwd entry, room or a system call is missing: a sentence with its remedy, and no traceback."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from ryzanstein.demo import MODEL_DIR
from ryzanstein.orchestrator.config import OrchestratorSettings
from ryzanstein.process.process_start import lacks
from ryzanstein.router.config import RouterSettings
from ryzanstein.worker.config import WorkerSettings

COMMAND = (sys.executable, "-P", "-c", "from ryzanstein.cli.__main__ import main; main()")
VARIABLES = ("STATE_DIRECTORY", "XDG_STATE_HOME", "HOME")
NOBODY = ("unshare", "--user", "--map-user=12345", "--map-group=12345")
BARE = {"PATH": os.environ["PATH"], "PYTHONPATH": os.environ.get("PYTHONPATH", ""), "COLUMNS": "200"}


def run(*command: str, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(command, env=BARE | environment, cwd="/", capture_output=True, text=True, timeout=60, check=False)


@pytest.fixture
def nobody() -> tuple[str, ...]:
    """What precedes a command that runs as a user without an entry in the passwd file, and without privileges."""
    if run(*NOBODY, "true").returncode:
        pytest.skip("there are no user namespaces here")
    return NOBODY


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 64 KiB."""
    folder = tmp_path / "small"
    folder.mkdir()
    if run("mount", "-t", "tmpfs", "-o", "size=64k", "none", str(folder)).returncode:
        pytest.skip("mounting needs root")
    yield folder
    subprocess.run(["umount", "-l", str(folder)], check=True)


@pytest.mark.parametrize(
    ("arguments", "code", "message"),
    [
        (("--version",), 0, "ryzanstein "),
        (("status", "--orchestrator", "127.0.0.1:1", "--router", "127.0.0.1:1"), 1, "nothing answers"),
        (("up",), 2, "--state-dir"),
        (("router",), 2, "state_dir must be set"),
        (("orchestrator",), 2, "database must be set"),
        (("worker", "--kv-disk-bytes", "1"), 2, "kv_disk_dir must be set"),
        (("bench", "--help"), 0, "engine"),
    ],
)
def test_without_a_home_commands_work_or_say_what_to_set(
    nobody: tuple[str, ...], arguments: tuple[str, ...], code: int, message: str
) -> None:
    done = run(*nobody, *COMMAND, *arguments)
    assert (done.returncode, "Traceback" in done.stderr) == (code, False), done.stderr
    assert message in done.stdout + done.stderr


@pytest.mark.parametrize(
    ("environment", "home"),
    [
        ({"STATE_DIRECTORY": "/var/lib/one:/var/lib/two", "HOME": "/home/a"}, "/var/lib/one"),
        ({"XDG_STATE_HOME": "/state", "HOME": "/home/a"}, "/state/ryzanstein"),
        ({"XDG_STATE_HOME": "relative", "HOME": "/home/a"}, "/home/a/.local/state/ryzanstein"),
    ],
)
def test_state_is_never_in_the_current_folder_by_default(
    monkeypatch: pytest.MonkeyPatch, environment: dict[str, str], home: str
) -> None:
    for name in VARIABLES:
        monkeypatch.delenv(name, raising=False)
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    places = (RouterSettings().state_dir, OrchestratorSettings().database, WorkerSettings().kv_disk_dir)
    assert [str(place) for place in places] == [
        f"{home}/router",
        f"{home}/orchestrator/orchestrator.sqlite",
        f"{home}/worker/kv-pages",
    ]
    assert str(RouterSettings(state_dir=Path("here")).state_dir) == "here"


def test_a_full_state_disk_is_a_sentence(small_disk: Path) -> None:
    up = run(*COMMAND, "up", "--state-dir", str(small_disk))
    demo = run(*COMMAND, "demo", TMPDIR=str(small_disk))
    (small_disk / "filler").write_bytes(bytes(40 * 1024))
    router = run(*COMMAND, "router", "--grpc-port", "0", "--no-http", "--state-dir", str(small_disk / "state"))
    for done, option in ((up, "--state-dir"), (demo, "TMPDIR"), (router, "--state-dir")):
        assert (done.returncode, len(done.stderr.splitlines())) == (1, 1), done.stderr
        assert str(small_disk) in done.stderr
        assert option in done.stderr


@pytest.mark.parametrize("arguments", [("--version",), ("status", "--json")])
def test_an_output_on_a_full_disk_is_a_sentence(arguments: tuple[str, ...]) -> None:
    with open("/dev/full", "wb") as disk:
        command = (*COMMAND, *arguments)
        done = subprocess.run(command, env=BARE, stdout=disk, stderr=subprocess.PIPE, text=True, timeout=60, check=False)
    assert (done.returncode, done.stderr) == (1, "standard output cannot be written: No space left on device; free some room\n")


def test_no_temporary_directory_is_a_sentence(nobody: tuple[str, ...]) -> None:
    program = "import tempfile; tempfile._candidate_tempdir_list = lambda: ['/proc']\n"
    done = run(sys.executable, "-P", "-c", program + COMMAND[-1], "demo")
    assert (done.returncode, "TMPDIR" in done.stderr, "Traceback" in done.stderr) == (1, True, False), done.stderr


def test_a_model_that_the_user_may_not_read_names_the_file_and_the_user(nobody: tuple[str, ...], tmp_path: Path) -> None:
    folder = tmp_path / "model"
    shutil.copytree(MODEL_DIR, folder, ignore=shutil.ignore_patterns("*.py", "__pycache__"))
    (folder / "config.json").chmod(0)
    done = run(*nobody, *COMMAND, "worker", "--grpc-port", "0", "--model", str(folder))
    last = done.stderr.splitlines()[-1]
    assert done.returncode == 1
    assert f"{folder}/config.json: Permission denied for user 12345" in last


@pytest.mark.parametrize(
    ("hidden", "message"),
    [
        ("sqlite3.sqlite_version_info = (3, 34, 1)", "SQLite 3.37 or newer"),
        ("del os.memfd_create", "memfd_create is missing"),
        ("del os.pidfd_open", "pidfd_open is missing"),
        ("sys.platform = 'freebsd14'", "run on Linux alone"),
    ],
)
def test_what_the_machine_lacks_is_a_sentence_at_the_start(hidden: str, message: str) -> None:
    start = f"import os, sqlite3, sys, runpy; {hidden}; "
    programs = [("runpy.run_module('ryzanstein.worker', run_name='__main__')",), (COMMAND[-1], "demo")]
    for program, *arguments in programs[: 1 if "platform" in hidden else 2]:  # psutil is built for its own platform
        done = run(sys.executable, "-P", "-c", start + program, *arguments)
        assert (done.returncode, len(done.stderr.splitlines())) == (1, 1), done.stderr
        assert message in done.stderr


def test_a_call_that_the_sandbox_forbids_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    def forbidden(_: object) -> int:
        raise OSError(38, "Function not implemented")

    assert list(lacks(ranks=True)) == []
    monkeypatch.setattr(os, "pidfd_open", forbidden)
    (lack,) = lacks(ranks=True)
    assert "pidfd_open is missing (Function not implemented)" in lack
    assert list(lacks(ranks=False)) == []


@pytest.mark.parametrize(
    ("program", "code"),
    [
        *((("-m", f"ryzanstein.{service}"), 0) for service in ("router", "orchestrator", "worker")),
        ((*COMMAND[2:], "router"), 130),
    ],
)
def test_the_first_process_of_a_container_obeys_sigterm_before_it_has_imported_much(
    program: tuple[str, ...], code: int, tmp_path: Path
) -> None:
    """For that process the kernel ignores the signal as long as there is no handler."""
    if run("unshare", "--pid", "--fork", "true").returncode:
        pytest.skip("there are no process namespaces here")
    command = ("unshare", "--pid", "--fork", "--kill-child", sys.executable, "-P", *program, "--grpc-port", "0")
    with subprocess.Popen(command, env=BARE | {"HOME": str(tmp_path)}, stderr=subprocess.DEVNULL) as outside:
        try:
            first = _first_that_handles(outside.pid, signal.SIGTERM)
            assert "cygrpc" not in Path(f"/proc/{first}/maps").read_text()
            os.kill(first, signal.SIGTERM)
            assert outside.wait(20) == code
        finally:
            outside.kill()


def _first_that_handles(parent: int, number: signal.Signals) -> int:
    """Returns the child's process id as soon as it handles the signal."""
    deadline = time.monotonic() + 20
    while time.monotonic() < deadline:
        for pid in Path(f"/proc/{parent}/task/{parent}/children").read_text().split():
            status = Path(f"/proc/{pid}/status").read_text()
            if int(status.partition("SigCgt:")[2].split()[0], 16) >> (number - 1) & 1:
                return int(pid)
    raise AssertionError("the signal is never handled")
