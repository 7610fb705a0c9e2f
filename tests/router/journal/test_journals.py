"""Both journals behave alike."""

from __future__ import annotations

import asyncio
import sqlite3
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest

from ryzanstein.router.journal.journal import (
    Append,
    AppendOutcome,
    Head,
    Journal,
    JournalRecord,
    JournalUnavailableError,
    KeyClaim,
    Owner,
)
from ryzanstein.router.journal.stores.redis import RedisJournal
from ryzanstein.router.journal.stores.sqlite import SqliteJournal
from ryzanstein.storage.redis_client import redis_client

Opener = Callable[..., Awaitable[Journal]]
ONE, OTHER = Owner("one/1", "127.0.0.1:1"), Owner("other/1", "127.0.0.1:2")


@pytest.fixture(params=["sqlite", "redis"])
async def open_journal(request: pytest.FixtureRequest, tmp_path: Path, start_redis: Any) -> AsyncIterator[Opener]:
    """Opens journals of the same store, as several routers do."""
    opened: list[Journal] = []
    url = (await start_redis()).url if request.param == "redis" else ""

    async def open_one(lease_s: float = 60.0, retention_s: float = 60.0) -> Journal:
        journal: Journal
        if request.param == "redis":
            journal = RedisJournal(redis_client(url, decode_responses=False), "test:", lease_s, retention_s)
        else:
            journal = await SqliteJournal.open(tmp_path / "journal.db", lease_s, retention_s)
        opened.append(journal)
        return journal

    yield open_one
    for journal in opened:
        await journal.close()


def opening(generation_id: str, batch: bytes = b"", epoch: int = 0) -> Append:
    return Append(generation_id, epoch, batch, b"request of " + generation_id.encode())


async def test_what_one_router_wrote_another_one_takes(open_journal: Opener) -> None:
    one, other = await open_journal(), await open_journal()
    assert await one.write(ONE, [opening("a", b"1"), opening("b")]) == [AppendOutcome.WRITTEN] * 2
    assert await one.write(ONE, [Append("a", 0, b"2\0\xff")]) == [AppendOutcome.WRITTEN]
    assert await other.head("a") == Head(ONE, 0)
    assert await other.take("a", 0, OTHER) == JournalRecord(1, b"request of a", (b"1", b"2\0\xff"))
    assert await one.head("a") == Head(OTHER, 1)
    assert await one.head("b") == Head(ONE, 0)
    assert await other.take("b", 0, OTHER) == JournalRecord(1, b"request of b", ())


async def test_the_old_owner_is_fenced_off_and_writes_nothing(open_journal: Opener) -> None:
    journal = await open_journal()
    await journal.write(ONE, [opening("a", b"1"), opening("b")])
    await journal.take("a", 0, OTHER)
    outcomes = await journal.write(ONE, [Append("a", 0, b"late"), Append("b", 0, b"x"), opening("a", b"late")])
    assert outcomes == [AppendOutcome.FENCED, AppendOutcome.WRITTEN, AppendOutcome.FENCED]
    await journal.remove([("a", 0)])
    record = await journal.take("a", 1, ONE)
    assert record == JournalRecord(2, b"request of a", (b"1",))


async def test_of_many_takers_exactly_one_wins(open_journal: Opener) -> None:
    journals = [await open_journal() for _ in range(4)]
    await journals[0].write(ONE, [opening(f"g{i}") for i in range(20)])
    for i in range(20):
        takers = [Owner(f"taker/{n}", f"127.0.0.1:{n}") for n in range(4)]
        taken = await asyncio.gather(
            *(journal.take(f"g{i}", 0, taker) for journal, taker in zip(journals, takers, strict=True))
        )
        (winner,) = [taker for taker, record in zip(takers, taken, strict=True) if record is not None]
        assert await journals[0].head(f"g{i}") == Head(winner, 1)


async def test_an_opening_that_is_repeated_changes_nothing(open_journal: Opener) -> None:
    journal = await open_journal()
    await journal.write(ONE, [opening("a", b"1")])
    assert await journal.write(ONE, [opening("a", b"2")]) == [AppendOutcome.WRITTEN]
    assert await journal.take("a", 0, OTHER) == JournalRecord(1, b"request of a", (b"1", b"2"))


async def test_what_was_never_opened_is_missing(open_journal: Opener) -> None:
    journal = await open_journal()
    assert await journal.write(ONE, [Append("a", 0, b"1")]) == [AppendOutcome.MISSING]
    assert await journal.head("a") is None
    assert await journal.take("a", 0, OTHER) is None


async def test_a_removed_generation_is_gone_with_all_its_batches(open_journal: Opener) -> None:
    journal = await open_journal()
    await journal.write(ONE, [opening("a", b"1"), opening("b", b"1")])
    await journal.remove([("a", 0), ("unknown", 0)])
    assert await journal.head("a") is None
    assert await journal.head("b") == Head(ONE, 0)
    await journal.write(ONE, [opening("a", b"new")])
    assert await journal.take("a", 0, OTHER) == JournalRecord(1, b"request of a", (b"new",))


async def test_a_generation_expires_unless_it_is_touched(open_journal: Opener) -> None:
    journal = await open_journal(retention_s=0.6)
    await journal.write(ONE, [opening("a", b"1"), opening("b", b"1")])
    for _ in range(4):
        await asyncio.sleep(0.2)
        assert await journal.write(ONE, [Append("b", 0, b"")]) == [AppendOutcome.WRITTEN]
    assert await journal.head("a") is None
    assert await journal.take("a", 0, OTHER) is None
    await journal.renew(ONE)
    assert await journal.write(ONE, [Append("a", 0, b"2")]) == [AppendOutcome.EXPIRED]
    assert await journal.take("b", 0, OTHER) == JournalRecord(1, b"request of b", (b"1",))


async def test_a_generation_that_is_written_to_does_not_expire(open_journal: Opener) -> None:
    journal = await open_journal(retention_s=0.6)
    await journal.write(ONE, [opening("a", b"0")])
    for i in range(1, 6):
        await asyncio.sleep(0.2)
        assert await journal.write(ONE, [Append("a", 0, b"%d" % i)]) == [AppendOutcome.WRITTEN]
        await journal.renew(ONE)
    assert await journal.head("a") == Head(ONE, 0)
    assert await journal.take("a", 0, OTHER) == JournalRecord(1, b"request of a", (b"0", b"1", b"2", b"3", b"4", b"5"))


@pytest.mark.parametrize("then", ["nothing", "taken", "removed"])
async def test_an_owner_that_slept_learns_whether_another_router_had_its_generation(open_journal: Opener, then: str) -> None:
    journal = await open_journal(retention_s=0.3)
    await journal.write(ONE, [opening("a", b"0")])
    if then == "taken":
        assert await journal.take("a", 0, OTHER) is not None
    elif then == "removed":
        await journal.remove([("a", 0)])
    await asyncio.sleep(0.4)
    await journal.renew(OTHER)
    assert await journal.head("a") is None
    expected = AppendOutcome.EXPIRED if then == "nothing" else AppendOutcome.MISSING
    assert await journal.write(ONE, [Append("a", 0, b"1")]) == [expected]
    if then == "nothing":
        assert await journal.write(ONE, [opening("a", b"0"), Append("a", 0, b"1")]) == [AppendOutcome.WRITTEN] * 2
        assert await journal.take("a", 0, OTHER) == JournalRecord(1, b"request of a", (b"0", b"1"))
        await journal.remove([("a", 1)])
        assert await journal.write(ONE, [Append("a", 0, b"2")]) == [AppendOutcome.MISSING], "the other router has ended it"


async def test_what_is_kept_does_not_expire_while_no_router_lives(open_journal: Opener) -> None:
    """No client can come then. The window begins again where it was when a router is back."""
    one = await open_journal(lease_s=0.2, retention_s=1.0)
    await one.renew(ONE)
    await one.write(ONE, [opening("a", b"1"), opening("b")])
    assert await one.claim_key("key", KeyClaim("a", b"body"), 0.0) is None
    await asyncio.sleep(1.5)
    other = await open_journal(lease_s=0.2, retention_s=1.0)
    assert await other.head("a") == Head(ONE, 0)
    assert await other.claim_key("key", KeyClaim("c", b"body"), 0.0) == KeyClaim("a", b"body", begun=True)
    await other.renew(OTHER)
    record = await other.take("a", 0, OTHER)
    assert record == JournalRecord(1, b"request of a", (b"1",))
    assert record is not None
    assert record.age_s > 1.4, "the deadline of the generation went on"
    for _ in range(14):
        await asyncio.sleep(0.1)
        await other.renew(OTHER)
    assert await other.head("a") is None
    assert await other.head("b") is None


async def test_a_router_that_takes_no_calls_keeps_nothing_from_waiting_for_one_that_does(open_journal: Opener) -> None:
    journal = await open_journal(lease_s=0.2, retention_s=0.8)
    await journal.renew(ONE)
    await journal.write(ONE, [opening("a")])
    for _ in range(12):
        await asyncio.sleep(0.1)
        await journal.renew(Owner(ONE.owner_id, ""))
    await journal.renew(OTHER)
    assert await journal.head("a") == Head(ONE, 0)


async def test_a_lease_tells_where_its_owner_is_until_it_ends_with_time_or_by_resigning(open_journal: Opener) -> None:
    journal, other = await open_journal(lease_s=0.5), await open_journal()
    assert await other.find(ONE.owner_id) is None
    await journal.renew(ONE)
    await other.renew(OTHER)
    assert await other.find(ONE.owner_id) == ONE
    await asyncio.sleep(0.6)
    assert await other.find(ONE.owner_id) is None
    assert await journal.find(OTHER.owner_id) == OTHER
    await other.renew(OTHER)
    assert await other.last_known(ONE.owner_id) == ONE, "its owner may only have lost the store"
    await other.resign(OTHER)
    assert await journal.find(OTHER.owner_id) is None
    assert await journal.last_known(OTHER.owner_id) is None


async def test_a_locked_file_is_an_outage_and_no_wait_for_ever(tmp_path: Path) -> None:
    journal = await SqliteJournal.open(tmp_path / "journal.db", 60, 60)
    with sqlite3.connect(tmp_path / "journal.db", isolation_level=None) as other:
        other.execute("BEGIN EXCLUSIVE")
        with pytest.raises(JournalUnavailableError, match="locked"):
            async with asyncio.timeout(5):
                await journal.write(ONE, [opening("a")])
        other.execute("ROLLBACK")
    other.close()
    assert await journal.write(ONE, [opening("a")]) == [AppendOutcome.WRITTEN]
    await journal.close()


async def test_a_damaged_file_and_one_of_an_earlier_boot_are_begun_anew(tmp_path: Path) -> None:
    path = tmp_path / "journal.db"
    path.write_bytes(b"no database at all" * 100)
    journal = await SqliteJournal.open(path, 60, 60)
    await journal.write(ONE, [opening("a")])
    await journal.close()
    with sqlite3.connect(path) as other:
        other.execute("UPDATE boot SET boot_id = 'before'")
    other.close()
    journal = await SqliteJournal.open(path, 60, 60)
    assert await journal.head("a") is None
    await journal.close()


async def test_a_redis_that_is_gone_is_an_outage_until_it_is_back(start_redis: Any) -> None:
    redis = await start_redis()
    journal = RedisJournal(redis_client(redis.url, decode_responses=False), "test:", 60, 60)
    assert await journal.write(ONE, [opening("a")]) == [AppendOutcome.WRITTEN]
    await redis.kill()
    for call in (journal.write(ONE, [Append("a", 0, b"1")]), journal.head("a"), journal.renew(ONE)):
        with pytest.raises(JournalUnavailableError):
            await call
    await redis.start()
    assert await journal.write(ONE, [Append("a", 0, b"1")]) == [AppendOutcome.WRITTEN]
    await journal.close()


async def test_a_record_says_how_long_ago_it_was_written(open_journal: Opener) -> None:
    one, other = await open_journal(), await open_journal()
    await one.write(ONE, [opening("a", b"1")])
    await asyncio.sleep(0.3)
    first = await other.take("a", 0, OTHER)
    await asyncio.sleep(0.3)
    second = await one.take("a", 1, ONE)
    await one.write(ONE, [Append("a", 2, b"")])
    third = await other.take("a", 2, OTHER)
    assert first is not None
    assert second is not None
    assert third is not None
    assert 0.25 < first.age_s < second.age_s - 0.25  # to take it over is not to write to it
    assert third.age_s < 0.25


async def test_a_generation_of_an_earlier_version_can_be_taken(tmp_path: Path) -> None:
    journal = await SqliteJournal.open(tmp_path / "journal.db", 60.0, 60.0)
    await journal.write(ONE, [opening("a", b"1")])
    await journal.close()
    with sqlite3.connect(tmp_path / "journal.db") as db:
        db.execute("ALTER TABLE generations DROP COLUMN written")
    journal = await SqliteJournal.open(tmp_path / "journal.db", 60.0, 60.0)
    record = await journal.take("a", 0, OTHER)
    assert record == JournalRecord(1, b"request of a", (b"1",))
    assert record.age_s == 0.0
    await journal.close()


async def test_a_generation_of_an_earlier_version_can_be_taken_from_redis(start_redis: Any) -> None:
    client = redis_client((await start_redis()).url, decode_responses=False)
    journal = RedisJournal(client, "test:", 60.0, 60.0)
    await journal.write(ONE, [opening("a", b"1")])
    assert await client.hdel("test:generation:a", "written_ms") == 1
    record = await journal.take("a", 0, OTHER)
    assert record == JournalRecord(1, b"request of a", (b"1",))
    assert record.age_s == 0.0
    await journal.close()


async def test_the_file_has_a_bound_and_goes_on_when_entries_have_expired(tmp_path: Path) -> None:
    """At the bound a write is an outage, in which generations go on in memory; leases are renewed all the same."""
    path, most = tmp_path / "journal.db", 16 * 2**20
    journal = await SqliteJournal.open(path, 60.0, 0.5, most)
    requests = [Append(str(number), 0, b"", b"x" * 2**20) for number in range(17)]
    for request in requests[:14]:
        await journal.write(ONE, [request])
    with pytest.raises(JournalUnavailableError, match="full"):
        await journal.write(ONE, requests[14:])
    assert 10 * 2**20 < path.stat().st_size <= most
    await journal.renew(ONE)
    assert await journal.find(ONE.owner_id) == ONE
    await asyncio.sleep(0.6)
    for _ in range(20):
        await journal.renew(ONE)
    assert path.stat().st_size < 6 * 2**20, "it shrinks"
    assert await journal.write(ONE, requests[-1:]) == [AppendOutcome.WRITTEN]
    await journal.close()


async def test_the_routers_with_a_lease_are_listed_with_where_clients_reach_them(open_journal: Opener) -> None:
    one, other = await open_journal(), await open_journal()
    assert await one.owners() == []
    serving, draining = Owner("one/1", "127.0.0.1:1", "127.0.0.1:50051"), Owner("other/1", "", "127.0.0.1:50052")
    await one.renew(serving)
    await other.renew(draining)
    for journal in (one, other):
        found = {each.owner_id: (each.router_id, each.address, each.public) for each in await journal.owners()}
        assert found == {
            "one/1": ("one", "127.0.0.1:1", "127.0.0.1:50051"),
            "other/1": ("other", "", "127.0.0.1:50052"),
        }
    await one.resign(serving)
    assert [each.owner_id for each in await other.owners()] == ["other/1"]


async def test_a_router_is_listed_no_longer_when_its_lease_has_expired(open_journal: Opener) -> None:
    journal = await open_journal(lease_s=0.2)
    await journal.renew(Owner("one/1", "127.0.0.1:1", "127.0.0.1:50051"))
    await asyncio.sleep(0.3)
    assert await journal.owners() == []
    await journal.renew(Owner("one/2", "127.0.0.1:1", "127.0.0.1:50051"))
    assert [each.owner_id for each in await journal.owners()] == ["one/2"]
