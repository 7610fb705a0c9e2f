"""A key is known by its form alone, and what is no key is refused before anybody looks anything up."""

from __future__ import annotations

import math
import string

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ryzanstein.auth.key_form import DIGEST_CHARS, KEY_CHARS, SECRET_BITS, SECRET_CHARS, ApiKey, has_key_form

BASE62 = string.digits + string.ascii_letters


def test_a_new_key_is_read_as_it_was_made() -> None:
    key = ApiKey.new()
    text = key.reveal()
    assert (text[:3], len(text), set(text[3:]) <= set(BASE62)) == ("rz_", KEY_CHARS, True)
    assert ApiKey.parse(text) == key
    assert (text[3:15], text[15:58]) == (key.key_id, key.secret)
    assert len(key.digest()) == DIGEST_CHARS


def test_the_characters_of_a_secret_hold_all_its_bits() -> None:
    assert math.ceil(SECRET_BITS / math.log2(62)) == SECRET_CHARS
    assert len({ApiKey.new().secret[0] for _ in range(400)}) > 5


def test_no_two_keys_are_alike() -> None:
    keys = [ApiKey.new() for _ in range(200)]
    assert len({key.key_id for key in keys}) == len({key.secret for key in keys}) == 200


def test_an_old_key_stays_valid() -> None:
    """The checksum is part of what clients hold: its computation never changes."""
    assert ApiKey("0123456789AB", "a" * 43).reveal() == "rz_0123456789ABaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaa48LBBR"


@given(st.data())
def test_one_changed_character_makes_it_no_key(data: st.DataObject) -> None:
    text = ApiKey("0123456789AB", "a" * 43).reveal()
    place = data.draw(st.integers(0, KEY_CHARS - 1))
    other = data.draw(st.sampled_from(BASE62 + "_-é\0\n").filter(lambda each: each != text[place]))
    assert ApiKey.parse(text[:place] + other + text[place + 1 :]) is None


@given(st.one_of(st.text(), st.from_regex(r"rz_[0-9A-Za-z]{55,67}\Z"), st.text(st.sampled_from(BASE62), max_size=80)))
def test_no_other_text_is_a_key(text: str) -> None:
    assert ApiKey.parse(text) is None


@pytest.mark.parametrize("text", ["", "rz_", "rz_" + "0" * 60, "rz_" + "0" * 62, " ", "sk-" + "0" * 61, "RZ_" + "0" * 61])
def test_another_length_or_prefix_is_no_key(text: str) -> None:
    assert ApiKey.parse(text) is None


def test_a_line_end_after_a_key_is_none_of_it() -> None:
    assert ApiKey.parse(ApiKey.new().reveal() + "\n") is None
    assert ApiKey.parse(ApiKey.new().reveal()[:-1] + "\n") is None


def test_the_secret_is_not_shown() -> None:
    key = ApiKey.new()
    assert key.secret not in f"{key!r} {key}"
    assert has_key_form(key.reveal())
    assert not has_key_form("eyJ.eyJ.c2ln")
