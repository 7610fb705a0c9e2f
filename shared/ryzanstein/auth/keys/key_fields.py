"""The fields of a kept key, the same in a keys file and in Redis: checked when read, in one order when written."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from datetime import UTC, datetime
from functools import lru_cache
from types import MappingProxyType
from typing import Any, TypeGuard

from ryzanstein.auth.caller import Scope, read_scopes
from ryzanstein.auth.key_form import DIGEST_CHARS, is_key_id
from ryzanstein.auth.keys.records import KeyRecord
from ryzanstein.auth.tenants import EVERY_OTHER, tenant_fault
from ryzanstein.generation.prompts import name_fault
from ryzanstein.generation.request import MAX_PRIORITY

MAX_MODELS = 1000
MAX_NOTE_CHARS = 256
_DIGEST = re.compile(rf"[0-9a-f]{{{DIGEST_CHARS}}}")
_NEEDED = ("id", "tenant", "scopes", "digest")


def read_record(fields: Mapping[str, Any]) -> KeyRecord:
    """Returns the key of these fields. Raises ValueError, which names the field but not the digest."""
    if unknown := sorted(set(fields) - set(_CHECKS)):
        raise ValueError(f"no such field: {unknown[0][:64]!r}; fields are {', '.join(_CHECKS)}")
    if missing := [name for name in _NEEDED if name not in fields]:
        raise ValueError(f"{missing[0]}: is missing")
    for name, value in fields.items():
        if fault := _CHECKS[name](value):
            raise ValueError(f"{name}: {fault}")
    return KeyRecord(
        fields["id"],
        fields["digest"],
        fields["tenant"],
        scopes_of(tuple(fields["scopes"])),
        frozenset(fields["models"]) if "models" in fields else None,
        fields.get("max_priority", MAX_PRIORITY),
        fields["created"].timestamp() if "created" in fields else 0.0,
        fields["expires"].timestamp() if "expires" in fields else None,
        fields.get("note", ""),
    )


def record_fields(record: KeyRecord) -> dict[str, Any]:
    """Returns the fields that `read_record` reads this key from.

    The digest is last: what is torn off at the end is then never a key with fewer restrictions.
    """
    fields: dict[str, Any] = {"id": record.key_id, "tenant": record.tenant, "scopes": sorted(record.scopes)}
    if record.models is not None:
        fields["models"] = sorted(record.models)
    if record.max_priority != MAX_PRIORITY:
        fields["max_priority"] = record.max_priority
    fields["created"] = moment(record.created)
    if record.expires is not None:
        fields["expires"] = moment(record.expires)
    if record.note:
        fields["note"] = record.note
    return fields | {"digest": record.digest}


def check_new(record: KeyRecord) -> None:
    """Raises ValueError if the key could not be read again."""
    read_record(record_fields(record))


def moment(seconds: float) -> datetime:
    """Returns a time of the Unix clock as a date, in whole seconds."""
    return datetime.fromtimestamp(int(seconds), UTC)


def time_fault(value: object) -> str:
    fits = isinstance(value, datetime) and value.tzinfo is not None
    return "" if fits else "must be a time with its zone, as 2030-01-31T12:00:00Z"


def id_fault(value: object) -> str:
    return "" if is_key_id(value) else "must be the id of a key: 12 letters and digits"


@lru_cache(maxsize=256)
def scopes_of(names: tuple[str, ...]) -> frozenset[Scope]:
    """Returns the scopes of these names. Most keys have the same, so they share one set. Raises ValueError."""
    return read_scopes(names)


def _tenant(value: object) -> str:
    return tenant_fault(value) or ("is no name of one tenant" if value == EVERY_OTHER else "")


def _scopes(value: object) -> str:
    if not _is_list_of_text(value, len(Scope)):
        return "must be a list of scopes"
    try:
        scopes_of(tuple(value))
    except ValueError as error:
        return str(error)
    return ""


def _models(value: object) -> str:
    if not _is_list_of_text(value, MAX_MODELS):
        return f"must be a list of at most {MAX_MODELS} names"
    return next((f"{fault}: {name[:64]!r}" for name in value if (fault := name_fault(name))), "")


def _is_list_of_text(value: object, most: int) -> TypeGuard[list[str]]:
    return isinstance(value, list) and len(value) <= most and all(isinstance(each, str) for each in value)


def _priority(value: object) -> str:
    fits = isinstance(value, int) and not isinstance(value, bool) and -MAX_PRIORITY <= value <= MAX_PRIORITY
    return "" if fits else f"must be a whole number in [{-MAX_PRIORITY}, {MAX_PRIORITY}]"


def _note(value: object) -> str:
    fits = isinstance(value, str) and len(value) <= MAX_NOTE_CHARS and value.isprintable()
    return "" if fits else f"must have at most {MAX_NOTE_CHARS} characters that can be printed"


def _digest(value: object) -> str:
    fits = isinstance(value, str) and _DIGEST.fullmatch(value) is not None
    return "" if fits else f"must be a SHA-256 of {DIGEST_CHARS} hexadecimal digits"


_CHECKS: Mapping[str, Callable[[object], str]] = MappingProxyType(
    {
        "id": id_fault,
        "tenant": _tenant,
        "scopes": _scopes,
        "models": _models,
        "max_priority": _priority,
        "created": time_fault,
        "expires": time_fault,
        "note": _note,
        "digest": _digest,
    }
)
