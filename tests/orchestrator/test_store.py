from __future__ import annotations

import sqlite3
from contextlib import closing

import pytest

from ryzanstein.cluster import Deployment, RolloutLimits
from ryzanstein.errors import Code, RyzansteinError
from ryzanstein.orchestrator.state.store import Store
from ryzanstein.orchestrator.state.stored import StoredHalt, StoredMembership, StoreError


@pytest.fixture
def path(tmp_path):
    return tmp_path / "made" / "o.sqlite"


async def test_what_was_written_is_there_after_opening_again(path, telemetry):
    store = await Store.open(path, telemetry)
    await store.put_deployment(Deployment("m", "/m", 2))
    await store.put_deployment(Deployment("m", "/new", 3, 2, 60.5))
    await store.put_deployment(Deployment("gone", "/gone"))
    await store.remove_deployment("gone")
    await store.save_membership(StoredMembership(frozenset("abc"), {"a": "1", "b": "1"}))
    await store.save_membership(StoredMembership(frozenset("bcd"), {"b": "2"}))
    await store.close()
    store = await Store.open(path, telemetry)
    assert await store.deployments() == (Deployment("m", "/new", 3, 2, 60.5),)
    assert await store.membership() == StoredMembership(frozenset("bcd"), {"b": "2"})
    await store.close()


async def test_a_second_orchestrator_on_the_same_file_is_refused(path, telemetry):
    store = await Store.open(path, telemetry)
    with pytest.raises(StoreError, match="locked"):
        await Store.open(path, telemetry)
    await store.close()
    again = await Store.open(path, telemetry)
    await again.close()


@pytest.mark.parametrize("content", [b"this is no database at all, but it is long enough" * 100, None])
async def test_a_file_that_is_no_database_is_refused_by_name(path, telemetry, content):
    path.parent.mkdir()
    path.mkdir() if content is None else path.write_bytes(content)
    with pytest.raises(StoreError, match=r"o\.sqlite"):
        await Store.open(path, telemetry)


@pytest.mark.parametrize("damage", ["page", "schema", "row"])
async def test_a_damaged_file_is_refused_with_what_to_do(path, telemetry, damage):
    store = await Store.open(path, telemetry)
    await store.put_deployment(Deployment("a-model", "/m"))
    await store.close()
    content = bytearray(path.read_bytes())
    at = content.index(b"CREATE TABLE deploy" if damage == "schema" else b"a-model/m")
    if damage == "page":
        content[at - at % 4096 : at - at % 4096 + 64] = b"\xa5" * 64
    else:
        content[at : at + 4] = b"\xff" * 4
    path.write_bytes(content)
    with pytest.raises(StoreError, match=r"o\.sqlite.*it is damaged: restore it, or move it away"):
        await Store.open(path, telemetry)


async def test_a_file_of_version_1_keeps_its_deployments_and_drains(path, telemetry):
    path.parent.mkdir()
    connection = sqlite3.connect(path)
    connection.executescript(
        """
        BEGIN EXCLUSIVE;
        CREATE TABLE IF NOT EXISTS deployments (model TEXT PRIMARY KEY, path TEXT NOT NULL, replicas INTEGER NOT NULL) STRICT;
        CREATE TABLE IF NOT EXISTS drains (node_id TEXT PRIMARY KEY, incarnation TEXT NOT NULL) STRICT;
        CREATE TABLE IF NOT EXISTS members (node_id TEXT PRIMARY KEY) STRICT;
        INSERT INTO deployments VALUES ('m', '/m', 2);
        INSERT INTO drains VALUES ('a', '1');
        INSERT INTO members VALUES ('a');
        PRAGMA user_version = 1;
        COMMIT;
        """
    )
    connection.close()
    for _ in range(2):  # the migrated file opens like any other
        store = await Store.open(path, telemetry)
        assert await store.deployments() == (Deployment("m", "/m", 2, 1),)
        assert await store.membership() == StoredMembership(frozenset("a"), {"a": "1"})
        await store.close()
    connection = sqlite3.connect(path)
    assert connection.execute("PRAGMA user_version").fetchone() == (3,)
    connection.close()


async def test_a_program_of_before_deployments_had_bounds_reads_and_writes_the_file(path, telemetry):
    path.parent.mkdir()
    earlier = (
        "CREATE TABLE IF NOT EXISTS deployments (model TEXT PRIMARY KEY, path TEXT NOT NULL, replicas INTEGER NOT NULL, "
        "revision INTEGER NOT NULL, idle_unload_s REAL NOT NULL) STRICT; PRAGMA user_version = 3;"
    )
    columns = "model, path, replicas, revision, idle_unload_s"
    with closing(sqlite3.connect(path)) as connection:
        connection.executescript(f"{earlier} INSERT INTO deployments VALUES ('m', '/m', 2, 1, 0.0), ('n', '/n', 0, 4, 5.0);")
    bounds = {"min_replicas": 1, "max_replicas": 3, "rollout": RolloutLimits(0.5, allow_outage=True), "earlier_path": "/m"}
    store = await Store.open(path, telemetry)
    assert await store.deployments() == (Deployment("m", "/m", 2, 1), Deployment("n", "/n", 0, 4, 5.0))
    for name in "mn":
        await store.put_deployment(Deployment(name, "/new", 2, 5, **bounds))
    await store.save_halts([StoredHalt("m", 5, "why", False)])
    await store.close()
    with closing(sqlite3.connect(path)) as connection:
        connection.executescript(earlier)
        (row,) = connection.execute(f"SELECT {columns} FROM deployments WHERE model = 'm'").fetchall()
        assert row == ("m", "/new", 2, 5, 0.0)
        connection.execute(f"INSERT OR REPLACE INTO deployments ({columns}) VALUES ('n', '/other', 1, 6, 0.0)")
        connection.commit()
    store = await Store.open(path, telemetry)
    assert await store.deployments() == (Deployment("m", "/new", 2, 5, **bounds), Deployment("n", "/other", 1, 6))
    assert await store.halts() == (StoredHalt("m", 5, "why", False),)
    await store.close()


async def test_a_file_of_a_newer_version_is_refused_and_left_as_it_is(path, telemetry):
    path.parent.mkdir()
    connection = sqlite3.connect(path)
    connection.execute("PRAGMA user_version = 99")
    connection.close()
    with pytest.raises(StoreError, match="version 99"):
        await Store.open(path, telemetry)
    connection = sqlite3.connect(path)
    assert connection.execute("PRAGMA user_version").fetchone() == (99,)
    connection.close()


async def test_a_failing_write_is_unavailable_counted_and_leaves_what_was_there(path, telemetry):
    store = await Store.open(path, telemetry)
    await store.save_membership(StoredMembership(frozenset("a")))
    with pytest.raises(RyzansteinError) as failure:
        # A value that SQLite cannot hold stands in for any error of the library in the middle of a transaction.
        await store.save_membership(StoredMembership(frozenset("b"), {"b": object()}))
    assert (failure.value.code, failure.value.reason) == (Code.UNAVAILABLE, "STORE_UNAVAILABLE")
    assert telemetry.store_errors.labels("membership")._value.get() == 1
    assert (await store.membership()).members == frozenset("a")
    await store.save_membership(StoredMembership(frozenset("c")))
    await store.close()
    store = await Store.open(path, telemetry)
    assert (await store.membership()).members == frozenset("c")
    await store.close()
