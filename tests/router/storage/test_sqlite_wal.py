"""Processes that open one file in the same moment all get it."""

from __future__ import annotations

import multiprocessing
import sqlite3
from collections.abc import Callable
from contextlib import closing
from multiprocessing.synchronize import Barrier
from pathlib import Path

import pytest

from ryzanstein.router.journal.stores.sqlite_file import JournalFile
from ryzanstein.router.sessions.stores import sqlite_file
from ryzanstein.router.storage import sqlite_wal as write_ahead

_FILES, _PROCESSES = 40, 3


def _open_all(opened: Callable[[Path], sqlite3.Connection], directory: Path, together: Barrier) -> None:
    for number in range(_FILES):
        together.wait(30)
        opened(directory / f"{number}.db").close()


@pytest.mark.parametrize("opened", [sqlite_file.connect, lambda path: JournalFile(path).connection])
def test_a_file_is_opened_by_several_at_once(opened: Callable[[Path], sqlite3.Connection], tmp_path: Path) -> None:
    context = multiprocessing.get_context("fork")
    together = context.Barrier(_PROCESSES)
    processes = [context.Process(target=_open_all, args=(opened, tmp_path, together)) for _ in range(_PROCESSES)]
    for process in processes:
        process.start()
    for process in processes:
        process.join(60)
    assert [process.exitcode for process in processes] == [0] * _PROCESSES


def test_a_file_that_stays_locked_is_reported(tmp_path: Path) -> None:
    holder, db = (sqlite3.connect(tmp_path / "held.db", timeout=0, isolation_level=None) for _ in range(2))
    holder.execute("BEGIN EXCLUSIVE")
    with pytest.raises(sqlite3.OperationalError, match="locked"):
        write_ahead.turn_on(db, 0.05)
    holder.execute("ROLLBACK")
    write_ahead.turn_on(db, 0.05)
    assert db.execute("PRAGMA journal_mode").fetchone() == ("wal",)
    for each in (holder, db):
        each.close()


def test_sessions_are_opened_while_another_process_writes_them(tmp_path: Path) -> None:
    path = tmp_path / "sessions.db"
    with closing(sqlite_file.connect(path)) as writer:
        writer.execute("BEGIN IMMEDIATE")
        with closing(sqlite_file.connect(path)) as other:
            assert other.execute("SELECT count(*) FROM sessions").fetchone() == (0,)
