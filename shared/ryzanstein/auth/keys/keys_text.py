"""The text of a keys file: TOML with `[tenant.NAME]`, `[[key]]` and `[[revoked]]`, read and written.

Keys that have the form in which commands write them are read by a pattern, and the library of TOML
reads the rest, with empty lines in their place: 100,000 keys then take 2 s, a third of what they would.
"""

from __future__ import annotations

import json
import re
import tomllib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from itertools import chain
from types import MappingProxyType
from typing import Any

from ryzanstein.auth.keys.key_fields import id_fault, moment, read_record, record_fields, time_fault
from ryzanstein.auth.keys.records import MAX_KEYS, MAX_TENANTS, KeyRecord, KeySnapshot
from ryzanstein.auth.tenants import EVERY_OTHER, TenantRules, read_rules, rules_table, tenant_fault

MAX_FILE_BYTES = 64 * 2**20
_TEXT = r'"(?:[^"\\\x00-\x1f\x7f]|\\["\\])*"'
# Nothing but empty lines and comments follow until the next table: what else follows is a field of this one.
_END = r"(?=(?:[ \t]*(?:#[^\n]*)?\n)*[ \t]*(?:#[^\n]*)?(?:\[|\Z))"
_TIME = r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\dZ"
_NAMES = rf"(\[(?:{_TEXT}(?:, )?)*\])"
# What commands write, line by line, in this order.
_KEY_LINES = {
    "id": r'"(\w{12})"',
    "tenant": f"({_TEXT})",
    "scopes": r'(\[[a-z_", ]*\])',
    "models": _NAMES,
    "max_priority": r"(-?[1-9]\d?|0)",
    "created": f"({_TIME})",
    "expires": f"({_TIME})",
    "note": f"({_TEXT})",
    "digest": r'"([0-9a-f]{64})"',
}
_REVOKED_LINES = {"at": f"({_TIME})", "id": r'"(\w{12})"'}
_MAY_BE_MISSING = frozenset({"models", "max_priority", "created", "expires", "note"})


def _pattern(header: str, lines: Mapping[str, str]) -> re.Pattern[str]:
    body = (f"(?:{name} = {value}\n)?" if name in _MAY_BE_MISSING else f"{name} = {value}\n" for name, value in lines.items())
    return re.compile(f"^{re.escape(header)}\n{''.join(body)}{_END}", re.MULTILINE | re.ASCII)


_KEY, _REVOKED = _pattern("[[key]]", _KEY_LINES), _pattern("[[revoked]]", _REVOKED_LINES)
_WRITTEN = {
    header: {name: re.compile(f"{name} = {value}", re.ASCII) for name, value in lines.items()}
    for header, lines in (("[[key]]", _KEY_LINES), ("[[revoked]]", _REVOKED_LINES))
}
_HEADER = re.compile(r"^[ \t]*\[\[[ \t]*(key|revoked)[ \t]*\]\]", re.MULTILINE)


class KeysTextError(ValueError):
    """A keys file cannot be read. The message has the line, and neither a secret nor a digest."""


@dataclass(frozen=True, slots=True)
class KeysText:
    """What a keys file says. `whole_bytes` is where it ends, without a table that was written in part."""

    snapshot: KeySnapshot
    whole_bytes: int


def read_keys(data: bytes) -> KeysText:
    """Reads a keys file. Raises KeysTextError.

    A last table that a command wrote in part, before the machine or the command died, is left out: no
    one has that key.
    """
    if len(data) > MAX_FILE_BYTES:
        raise KeysTextError(f"has {len(data)} bytes; at most {MAX_FILE_BYTES} are read")
    try:
        return KeysText(_snapshot(data), len(data))
    except KeysTextError:
        whole = _torn_at(data)
        if whole is None:
            raise
        return KeysText(_snapshot(data[:whole]), whole)


def read_appended(known: KeysText, added: bytes) -> KeysText | None:
    """Reads what was appended to a file that is known, as commands do; None if the whole file must be read.

    That is so where the end does not begin with a table, and for all that is wrong with it: the error
    then has the right line.
    """
    if not added.startswith(b"[") and not added.startswith(b"\n["):
        return None
    try:
        more = read_keys(added)
    except KeysTextError:
        return None
    old, new = known.snapshot, more.snapshot
    if not new.keys.keys().isdisjoint(old.keys) or not new.tenants.keys().isdisjoint(old.tenants):
        return None
    try:
        snapshot = snapshot_of(
            chain(old.keys.values(), new.keys.values()), {**old.tenants, **new.tenants}, {**old.revoked, **new.revoked}
        )
    except ValueError:
        return None
    return KeysText(snapshot, known.whole_bytes + more.whole_bytes)


def key_text(record: KeyRecord) -> str:
    """Returns the table of a key."""
    return _table("[[key]]", record_fields(record))


def revoked_text(key_id: str, at: float) -> str:
    """Returns the table that revokes a key. The id is last: without it the table means nothing."""
    return _table("[[revoked]]", {"at": moment(at), "id": key_id})


def keys_text(snapshot: KeySnapshot) -> Iterator[str]:
    """Yields the pieces of a keys file that says all this."""
    for name, rules in snapshot.tenants.items():
        yield _table(f"[tenant.{_value(name)}]", rules_table(rules))
    yield from map(key_text, snapshot.keys.values())
    for key_id, at in snapshot.revoked.items():
        yield revoked_text(key_id, at)


def snapshot_of(keys: Iterable[KeyRecord], tenants: Mapping[str, TenantRules], revoked: Mapping[str, float]) -> KeySnapshot:
    """Returns these keys and tenants. Raises ValueError for an id that two keys have, and above the bounds."""
    by_id: dict[str, KeyRecord] = {}
    for record in keys:
        if record.key_id in by_id:
            raise ValueError(f"two keys have the id {record.key_id}")
        by_id[record.key_id] = record
    if len(by_id) > MAX_KEYS or len(revoked) > MAX_KEYS:
        raise ValueError(f"has {len(by_id)} keys, {len(revoked)} revoked; at most {MAX_KEYS} of each are read")
    if len(tenants) > MAX_TENANTS:
        raise ValueError(f"has {len(tenants)} tenants; at most {MAX_TENANTS} are read")
    return KeySnapshot(MappingProxyType(by_id), MappingProxyType(dict(tenants)), MappingProxyType(dict(revoked)))


def named_rules(name: str, table: object) -> TenantRules:
    """Returns the rules of a tenant. Raises ValueError."""
    if fault := (tenant_fault(name) if name != EVERY_OTHER else ""):
        raise ValueError(f"the name {fault}")
    if not isinstance(table, dict):
        raise ValueError("must be a table")
    return read_rules(table)


def _snapshot(data: bytes) -> KeySnapshot:
    try:
        text = data.decode()
    except UnicodeDecodeError as error:
        raise KeysTextError(f"line {_line(data, error.start)}: is not UTF-8") from None
    keys: list[KeyRecord] = []
    revoked: dict[str, float] = {}
    rest = text
    if '"""' not in text and "'''" not in text:  # what looks like a table may be in the middle of a text
        keys, rest = _written_keys(text)
        revoked, rest = _written_revocations(rest)
    table = _parsed(rest)
    if unknown := sorted(set(table) - {"tenant", "key", "revoked"}):
        raise KeysTextError(f"no such table: {unknown[0][:64]!r}; tables are [tenant.NAME], [[key]] and [[revoked]]")
    keys += _each(table, "key", rest, read_record)
    revoked |= dict(_each(table, "revoked", rest, _read_revoked))
    try:
        return snapshot_of(keys, _tenants(table.get("tenant", {}), rest), revoked)
    except KeysTextError:
        raise
    except ValueError as error:
        raise KeysTextError(str(error)) from None


def _written_keys(text: str) -> tuple[list[KeyRecord], str]:
    """Returns the keys that have the form in which they are written, and the text without them."""
    keys = []
    for match in _KEY.finditer(text):
        key_id, tenant, scopes, models, priority, created, expires, note, digest = match.groups()
        fields = {"id": key_id, "tenant": json.loads(tenant), "digest": digest}
        try:
            fields["scopes"] = json.loads(scopes)
            fields |= {"models": json.loads(models)} if models is not None else {}
            fields |= {"max_priority": int(priority)} if priority is not None else {}
            fields |= {"created": datetime.fromisoformat(created)} if created is not None else {}
            fields |= {"expires": datetime.fromisoformat(expires)} if expires is not None else {}
            fields |= {"note": json.loads(note)} if note is not None else {}
            keys.append(read_record(fields))
        except ValueError as error:
            raise KeysTextError(f"line {_line(text, match.start())}: [[key]] {key_id}: {error}") from None
    return keys, _KEY.sub(_blank, text) if keys else text


def _written_revocations(text: str) -> tuple[dict[str, float], str]:
    revoked = {}
    for match in _REVOKED.finditer(text):
        try:
            revoked[match[2]] = datetime.fromisoformat(match[1]).timestamp()
        except ValueError as error:
            raise KeysTextError(f"line {_line(text, match.start())}: [[revoked]] {match[2]}: {error}") from None
    return revoked, _REVOKED.sub(_blank, text) if revoked else text


def _blank(match: re.Match[str]) -> str:
    return "\n" * match[0].count("\n")


def _parsed(text: str) -> dict[str, Any]:
    try:
        return tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise KeysTextError(str(error)) from None
    except (ValueError, RecursionError) as error:
        raise KeysTextError(f"is not TOML: {type(error).__name__}") from None


def _each(table: Mapping[str, Any], kind: str, text: str, read: Any) -> list[Any]:
    """Returns the tables of an array, read. Raises KeysTextError, which names the line of the one that is wrong."""
    entries = table.get(kind, [])
    if not isinstance(entries, list) or not all(isinstance(each, dict) for each in entries):
        raise KeysTextError(f"{kind} must be tables, [[{kind}]]")
    found = []
    for number, entry in enumerate(entries):
        try:
            found.append(read(entry))
        except ValueError as error:
            lines = [_line(text, match.start()) for match in _HEADER.finditer(text) if match[1] == kind]
            where = f"line {lines[number]}: " if number < len(lines) else ""
            shown = f" {entry['id']}" if not id_fault(entry.get("id")) else ""
            raise KeysTextError(f"{where}[[{kind}]]{shown}: {error}") from None
    return found


def _read_revoked(fields: Mapping[str, Any]) -> tuple[str, float]:
    if unknown := sorted(set(fields) - {"id", "at"}):
        raise ValueError(f"no such field: {unknown[0][:64]!r}; fields are id, at")
    if fault := id_fault(fields.get("id")):
        raise ValueError(f"id: {fault}")
    if "at" in fields and (fault := time_fault(fields["at"])):
        raise ValueError(f"at: {fault}")
    return fields["id"], fields["at"].timestamp() if "at" in fields else 0.0


def _tenants(tables: object, text: str) -> dict[str, TenantRules]:
    if not isinstance(tables, dict):
        raise KeysTextError("tenant must be tables, [tenant.NAME]")
    rules = {}
    for name, table in tables.items():
        try:
            rules[name] = named_rules(name, table)
        except ValueError as error:
            raise KeysTextError(f"{_line_of_tenant(text, name)}[tenant.{name[:128]}]: {error}") from None
    return rules


def _line_of_tenant(text: str, name: str) -> str:
    header = re.compile(rf"""^[ \t]*\[[ \t]*tenant[ \t]*\.[ \t]*["']?{re.escape(name)}["']?[ \t]*\]""", re.MULTILINE)
    match = header.search(text)
    return "" if match is None else f"line {_line(text, match.start())}: "


def _line(text: str | bytes, place: int) -> int:
    """Returns the number of the line with this place."""
    return 1 + (text.count("\n", 0, place) if isinstance(text, str) else text.count(b"\n", 0, place))


def _torn_at(data: bytes) -> int | None:
    """Returns where a last table begins that a command wrote in part; None if it did not."""
    written = data.rstrip(b"\0")  # a file may be longer than what reached the disk
    for start in (written.rfind(b"\n") + 1, written.rfind(b"\n[[") + 1):
        if start < len(written) and _is_part(written[start:].decode(errors="replace")):
            return start
    return len(written) if len(written) < len(data) else None


def _is_part(table: str) -> bool:
    """Whether a table has the first lines that a command writes, the last one perhaps in part, and not all of them."""
    header, *lines = table.split("\n")
    if not lines:
        return any(each.startswith(header) for each in _WRITTEN)
    forms = _WRITTEN.get(header, {})
    left = list(forms)
    for line in lines[:-1]:
        name = line.partition(" = ")[0]
        if name not in left or not forms[name].fullmatch(line):
            return False
        left = left[left.index(name) + 1 :]
    return any(f"{name} = ".startswith(lines[-1]) or lines[-1].startswith(f"{name} = ") for name in left)


def _table(header: str, fields: Mapping[str, Any]) -> str:
    return "\n".join((header, *(f"{name} = {_value(value)}" for name, value in fields.items()), ""))


def _value(value: object) -> str:
    if isinstance(value, datetime):
        return value.strftime("%Y-%m-%dT%H:%M:%SZ")
    if isinstance(value, Sequence) and not isinstance(value, str):
        return f"[{', '.join(map(_value, value))}]"
    # A text without control characters is the same in JSON and in TOML.
    return json.dumps(value, ensure_ascii=False)
