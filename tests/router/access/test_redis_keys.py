"""Routers follow the keys of a real Redis server, and go on without it for as long as they may."""

from __future__ import annotations

import os
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest
from redis import Redis

from ryzanstein.auth.caller import DEFAULT_SCOPES
from ryzanstein.auth.key_form import ApiKey
from ryzanstein.auth.keys.keys_file import KeyExistsError, KeysFile, NoSuchKeyError
from ryzanstein.auth.keys.keys_text import key_text
from ryzanstein.auth.keys.records import KeyRecord
from ryzanstein.auth.keys.redis_keys import KeysRedisError, RedisKeys
from ryzanstein.router.access.stores import watch
from ryzanstein.router.config import RouterSettings

PASSWORD = "canary-of-redis"
Open = Callable[..., Awaitable[Any]]
Until = Callable[..., Awaitable[None]]
FIRST, SECOND = ApiKey.new(), ApiKey.new()


def record(key: ApiKey, **more: Any) -> KeyRecord:
    return KeyRecord(key.key_id, key.digest(), "acme", DEFAULT_SCOPES, **more)


@pytest.fixture
async def redis(start_redis: Any) -> Any:
    return await start_redis(PASSWORD)


@pytest.fixture
def keys(redis: Any) -> Any:
    made = RedisKeys(redis.url, "ryzanstein:")
    made.add(record(FIRST, note='é"', created=1.7e9, models=frozenset({"demo"})))
    yield made
    made.close()


@pytest.fixture(autouse=True)
def often(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(watch, "LOOK_S", 0.02)


@pytest.fixture
def open_router(open_access: Open, redis: Any, tmp_path: Path) -> Open:
    async def open_router(name: str = "one", **settings: Any) -> Any:
        return await open_access(keys_redis=True, redis_url=redis.url, state_dir=tmp_path / name, **settings)

    return open_router


async def test_keys_are_read_as_they_were_written(keys: Any) -> None:
    first = record(FIRST, note='é"', created=1.7e9, models=frozenset({"demo"}))
    version, snapshot = keys.read_version()
    assert (dict(snapshot.keys), version) == ({FIRST.key_id: first}, keys.version())
    keys.add(first)  # a command that was sent twice
    with pytest.raises(KeyExistsError):
        keys.add(record(ApiKey(FIRST.key_id, SECOND.secret)))
    with pytest.raises(NoSuchKeyError):
        keys.revoke(SECOND.key_id, 1.8e9)
    assert (keys.revoke(FIRST.key_id, 1.8e9), keys.revoke(FIRST.key_id, 1.9e9)) == (True, False)
    assert dict(keys.read().revoked) == {FIRST.key_id: 1.8e9}


async def test_only_what_changed_is_read(keys: Any, redis: Any) -> None:
    client = Redis.from_url(redis.url)

    def whole_readings() -> int:
        return int(client.info("commandstats").get("cmdstat_hgetall", {"calls": 0})["calls"]) // 3

    version, snapshot = keys.read_version()
    keys.add(record(SECOND))
    keys.revoke(FIRST.key_id, 1.8e9)
    client.config_resetstat()
    version, snapshot = keys.read_changed(version, snapshot)
    assert (whole_readings(), version) == (0, keys.version())
    assert snapshot == keys.read()
    assert set(snapshot.keys) == {FIRST.key_id, SECOND.key_id}
    client.config_resetstat()
    # What is changed by hand, more than is kept of changes, and what another server has are read whole.
    client.hset("ryzanstein:access:tenants", "acme", '{"sessions": 3}')
    client.incr("ryzanstein:access:version")
    version, snapshot = keys.read_changed(version, snapshot)
    assert (whole_readings(), snapshot.tenants["acme"].limits.sessions) == (1, 3)
    client.incrby("ryzanstein:access:version", 1001)
    version, snapshot = keys.read_changed(version, snapshot)
    client.set("ryzanstein:access:origin", "another")
    assert keys.read_changed(version, snapshot)[1] == keys.read()
    assert whole_readings() == 4
    client.close()


async def test_what_a_command_changes_is_known_to_every_router(
    open_router: Open, redis: Any, command: Callable[..., str], until: Until
) -> None:
    routers = [await open_router(name) for name in ("one", "two")]
    where = ("--redis-url", redis.url)
    made = command("add", "globex", *where).strip()
    await until(lambda: [each.outcome(made) for each in routers] == ["key", "key"], 2.0)
    callers = [each.caller(made) for each in routers]
    assert made[3:15] in command("list", *where)
    assert '"globex"' in command("check", *where, given=made)
    command("revoke", made[3:15], *where)
    await until(lambda: {each.ended(caller) for each, caller in zip(routers, callers, strict=True)} == {"KEY_REVOKED"}, 2.0)
    assert [each.outcome(made) for each in routers] == ["key_revoked", "key_revoked"]


async def test_a_keys_file_is_imported_with_its_tenants(
    open_router: Open, keys: Any, redis: Any, *, tmp_path: Path, command: Callable[..., str], until: Until
) -> None:
    router = await open_router()
    (tmp_path / "keys.toml").touch(0o600)
    (tmp_path / "keys.toml").write_text(f"[tenant.acme]\nsessions = 3\ncache = 'group:g'\n{key_text(record(SECOND))}")
    command("import", tmp_path / "keys.toml", "--redis-url", redis.url)
    await until(lambda: router.outcome(SECOND.reveal()) == "key")
    assert router.outcome(FIRST.reveal()) == "key"
    assert (router.opened.limits_of("acme").sessions, router.caller(FIRST.reveal()).cache_scope) == (3, "group:g")


async def test_nothing_is_read_but_the_version_while_nothing_changes(
    open_router: Open, keys: Any, redis: Any, until: Until
) -> None:
    router = await open_router()
    client = Redis.from_url(redis.url)
    client.config_resetstat()
    await until(lambda: client.info("commandstats").get("cmdstat_mget", {"calls": 0})["calls"] >= 3)
    assert "cmdstat_hgetall" not in client.info("commandstats")
    assert router.value("keys_reloads_total", source="redis", outcome="loaded") == 1
    client.close()


async def test_without_redis_the_last_keys_stay_until_they_are_too_old(
    open_router: Open, keys: Any, redis: Any, until: Until
) -> None:
    router = await open_router(keys_max_age_s=1.0)
    caller = router.caller(FIRST.reveal())
    await redis.kill()
    await until(lambda: router.value("keys_reloads_total", source="redis", outcome="failed") == 1)
    assert (router.outcome(FIRST.reveal()), router.outcome(SECOND.reveal())) == ("key", "key_invalid")
    await until(lambda: router.outcome(FIRST.reveal()) == "keys_unavailable", 3.0)
    assert (router.outcome(SECOND.reveal()), router.ended(caller)) == ("keys_unavailable", "KEYS_UNAVAILABLE")
    await redis.start()
    await until(lambda: router.outcome(FIRST.reveal()) == "key", 5.0)
    assert (router.outcome(SECOND.reveal()), router.ended(caller)) == ("key_invalid", "")


async def test_a_router_starts_from_its_copy_while_redis_is_away(
    open_router: Open, keys: Any, redis: Any, tmp_path: Path, until: Until
) -> None:
    await open_router()
    await redis.kill()
    copy = tmp_path / "one" / "keys-of-redis.toml"
    assert os.stat(copy).st_mode & 0o777 == 0o600
    again = await open_router()
    assert again.outcome(FIRST.reveal()) == "key"
    assert again.caller(FIRST.reveal()).models == frozenset({"demo"})
    # On another machine there is no copy: nobody is told that a key is invalid.
    other = await open_router("other")
    assert {other.outcome(key.reveal()) for key in (FIRST, SECOND)} == {"keys_unavailable"}
    os.utime(copy, (os.stat(copy).st_mtime - 901,) * 2)
    old = await open_router()
    assert {old.outcome(key.reveal()) for key in (FIRST, SECOND)} == {"keys_unavailable"}
    assert old.value("keys_age_seconds", source="redis") > 900
    await redis.start()
    for each in (again, other, old):
        await until(lambda each=each: each.outcome(FIRST.reveal()) == "key", 5.0)  # type: ignore[misc]


async def test_the_copy_has_all_changes_when_a_router_stops(
    access_of: Any, keys: Any, redis: Any, tmp_path: Path, until: Until
) -> None:
    """They are not saved one by one; a copy that lacks one is not called current meanwhile."""
    settings = RouterSettings(keys_redis=True, redis_url=redis.url, state_dir=tmp_path)
    copy = KeysFile(tmp_path / "keys-of-redis.toml")
    async with access_of(settings) as router:
        os.utime(copy.path, (1e9, 1e9))
        await until(lambda: os.stat(copy.path).st_mtime > 1e9)  # it is current; said again in 10 s
        os.utime(copy.path, (1e9, 1e9))
        keys.add(record(SECOND))
        await until(lambda: router.outcome(SECOND.reveal()) == "key")
        reads = router.value("keys_reloads_total", source="redis", outcome="loaded")
        assert (set(copy.read().keys), os.stat(copy.path).st_mtime, reads) == ({FIRST.key_id}, 1e9, 2)
    assert set(copy.read().keys) == {FIRST.key_id, SECOND.key_id}
    assert os.stat(copy.path).st_mtime > 1e9


async def test_a_server_that_lost_its_keys_takes_none_away(open_router: Open, keys: Any, redis: Any, until: Until) -> None:
    router = await open_router()
    client = Redis.from_url(redis.url)
    client.flushall()
    await until(lambda: router.value("keys_reloads_total", source="redis", outcome="failed") == 1)
    assert router.outcome(FIRST.reveal()) == "key"
    started = await open_router()  # it has the copy
    assert started.outcome(FIRST.reveal()) == "key"
    keys.add(record(SECOND))
    await until(lambda: router.outcome(SECOND.reveal()) == started.outcome(SECOND.reveal()) == "key")
    assert router.outcome(FIRST.reveal()) == "key_invalid"
    client.close()


async def test_before_the_first_key_every_key_is_invalid(open_router: Open, until: Until, redis: Any) -> None:
    router = await open_router()
    assert router.outcome(FIRST.reveal()) == "key_invalid"
    made = RedisKeys(redis.url, "ryzanstein:")
    made.add(record(FIRST))
    await until(lambda: router.outcome(FIRST.reveal()) == "key")
    made.close()


@pytest.mark.parametrize(
    ("place", "name", "text", "told"),
    [
        ("keys", SECOND.key_id, "{", "is not what commands write"),
        ("keys", SECOND.key_id, '{"id": 3}', "tenant: is missing"),
        ("keys", SECOND.key_id, "[]", "is not what commands write"),
        ("keys", SECOND.key_id, f'["{SECOND.secret}"]', "is not what commands write"),
        ("tenants", "acme", '{"burst": 0}', "burst: must be"),
        ("tenants", "acme", "3", "must be a table"),
        ("revoked", SECOND.key_id, '"now"', "must be a time"),
    ],
    ids=range(7),
)
async def test_what_is_no_key_leaves_the_last_good_ones(
    open_router: Open, keys: Any, redis: Any, until: Until, *, place: str, name: str, text: str, told: str
) -> None:
    router = await open_router()
    client = Redis.from_url(redis.url)
    client.hset(f"ryzanstein:access:{place}", name, text)
    client.incr("ryzanstein:access:version")
    await until(lambda: router.value("keys_reloads_total", source="redis", outcome="failed") == 1)
    assert router.outcome(FIRST.reveal()) == "key"
    with pytest.raises(KeysRedisError, match=told) as error:
        keys.read()
    assert SECOND.secret not in str(error.value)
    client.hdel(f"ryzanstein:access:{place}", name)
    client.incr("ryzanstein:access:version")
    await until(lambda: router.value("keys_age_seconds", source="redis") < 0.02)
    client.close()


async def test_a_canary_is_in_no_copy_log_or_error(
    open_router: Open, redis: Any, *, tmp_path: Path, command: Callable[..., str], until: Until, capfd: Any
) -> None:
    """The secret of a key and Redis' password, through a load, an outage and a start from the copy."""
    made = command("add", "acme", "--redis-url", redis.url).strip()
    router = await open_router()
    assert router.outcome(made) == "key"
    assert router.outcome(made[:-1]) == "key_invalid"
    await redis.kill()
    await until(lambda: router.value("keys_reloads_total", source="redis", outcome="failed") == 1)
    again = await open_router()
    assert again.outcome(made) == "key"
    out, err = capfd.readouterr()
    assert "keys loaded" in out
    assert "keys cannot be read" in out
    files = contents(tmp_path)
    assert tmp_path / "one" / "keys-of-redis.toml" in files
    for secret in (made[15:58], PASSWORD):
        assert secret not in out + err
        assert [path for path, content in files.items() if secret.encode() in content] == []
        assert secret not in repr(router.opened) + repr(again.telemetry.registry.collect)


def contents(folder: Path) -> dict[Path, bytes]:
    return {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def test_a_url_that_is_none_is_not_repeated() -> None:
    with pytest.raises(KeysRedisError) as error:
        RedisKeys(f"redis://:{PASSWORD}/x@127.0.0.1:6379/0", "")
    assert PASSWORD not in str(error.value)


def test_keys_in_redis_need_its_address_and_no_file() -> None:
    with pytest.raises(ValueError, match="keys_redis requires redis_url"):
        RouterSettings(keys_redis=True)
    with pytest.raises(ValueError, match="cannot both be given"):
        RouterSettings(keys_redis=True, keys_file=Path("a"), redis_url="redis://127.0.0.1")  # type: ignore[arg-type]
