"""The table of changes next to the session file: what it lets a router trust, and what it does not."""

from __future__ import annotations

import itertools
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ryzanstein.router.sessions.resilient.recent import RecentSessions
from ryzanstein.router.sessions.store import Session
from ryzanstein.router.sessions.stores import sqlite_changes
from ryzanstein.router.sessions.stores.sqlite_changes import SqliteChanges

# Sessions that share one place of the table, and one of another place.
_SAME = list(
    itertools.islice((f"s{i}" for i in itertools.count() if sqlite_changes._place(f"s{i}") == sqlite_changes._place("s0")), 6)
)
_ELSEWHERE = "s1"


@pytest.fixture
def routers(tmp_path: Path) -> Iterator[tuple[SqliteChanges, SqliteChanges]]:
    tables = SqliteChanges(tmp_path / "changes"), SqliteChanges(tmp_path / "changes")
    yield tables
    for table in tables:
        table.close()


def change(table: SqliteChanges, *session_ids: str) -> None:
    for session_id in session_ids:
        with table.changing(session_id):
            pass


def test_a_change_by_another_router_is_not_hidden_by_ours_of_another_session(
    routers: tuple[SqliteChanges, SqliteChanges],
) -> None:
    ours, theirs = routers
    changed, shares_its_place = _SAME[:2]
    recent = RecentSessions(10, 10_000, lambda session_id: False, ours)
    change(ours, changed)
    recent.put(changed, Session(changed, "m", 0.0, 0.0))
    assert changed in recent
    change(theirs, changed)
    assert changed not in recent
    change(ours, shares_its_place)
    assert changed not in recent
    assert ours.is_ours(shares_its_place)


def test_our_own_changes_of_another_session_make_nothing_of_ours_untrusted(
    routers: tuple[SqliteChanges, SqliteChanges],
) -> None:
    ours, theirs = routers
    kept = _SAME[:4]
    change(ours, *kept, _ELSEWHERE, *reversed(kept))
    assert all(ours.is_ours(session_id) for session_id in [*kept, _ELSEWHERE])
    change(theirs, _SAME[4])
    assert not any(ours.is_ours(session_id) for session_id in kept), "any of them may be what changed"
    assert ours.is_ours(_ELSEWHERE)


def test_what_is_kept_of_a_place_is_bounded_and_the_last_changed(routers: tuple[SqliteChanges, SqliteChanges]) -> None:
    ours, _ = routers
    change(ours, *_SAME)
    assert [session_id for session_id in _SAME if ours.is_ours(session_id)] == _SAME[-4:]


def test_a_change_inside_another_router_s_change_is_trusted_by_neither(
    routers: tuple[SqliteChanges, SqliteChanges],
) -> None:
    """The other router's transaction may have come last."""
    ours, theirs = routers
    with theirs.changing(_SAME[0]):
        change(ours, _SAME[0])
    assert not ours.is_ours(_SAME[0])
    assert not theirs.is_ours(_SAME[0])


@given(st.lists(st.tuples(st.integers(0, 1), st.sampled_from([*_SAME, _ELSEWHERE])), max_size=30))
def test_what_is_ours_was_last_changed_by_us(changes: list[tuple[int, str]]) -> None:
    last: dict[str, int] = {}
    with tempfile.TemporaryDirectory() as directory:
        tables = [SqliteChanges(Path(directory) / "changes") for _ in range(2)]
        for number, session_id in changes:
            change(tables[number], session_id)
            last[session_id] = number
            assert tables[number].is_ours(session_id)
            for owner, table in enumerate(tables):
                assert all(last.get(one) == owner for one in [*_SAME, _ELSEWHERE] if table.is_ours(one))
        for table in tables:
            table.close()
