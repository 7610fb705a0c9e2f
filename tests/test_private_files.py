"""What people said is on disk for the services' user alone, whatever the umask."""

from __future__ import annotations

import os
import sqlite3
import stat
from collections.abc import Iterator
from pathlib import Path

import pytest

from ryzanstein.cli.processes.service_process import ServiceProcess
from ryzanstein.files.private_files import private_file, private_folder
from ryzanstein.orchestrator.state.store import Store
from ryzanstein.orchestrator.telemetry import OrchestratorTelemetry
from ryzanstein.router.journal.stores.sqlite_file import JournalFile
from ryzanstein.router.sessions.stores import sqlite_file as sessions


@pytest.fixture(autouse=True)
def generous_umask() -> Iterator[None]:
    before = os.umask(0)
    yield
    os.umask(before)


def modes(folder: Path) -> dict[str, str]:
    return {path.name: oct(stat.S_IMODE(path.stat().st_mode)) for path in (folder, *sorted(folder.iterdir()))}


@pytest.mark.parametrize("open_", [sessions.connect, lambda path: JournalFile(path).connection])
def test_sessions_and_journal_are_private_with_what_sqlite_puts_beside_them(tmp_path: Path, open_: object) -> None:
    folder = tmp_path / "new" / "state"
    db: sqlite3.Connection = open_(folder / "x.db")  # type: ignore[operator]
    db.execute("CREATE TABLE written (x)")
    seen = modes(folder)
    db.close()
    assert seen.pop("x.db-lock", "0o600") == "0o600"
    assert seen == {"state": "0o700", "x.db": "0o600", "x.db-shm": "0o600", "x.db-wal": "0o600"}
    assert stat.S_IMODE((tmp_path / "new").stat().st_mode) == 0o700


async def test_the_orchestrators_database_is_private(tmp_path: Path) -> None:
    store = await Store.open(tmp_path / "state" / "orchestrator.sqlite", OrchestratorTelemetry())
    seen = modes(tmp_path / "state")
    await store.close()
    assert set(seen.values()) == {"0o700", "0o600"}
    assert len(seen) >= 2


def test_a_services_log_is_private(tmp_path: Path) -> None:
    log = tmp_path / "router.log"
    service = ServiceProcess("router", "router", {"grpc_port": 1, "metrics_port": 1}, ("--bad-flag",), log)
    service.start()
    assert service.wait_ended(60)
    service.kill()
    assert oct(stat.S_IMODE(log.stat().st_mode)) == "0o600"


def test_what_exists_keeps_its_mode_and_content(tmp_path: Path) -> None:
    shared = tmp_path / "shared"
    shared.mkdir(mode=0o750)
    file = shared / "x.db"
    file.write_text("kept")
    file.chmod(0o660)
    private_file(file)
    private_folder(shared)
    assert modes(shared) == {"shared": "0o750", "x.db": "0o660"}
    assert file.read_text() == "kept"
