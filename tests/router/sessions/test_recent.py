"""What is remembered of sessions is bounded, and what the store does not have yet is not forgotten."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ryzanstein.generation.prompts import Message, Role
from ryzanstein.router.sessions.resilient.recent import RecentSessions
from ryzanstein.router.sessions.store import Session


def session(session_id: str, chars: int) -> Session:
    return Session(session_id, "m", 0.0, 0.0, (Message(Role.USER, "x" * chars),))


@given(st.lists(st.tuples(st.integers(0, 9), st.integers(0, 2000)), max_size=60), st.integers(1, 5), st.integers(1000, 5000))
def test_it_never_holds_more_than_its_bounds(puts: list[tuple[int, int]], max_sessions: int, max_chars: int) -> None:
    recent = RecentSessions(max_sessions, max_chars, lambda session_id: False)
    held: dict[str, int] = {}
    for number, chars in puts:
        recent.put(str(number), session(str(number), chars))
        held[str(number)] = 256 + chars
        held = {session_id: size for session_id, size in held.items() if session_id in recent}
        assert len(recent) == len(held) <= max_sessions
        assert sum(held.values()) <= max_chars


def test_the_least_recently_used_goes_first() -> None:
    recent = RecentSessions(2, 10_000, lambda session_id: False)
    recent.put("a", session("a", 1))
    recent.put("b", None)
    recent.get("a")
    recent.put("c", session("c", 1))
    assert [name for name in "abc" if name in recent] == ["a", "c"]
    with pytest.raises(KeyError):
        recent.get("b")


def test_what_is_not_yet_stored_is_kept_whatever_the_bounds() -> None:
    pending = {"a", "b"}
    recent = RecentSessions(1, 10_000, pending.__contains__)
    for name in "abc":
        recent.put(name, session(name, 1))
    recent.forget_all()
    assert [name for name in "abc" if name in recent] == ["a", "b"]
    pending.clear()
    recent.forget_all()
    assert len(recent) == 0
