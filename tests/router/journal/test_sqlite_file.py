"""The journal's file is damaged, removed or replaced, at the start and while routers use it."""

from __future__ import annotations

import asyncio
import os
import sqlite3
from collections.abc import AsyncIterator, Callable
from dataclasses import replace as replaced
from pathlib import Path
from typing import Any

import pytest

from ryzanstein import clock
from ryzanstein.generation.prompts import TextPrompt
from ryzanstein.generation.request import GenerationRequest, RequestKey, SamplingParams
from ryzanstein.router.generations.generation import Generation
from ryzanstein.router.journal.journal import Append, AppendOutcome, Head, JournalUnavailableError, KeyClaim, Owner, keep_lease
from ryzanstein.router.journal.metrics import JournalMetrics, JournalOutage
from ryzanstein.router.journal.recorder import FlushPace, JournalRecorder
from ryzanstein.router.journal.stores import sqlite_file
from ryzanstein.router.journal.stores.sqlite import SqliteJournal
from ryzanstein.router.telemetry import RouterTelemetry

ONE, OTHER = Owner("one/1", "127.0.0.1:1"), Owner("other/1", "127.0.0.1:2")
PAGE = 4096


def opening(generation_id: str) -> Append:
    return Append(generation_id, 0, b"batch" * 100, b"request of " + generation_id.encode())


@pytest.fixture
async def journals(tmp_path: Path) -> AsyncIterator[tuple[SqliteJournal, SqliteJournal]]:
    """The journals of two routers, with a short lease."""
    one, other = [await SqliteJournal.open(tmp_path / "journal.db", 0.2, 60.0) for _ in range(2)]
    await one.write(ONE, [opening(f"g{i}") for i in range(50)])
    yield one, other
    await one.close()
    await other.close()


def overwrite(path: Path) -> None:
    """Overwrites all pages but the first, and makes the routers read them again."""
    with sqlite3.connect(path, isolation_level=None) as db:
        db.execute("CREATE TABLE other (x)")
        db.execute("PRAGMA wal_checkpoint(TRUNCATE)")
        with path.open("r+b") as file:
            file.seek(PAGE)
            file.write(b"\xa5" * (path.stat().st_size - PAGE))
    db.close()


def replace(path: Path) -> None:
    for each in list(path.parent.glob("journal.db*")):
        if not each.name.endswith("-lock"):
            each.unlink()


async def works_again(journal: SqliteJournal, owner: Owner, generation_id: str) -> None:
    """A router that writes learns that all is lost, and can write it again."""
    with pytest.raises(JournalUnavailableError):
        await journal.write(owner, [Append("g1", 0, b"more")])
    async with asyncio.timeout(5):
        while True:
            try:
                assert await journal.write(owner, [Append("g1", 0, b"more")]) == [AppendOutcome.MISSING]
                break
            except JournalUnavailableError:
                continue
    assert await journal.write(owner, [opening(generation_id)]) == [AppendOutcome.WRITTEN]


@pytest.mark.parametrize("damage", [overwrite, replace])
async def test_a_file_that_is_damaged_or_removed_under_its_routers_is_begun_anew_by_all(
    journals: tuple[SqliteJournal, SqliteJournal], tmp_path: Path, damage: Callable[[Path], None]
) -> None:
    one, other = journals
    damage(tmp_path / "journal.db")
    await works_again(one, ONE, "a")
    await works_again(other, OTHER, "b")
    assert await other.head("a") == Head(ONE, 0)
    assert await one.head("b") == Head(OTHER, 0)
    assert (tmp_path / "journal.db.damaged").exists() is (damage is overwrite)
    late = await SqliteJournal.open(tmp_path / "journal.db", 0.2, 60.0)
    assert await late.head("a") == Head(ONE, 0)
    await late.close()


async def test_nothing_is_said_to_be_unknown_before_all_routers_have_written_it_again(
    journals: tuple[SqliteJournal, SqliteJournal], tmp_path: Path
) -> None:
    _, other = journals
    replace(tmp_path / "journal.db")
    claim = other.claim_key("key", KeyClaim("new", b"body"), 0.0)
    for question in (other.head("g1"), other.find(ONE.owner_id), other.last_known(ONE.owner_id), claim):
        with pytest.raises(JournalUnavailableError, match="anew"):
            await question
    await asyncio.sleep(0.25)
    assert await other.head("g1") is None


async def test_a_file_that_is_damaged_behind_its_header_is_set_aside_at_the_start(tmp_path: Path) -> None:
    path = tmp_path / "journal.db"
    journal = await SqliteJournal.open(path, 60.0, 60.0)
    await journal.write(ONE, [opening(f"g{i}") for i in range(50)])
    await journal.close()
    content = bytearray(path.read_bytes())
    content[PAGE * 2 :] = b"\xa5" * (len(content) - PAGE * 2)
    path.write_bytes(content)
    for _ in range(2):
        journal = await SqliteJournal.open(path, 60.0, 60.0)
        assert await journal.write(ONE, [opening("a")]) == [AppendOutcome.WRITTEN]
        assert await journal.head("a") == Head(ONE, 0)
        await journal.close()
    assert path.with_name("journal.db.damaged").read_bytes() == content


async def test_a_file_that_is_begun_anew_has_the_same_bound_and_can_shrink(tmp_path: Path) -> None:
    path = tmp_path / "journal.db"
    path.write_bytes(b"no database at all" * 1000)
    file = sqlite_file.JournalFile(path, 2**24)
    assert file.connection.execute("PRAGMA max_page_count").fetchone() == (2**24 // PAGE,)
    assert file.connection.execute("PRAGMA auto_vacuum").fetchone() == (2,)
    file.close()


async def test_of_a_large_damaged_file_nothing_is_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sqlite_file, "MOST_DAMAGED_BYTES", 4096)
    (tmp_path / "journal.db").write_bytes(b"no database at all" * 1000)
    journal = await SqliteJournal.open(tmp_path / "journal.db", 60.0, 60.0)
    assert "journal.db.damaged" not in os.listdir(tmp_path)
    assert await journal.write(ONE, [opening("a")]) == [AppendOutcome.WRITTEN]
    await journal.close()


@pytest.mark.parametrize("at", [24, 100, 105, 1000])
async def test_a_journal_with_bytes_of_the_schema_flipped_is_usable_after_the_start(tmp_path: Path, at: int) -> None:
    path = tmp_path / "journal.db"
    journal = await SqliteJournal.open(path, 60.0, 60.0)
    await journal.close()
    content = bytearray(path.read_bytes())
    content[content.index(b"CREATE TABLE generations") + 7 if at == 1000 else at] ^= 0xFF
    path.write_bytes(content)
    journal = await SqliteJournal.open(path, 60.0, 60.0)
    assert await journal.write(ONE, [opening("a")]) == [AppendOutcome.WRITTEN]
    await journal.close()


async def test_a_disk_that_damages_every_file_is_an_outage_and_not_a_loop(
    journals: tuple[SqliteJournal, SqliteJournal], tmp_path: Path
) -> None:
    one, _ = journals
    path = tmp_path / "journal.db"
    overwrite(path)
    with pytest.raises(JournalUnavailableError):
        await one.write(ONE, [opening("x")])
    overwrite(path)
    second = os.stat(path).st_ino
    for _ in range(3):
        with pytest.raises(JournalUnavailableError):
            await one.write(ONE, [opening("x")])
    assert os.stat(path).st_ino == second


class _NoObserver:
    def generation_started(self, generation: Generation) -> None: ...

    def first_token(self, generation: Generation) -> None: ...

    def readers_changed(self, generation: Generation) -> None: ...

    def has_news(self, readers: Any) -> None: ...


async def test_a_recorder_writes_all_that_it_has_again(tmp_path: Path) -> None:
    """Also a generation that nothing happens to, and one that has ended."""
    path = tmp_path / "journal.db"
    journal = await SqliteJournal.open(path, 0.2, 60.0)
    telemetry = RouterTelemetry()
    metrics = JournalMetrics(telemetry.registry)
    outage = JournalOutage(metrics)
    recorder = JournalRecorder(journal, FlushPace(0.01, 60.0), metrics, outage, telemetry.background)
    recorder.start(ONE, lambda generation: None)
    key = RequestKey("key", b"body")
    request = GenerationRequest("m", TextPrompt("p"), SamplingParams(), deadline=clock.unix_s() + 60.0, key=key)
    runs, ended = Generation("runs", request, _NoObserver()), Generation("ended", replaced(request, key=None), _NoObserver())
    recorder.added(runs, 0)
    recorder.added(ended, 0)
    ended.settle()
    recorder.ended(ended)
    await recorder.flushed(runs)
    await recorder.flushed(ended)
    lease = asyncio.create_task(keep_lease(journal, ONE, 0.2, outage))
    replace(path)
    seen = await SqliteJournal.open(path, 60.0, 60.0)
    async with asyncio.timeout(10):
        while await seen.head("runs") is None or await seen.head("ended") is None:  # noqa: ASYNC110 - another thread
            await asyncio.sleep(0.02)
    assert await seen.claim_key("key", KeyClaim("again", b"body"), 0.0) == KeyClaim("runs", b"body", begun=True)
    lease.cancel()
    await seen.close()
    await recorder.close()
    await journal.close()
