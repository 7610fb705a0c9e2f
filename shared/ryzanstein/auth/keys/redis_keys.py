"""Keys in Redis, for routers on several hosts: hashes of keys, tenants and revoked ids, and a version.

Every change counts the version up, so that a router which reads it knows whether to read the rest, and
a list has the ids that the last changes were of. The version begins with a random name: a server that
lost its data and got other keys has another one. Each call may wait for the server; none is made by a
coroutine.
"""

from __future__ import annotations

import json
import secrets
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from datetime import datetime
from typing import Any, TypeVar

from redis import Redis
from redis.backoff import NoBackoff
from redis.exceptions import RedisError
from redis.retry import Retry

from ryzanstein.auth.keys.key_fields import check_new, read_record, record_fields
from ryzanstein.auth.keys.keys_file import KeyExistsError, NoSuchKeyError
from ryzanstein.auth.keys.keys_text import named_rules, snapshot_of
from ryzanstein.auth.keys.records import MAX_KEYS, KeyRecord, KeySnapshot
from ryzanstein.auth.tenants import TenantRules, rules_table

_TIMEOUT_S = 2.0
_TIMES = ("created", "expires")
_MOST_CHANGES = 1000
# KEYS: version, list of changes. ARGV: what changed, how many changes are kept
_COUNT = """
local version = redis.call('INCR', KEYS[1])
redis.call('LPUSH', KEYS[2], version .. ' ' .. ARGV[1])
redis.call('LTRIM', KEYS[2], 0, ARGV[2] - 1)
"""
_EVERYTHING = "*"
"""The id of a change that is not of one key."""
_T = TypeVar("_T")


class KeysRedisError(Exception):
    """Redis does not answer, or has what are no keys. The message has neither a secret nor a digest."""


class RedisKeys:
    """The keys of a server. Raises KeysRedisError wherever they cannot be read or written."""

    def __init__(self, url: str, prefix: str) -> None:
        try:
            self._client = Redis.from_url(
                url,
                decode_responses=True,
                socket_timeout=_TIMEOUT_S,
                socket_connect_timeout=_TIMEOUT_S,
                retry=Retry(NoBackoff(), 1),  # a connection that died while idle
            )
        except ValueError:
            # Its text may have a part of the password.
            raise KeysRedisError("must be redis://, rediss:// or unix://, then [user:password@]host[:port]") from None
        self._keys, self._tenants, self._revoked = (f"{prefix}access:{each}" for each in ("keys", "tenants", "revoked"))
        self._origin, self._version = f"{prefix}access:origin", f"{prefix}access:version"
        self._changes = f"{prefix}access:changes"

    def version(self) -> str:
        """Returns what changes with every change; empty: nothing was ever written."""
        with _failures():
            return _joined(self._client.mget(self._origin, self._version))

    def read(self) -> KeySnapshot:
        """Returns all keys and tenants, as they were at one moment."""
        return self.read_version()[1]

    def read_version(self) -> tuple[str, KeySnapshot]:
        """Returns all keys and tenants, and their version."""
        with _failures():
            pipeline = self._client.pipeline(transaction=True)
            pipeline.mget(self._origin, self._version)
            for name in (self._keys, self._tenants, self._revoked):
                pipeline.hgetall(name)
            version, keys, tenants, revoked = pipeline.execute()
        records = [_read(self._keys, key_id, text, _record) for key_id, text in keys.items()]
        rules = {name: _read(self._tenants, name, text, _rules) for name, text in tenants.items()}
        times = {key_id: _read(self._revoked, key_id, text, _time) for key_id, text in revoked.items()}
        return _joined(version), _snapshot(records, rules, times)

    def read_changed(self, known: str, snapshot: KeySnapshot) -> tuple[str, KeySnapshot]:
        """Returns what `read_version` does. If few keys changed since a known version, only these are read."""
        with _failures():
            pipeline = self._client.pipeline(transaction=True)
            pipeline.mget(self._origin, self._version)
            pipeline.lrange(self._changes, 0, _MOST_CHANGES - 1)
            version, changes = pipeline.execute()
        changed = _changed(known, _joined(version), changes)
        if changed is None:
            return self.read_version()
        with _failures():
            pipeline = self._client.pipeline(transaction=True)
            pipeline.hmget(self._keys, changed)
            pipeline.hmget(self._revoked, changed)
            keys, times = pipeline.execute()
        records, revoked = dict(snapshot.keys), dict(snapshot.revoked)
        for key_id, text, at in zip(changed, keys, times, strict=True):
            if text is None:
                records.pop(key_id, None)
            else:
                records[key_id] = _read(self._keys, key_id, text, _record)
            if at is not None:
                revoked[key_id] = _read(self._revoked, key_id, at, _time)
        return _joined(version), _snapshot(records.values(), snapshot.tenants, revoked)

    def add(self, record: KeyRecord) -> None:
        """Adds a key. Raises KeyExistsError, or ValueError for what could not be read again."""
        check_new(record)
        text = _text(record_fields(record))
        with _failures():
            if int(self._client.hlen(self._keys)) >= MAX_KEYS:
                raise KeysRedisError(f"Redis has {MAX_KEYS} keys, which is the most: remove old ones")
            pipeline = self._changing(record.key_id)
            pipeline.hsetnx(self._keys, record.key_id, text)
            *_, added = pipeline.execute()
            # A command that was sent twice, because its answer was lost, finds what it wrote itself.
            if not added and self._client.hget(self._keys, record.key_id) != text:
                raise KeyExistsError(record.key_id)

    def revoke(self, key_id: str, at: float) -> bool:
        """Revokes a key. Returns False if it was already. Raises NoSuchKeyError."""
        with _failures():
            if not self._client.hexists(self._keys, key_id):
                raise NoSuchKeyError(key_id)
            pipeline = self._changing(key_id)
            pipeline.hsetnx(self._revoked, key_id, str(int(at)))
            *_, revoked = pipeline.execute()
        return bool(revoked)

    def take(self, snapshot: KeySnapshot) -> None:
        """Writes all of a keys file: keys and revoked ids are added, tenants are then those of the file."""
        with _failures():
            pipeline = self._changing(_EVERYTHING)
            pipeline.delete(self._tenants)
            for name, rules in snapshot.tenants.items():
                pipeline.hset(self._tenants, name, _text(rules_table(rules)))
            for key_id, record in snapshot.keys.items():
                pipeline.hset(self._keys, key_id, _text(record_fields(record)))
            for key_id, at in snapshot.revoked.items():
                pipeline.hsetnx(self._revoked, key_id, str(int(at)))
            pipeline.execute()

    def close(self) -> None:
        self._client.close()

    def _changing(self, key_id: str) -> Any:
        """Returns a transaction that counts the version up, for a change of this key."""
        pipeline = self._client.pipeline(transaction=True)
        pipeline.set(self._origin, secrets.token_hex(8), nx=True)
        pipeline.eval(_COUNT, 2, self._version, self._changes, key_id, _MOST_CHANGES)
        return pipeline


def _snapshot(keys: Iterable[KeyRecord], tenants: Mapping[str, TenantRules], revoked: Mapping[str, float]) -> KeySnapshot:
    try:
        return snapshot_of(keys, tenants, revoked)
    except ValueError as error:
        raise KeysRedisError(f"Redis {error}") from None


def _changed(known: str, version: str, changes: list[str]) -> list[str] | None:
    """Returns the ids that changed between two versions; None if that is not known."""
    before, now = (each.rpartition("/") for each in (known, version))
    if not known or before[0] != now[0] or not (before[2].isdecimal() and now[2].isdecimal()):
        return None
    by_version = dict(each.split(" ", 1)[:2] for each in changes if " " in each)
    # Who changes something by hand counts the version up, and says nothing in the list.
    ids = [by_version.get(str(number), _EVERYTHING) for number in range(int(now[2]), int(before[2]), -1)[: _MOST_CHANGES + 1]]
    return None if not 0 < len(ids) <= _MOST_CHANGES or _EVERYTHING in ids else ids


def _joined(version: Any) -> str:
    return "/".join(each for each in version if each is not None)


def _read(place: str, name: str, text: str, read: Callable[[str, Any], _T]) -> _T:
    try:
        return read(name, json.loads(text))
    except (ValueError, TypeError, AttributeError, RecursionError) as error:
        # What is no JSON may be anything, also a secret.
        fault = str(error) if type(error) is ValueError else "is not what commands write"
        raise KeysRedisError(f"Redis {place} {name[:64]!r}: {fault}") from None


def _record(key_id: str, fields: Mapping[str, Any]) -> KeyRecord:
    record = read_record({name: datetime.fromisoformat(value) if name in _TIMES else value for name, value in fields.items()})
    if record.key_id != key_id:
        raise ValueError("id: is another one")
    return record


def _rules(name: str, table: object) -> TenantRules:
    return named_rules(name, table)


def _time(_: str, at: object) -> float:
    if not isinstance(at, int | float):
        raise ValueError("must be a time in seconds")
    return float(at)


def _text(fields: Mapping[str, Any]) -> str:
    return json.dumps(fields, ensure_ascii=False, default=datetime.isoformat)


@contextmanager
def _failures() -> Iterator[None]:
    try:
        yield
    except (RedisError, OSError, ValueError) as error:
        raise KeysRedisError(f"Redis cannot be used: {type(error).__name__}: {error}") from None
