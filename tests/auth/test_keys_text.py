"""What a keys file says: read as written, refused by line, and without what was written in part."""

from __future__ import annotations

import time
from dataclasses import replace
from datetime import UTC, datetime

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ryzanstein.auth.caller import DEFAULT_SCOPES, Scope
from ryzanstein.auth.key_form import ApiKey
from ryzanstein.auth.keys import keys_text as module
from ryzanstein.auth.keys.key_fields import check_new
from ryzanstein.auth.keys.keys_text import KeysTextError, key_text, keys_text, read_appended, read_keys, revoked_text
from ryzanstein.auth.keys.records import KeyRecord, KeySnapshot
from ryzanstein.auth.tenants import TenantLimits, TenantRules

KEY = ApiKey("0123456789AB", "a" * 43)
RECORD = KeyRecord(KEY.key_id, KEY.digest(), "acme", DEFAULT_SCOPES, created=1.7e9)
BY_HAND = f"""
# The one that all tests have.
[tenant.acme]
requests_per_second = 2.5   # and no more
burst = 10
tokens_per_month = 1_000_000
hard = true
cache = "group:all"
priority = 3

[tenant."a.b"]
sessions = 5

[[key]]
tenant = 'acme'
id = "{KEY.key_id}"
digest = "{KEY.digest()}"
scopes = [
  "infer",
  "act_as",
]
expires = 2030-01-01T00:00:00+01:00
"""


def snapshot(text: str) -> KeySnapshot:
    return read_keys(text.encode()).snapshot


def refused(text: str) -> str:
    with pytest.raises(KeysTextError) as error:
        snapshot(text)
    return str(error.value)


def test_a_file_written_by_hand_is_read() -> None:
    read = snapshot(BY_HAND)
    limits = TenantLimits(requests_per_second=2.5, burst=10, tokens_per_month=1_000_000, hard_month=True)
    assert dict(read.tenants) == {
        "acme": TenantRules(limits, "all", 3),
        "a.b": TenantRules(TenantLimits(sessions=5)),
    }
    expires = datetime(2029, 12, 31, 23, tzinfo=UTC).timestamp()
    scopes = frozenset({Scope.INFER, Scope.ACT_AS})
    assert dict(read.keys) == {KEY.key_id: replace(RECORD, scopes=scopes, created=0.0, expires=expires)}


names = st.text(st.characters(min_codepoint=0x21, max_codepoint=0x7E), min_size=1, max_size=12).filter(lambda name: name != "*")
printable = st.text(max_size=12).filter(str.isprintable)
records = st.builds(
    KeyRecord,
    st.from_regex(r"\A[0-9A-Za-z]{12}\Z"),
    st.from_regex(r"\A[0-9a-f]{64}\Z"),
    names,
    st.frozensets(st.sampled_from(Scope)),
    st.none() | st.frozensets(printable.filter(bool), max_size=3),
    st.integers(-10, 10),
    st.integers(0, 2**32).map(float),
    st.none() | st.integers(0, 2**32).map(float),
    printable,
)
limits = st.builds(
    TenantLimits,
    requests_per_second=st.floats(0.001, 1e6),
    burst=st.none() | st.integers(1, 1000),
    tokens_per_month=st.integers(1, 2**53),
    hard_month=st.booleans(),
    sessions=st.none() | st.integers(1, 100),
)
rules = st.builds(TenantRules, limits, st.just("") | names, st.integers(-10, 10))


@settings(max_examples=60)
@given(
    st.lists(records, max_size=5, unique_by=lambda record: record.key_id),
    st.dictionaries(names | st.just("*"), rules, max_size=3),
    st.dictionaries(st.from_regex(r"\A[0-9A-Za-z]{12}\Z"), st.integers(0, 2**32).map(float), max_size=3),
)
def test_what_is_written_is_read(keys: list[KeyRecord], tenants: dict[str, TenantRules], revoked: dict[str, float]) -> None:
    given = KeySnapshot({key.key_id: key for key in keys}, tenants, revoked)
    text = "".join(keys_text(given))
    read = snapshot(text)
    assert (dict(read.keys), dict(read.tenants), dict(read.revoked)) == (given.keys, given.tenants, given.revoked)
    # The library alone reads the same.
    assert snapshot(f"{text}# '''\n") == read


@settings(max_examples=60)
@given(st.lists(records, min_size=1, max_size=3, unique_by=lambda record: record.key_id), st.booleans(), st.data())
def test_what_was_torn_off_is_never_a_key_with_fewer_restrictions(
    keys: list[KeyRecord], revokes: bool, data: st.DataObject
) -> None:
    """Wherever the last table is cut, the rest of the file is read and nothing of the table."""
    before = "".join(map(key_text, keys[:-1])).encode()
    last = (revoked_text(keys[-1].key_id, 1.0) if revokes else key_text(keys[-1])).encode()
    cut = data.draw(st.integers(1, len(last) - 1))
    padding = b"\0" * data.draw(st.integers(0, 3))
    if cut == len(last) - 1 and not padding:  # only the line's end is missing: all is there
        padding = b"\0"
    read = read_keys(before + last[:cut] + padding)
    if cut < len(last) - 1:
        assert read.whole_bytes == len(before)
        assert (len(read.snapshot.keys), len(read.snapshot.revoked)) == (len(keys) - 1, 0)


def test_a_field_added_below_a_written_key_is_a_field_of_that_key() -> None:
    read = snapshot(f"[tenant.acme]\n{key_text(RECORD)}\n# by hand\nexpires = 2030-01-01T00:00:00Z\n")
    assert read.keys[KEY.key_id].expires == datetime(2030, 1, 1, tzinfo=UTC).timestamp()
    assert dict(read.tenants) == {"acme": TenantRules()}


def test_what_looks_like_a_key_within_a_text_is_none() -> None:
    assert "note" in refused(f"{BY_HAND}\nnote = '''\n{key_text(replace(RECORD, key_id='B' * 12))}'''\n")


@pytest.mark.parametrize(
    ("text", "told"),
    [
        (BY_HAND + "colour = 3\n", ("line 14: [[key]] 0123456789AB", "'colour'", "fields are id")),
        (BY_HAND.replace("burst", "bursts"), ("line 3: [tenant.acme]", "'bursts'")),
        (BY_HAND.replace("burst = 10", "burst = -1"), ("line 3: [tenant.acme]: burst: must be a whole number in [1, ",)),
        (BY_HAND.replace("burst = 10", "burst = true"), ("burst: must be a whole number",)),
        (BY_HAND.replace("2.5", "nan"), ("requests_per_second: must be a number above 0",)),
        (BY_HAND.replace("2.5", "0"), ("requests_per_second: must be a number above 0",)),
        (BY_HAND.replace("requests_per_second = 2.5", ""), ("burst: needs requests_per_second",)),
        (BY_HAND.replace("tokens_per_month", "tokens_per_minute"), ("hard: needs tokens_per_month",)),
        (BY_HAND.replace("group:all", "all"), ('cache: must be "tenant" or "group:NAME"',)),
        (BY_HAND.replace("priority = 3", "priority = 11"), ("priority: must be a whole number in [-10, 10]",)),
        (BY_HAND.replace('"a.b"', '"a b"'), ("line 11: [tenant.a b]: the name must have 1 to 128 visible",)),
        (BY_HAND.replace('"infer"', '"all"'), ("line 14: [[key]] 0123456789AB: scopes: no such scope: 'all'",)),
        (BY_HAND.replace('"infer"', "3"), ("scopes: must be a list of scopes",)),
        (BY_HAND.replace("+01:00", ""), ("expires: must be a time with its zone",)),
        (BY_HAND.replace(f'"{KEY.key_id}"', '"short"'), ("line 14: [[key]]: id: must be the id of a key",)),
        (BY_HAND.replace("tenant = 'acme'", "tenant = '*'"), ("tenant: is no name of one tenant",)),
        (BY_HAND.replace("tenant = 'acme'", ""), ("tenant: is missing",)),
        (BY_HAND + key_text(RECORD), ("two keys have the id 0123456789AB",)),
        (BY_HAND + "[limits]\n", ("no such table: 'limits'",)),
        (BY_HAND + "key = \n", ("at line 23",)),
        ("[key]\n", ("key must be tables, [[key]]",)),
        ("tenant = 3\n", ("tenant must be tables",)),
        ("[tenant]\nacme = 3\n", ("must be a table",)),
        ("[[revoked]]\nat = 2030-01-01T00:00:00Z\nid = 'B'\nb = 1\n", ("line 1: [[revoked]]", "'b'")),
        ("a = " + "[" * 5000, ("is not TOML",)),
        (key_text(RECORD).replace("infer", "INFER"), ("line 1: [[key]] 0123456789AB: scopes",)),
        (key_text(RECORD).replace("2023-", "2023-19-").replace("-19-11", "-19"), ("line 1",)),
    ],
)
def test_what_is_wrong_is_refused_by_line_and_field(text: str, told: tuple[str, ...]) -> None:
    message = refused(text)
    assert [part for part in told if part not in message] == []


def test_bytes_that_are_not_utf_8_are_refused_by_line() -> None:
    with pytest.raises(KeysTextError, match=r"line 2: is not UTF-8"):
        read_keys(b"# a\n# \xff\n")


def test_no_refusal_quotes_a_digest() -> None:
    for text in (BY_HAND, key_text(RECORD)):
        for wrong in (text.replace(KEY.digest(), KEY.digest()[:-1]), text.replace(f'"{KEY.digest()}"', KEY.digest())):
            assert KEY.digest()[:16] not in refused(wrong + "\n[tenant.acme]\n[tenant.acme]\n")


def test_more_than_the_bounds_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "MAX_KEYS", 2)
    monkeypatch.setattr(module, "MAX_TENANTS", 2)
    text = [key_text(replace(RECORD, key_id=letter * 12)) for letter in "ABC"]
    assert len(snapshot("".join(text[:2])).keys) == 2
    assert "has 3 keys" in refused("".join(text))
    assert "has 3 tenants" in refused("[tenant.a]\n[tenant.b]\n[tenant.c]\n")
    monkeypatch.setattr(module, "MAX_FILE_BYTES", 100)
    assert "at most 100 are read" in refused("".join(text))


def test_many_keys_are_read_in_seconds() -> None:
    """A hundredth of the most, in a hundredth of ten seconds: far above what it takes, far below what grows with a square."""
    text = "".join(key_text(replace(RECORD, key_id=f"{number:012}", models=frozenset({"demo"}))) for number in range(1000))
    began = time.process_time()
    assert len(snapshot(text).keys) == 1000
    assert time.process_time() - began < 0.5


@settings(max_examples=60)
@given(st.lists(records, min_size=1, max_size=4, unique_by=lambda record: record.key_id), st.booleans(), st.data())
def test_what_was_appended_is_read_as_if_all_was_read(keys: list[KeyRecord], twice: bool, data: st.DataObject) -> None:
    """At every cut, also within a table, and where a key is there twice."""
    texts = [*map(key_text, keys), revoked_text(keys[0].key_id, 1.0), "[tenant.acme]\nsessions = 3\n"]
    whole = "\n".join(texts + ([key_text(keys[0])] if twice else [])).encode()
    cut = data.draw(st.integers(0, len(whole)))
    try:
        known = read_keys(whole[:cut])
    except KeysTextError:
        return
    read = read_appended(known, whole[known.whole_bytes :])
    if twice:
        assert read is None
    elif read is not None:
        assert read == read_keys(whole)


def test_an_appended_key_alone_is_read(monkeypatch: pytest.MonkeyPatch) -> None:
    known = read_keys(BY_HAND.encode())
    other = key_text(replace(RECORD, key_id="B" * 12))
    read = read_appended(known, other.encode())
    assert read == read_keys((BY_HAND + other).encode())
    revoked = revoked_text(KEY.key_id, 1.0)
    assert read_appended(known, revoked.encode()) == read_keys((BY_HAND + revoked).encode())
    for whole_must_be_read in (key_text(RECORD), "note = 'a'\n", "[tenant.acme]\n", "[[key]]\ncolour = 1\n", "# a\n"):
        assert read_appended(known, whole_must_be_read.encode()) is None


def test_what_could_not_be_read_again_is_no_new_key() -> None:
    for wrong in (
        replace(RECORD, tenant="a b"),
        replace(RECORD, note="a\nb"),
        replace(RECORD, note="a" * 257),
        replace(RECORD, max_priority=11),
        replace(RECORD, models=frozenset({"a\0"})),
    ):
        with pytest.raises(ValueError, match=":"):
            check_new(wrong)
    check_new(RECORD)
