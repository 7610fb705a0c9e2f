"""The table of operators' acts in the orchestrator's database. All of it runs in the store's thread."""

from __future__ import annotations

import json
import sqlite3
from dataclasses import dataclass
from typing import Any

from ryzanstein.auth.audit.audit_record import AuditRecord, Facts, clipped_facts

MOST_ROWS = 100_000

AUDIT_SCHEMA = """
CREATE TABLE IF NOT EXISTS audit (
    number INTEGER PRIMARY KEY AUTOINCREMENT, id TEXT NOT NULL UNIQUE, time REAL NOT NULL, actor TEXT NOT NULL,
    via TEXT NOT NULL, method TEXT NOT NULL, target TEXT NOT NULL, request_id TEXT NOT NULL, outcome TEXT NOT NULL,
    reason TEXT NOT NULL, before TEXT, after TEXT
) STRICT;
"""
_COLUMNS = "id, time, actor, via, method, target, request_id, outcome, reason, before, after"
_WRITE = f"""
INSERT INTO audit ({_COLUMNS}) VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?)
ON CONFLICT (id) DO UPDATE SET outcome = excluded.outcome, reason = excluded.reason, after = excluded.after
"""
_READ = f"""
SELECT number, {_COLUMNS} FROM audit
WHERE number < ? AND (? = '' OR method = ?) AND substr(target, 1, length(?)) = ? ORDER BY number DESC LIMIT ?
"""
_NEWEST = 2**63 - 1


@dataclass(frozen=True, slots=True)
class AuditQuery:
    """Which records: at most `size`, older than the row `before`, of a method and of targets that begin so; empty: of all."""

    size: int
    before: int = _NEWEST
    method: str = ""
    target_prefix: str = ""


@dataclass(frozen=True, slots=True)
class AuditPage:
    """Records, newest first. `next` is the row before which the next page begins; 0: there is none."""

    records: tuple[AuditRecord, ...]
    next: int = 0


def write_record(connection: sqlite3.Connection, record: AuditRecord, most_rows: int = MOST_ROWS) -> None:
    """Adds or completes a record, and deletes the oldest beyond the bound, in one transaction."""
    values = (record.id, record.time, record.actor, record.via, record.method, record.target, record.request_id)
    with connection:
        connection.execute("BEGIN IMMEDIATE")
        connection.execute(_WRITE, (*values, record.outcome, record.reason, _text(record.before), _text(record.after)))
        connection.execute("DELETE FROM audit WHERE number <= (SELECT max(number) FROM audit) - ?", (most_rows,))


def read_records(connection: sqlite3.Connection, query: AuditQuery) -> AuditPage:
    """Returns a page."""
    target = query.target_prefix
    values = (query.before, query.method, query.method, target, target, query.size + 1)
    rows = connection.execute(_READ, values).fetchall()
    records = tuple(map(_record, rows[: query.size]))
    return AuditPage(records, rows[query.size - 1][0] if len(rows) > query.size else 0)


def _record(row: tuple[Any, ...]) -> AuditRecord:
    _, act_id, time, actor, via, method, target, request_id, outcome, reason, before, after = row
    states = _facts(before), _facts(after)
    return AuditRecord(act_id, time, actor, via, method, target, request_id, outcome, reason, *states)


def _text(facts: Facts | None) -> str | None:
    return None if facts is None else json.dumps(clipped_facts(facts))


def _facts(text: str | None) -> Facts | None:
    return None if text is None else json.loads(text)
