"""What counts as the same request."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ryzanstein.constraints import Constraint, ConstraintKind
from ryzanstein.errors import RyzansteinError
from ryzanstein.generation.prompts import ChatPrompt, Message, Role, TextPrompt, TokenPrompt, ToolCall
from ryzanstein.generation.request import GenerationRequest, SamplingParams
from ryzanstein.router.faces.request_key import MAX_KEY_CHARS, key_of_header, keyed

TEXTS = st.text(st.characters(codec="utf-8"), max_size=6)
CALLS = st.lists(st.builds(ToolCall, TEXTS, TEXTS, TEXTS), max_size=2).map(tuple)
MESSAGES = st.lists(
    st.builds(Message, st.sampled_from(Role), TEXTS)
    | st.builds(Message, st.sampled_from(Role), TEXTS, tool_calls=CALLS, tool_call_id=TEXTS, name=TEXTS, reasoning=TEXTS),
    max_size=4,
).map(tuple)
PROMPTS = st.one_of(
    st.builds(ChatPrompt, MESSAGES),
    st.builds(TextPrompt, TEXTS),
    st.builds(TokenPrompt, st.lists(st.integers(0, 2**32 - 1), max_size=4).map(tuple)),
)
SAMPLING = st.builds(
    SamplingParams,
    temperature=st.sampled_from([0.0, 0.7, 1.0]),
    seed=st.none() | st.integers(0, 2**64 - 1),
    max_tokens=st.none() | st.integers(1, 3),
    stop=st.lists(TEXTS, max_size=2).map(tuple),
    logit_bias=st.dictionaries(st.integers(0, 3), st.sampled_from([-100.0, 0.5, 3.0]), max_size=2).map(
        lambda bias: tuple(sorted(bias.items()))
    ),
    n=st.integers(1, 3),
    constraint=st.none() | st.builds(Constraint, st.sampled_from(ConstraintKind), TEXTS),
    bad_words=st.lists(TEXTS, max_size=1).map(tuple),
    prompt_logprobs=st.none() | st.integers(0, 2),
)
REQUESTS = st.builds(
    GenerationRequest, TEXTS, PROMPTS, SAMPLING, session_id=TEXTS, user=TEXTS, priority=st.integers(-2, 2), tenant=TEXTS
)


def key_of(request: GenerationRequest, key: str = "k") -> Any:
    return keyed(request, key, "request_id").key


@given(one=REQUESTS, other=REQUESTS)
def test_two_bodies_have_one_digest_only_when_they_are_equal(one: GenerationRequest, other: GenerationRequest) -> None:
    same = replace(one, tenant="") == replace(other, tenant="")
    assert (key_of(one).body == key_of(other).body) is same
    assert (key_of(one).name == key_of(other).name) is (one.tenant == other.tenant)


@given(request=REQUESTS)
def test_what_a_repetition_changes_does_not_count(request: GenerationRequest) -> None:
    again = replace(request, deadline=12.0, request_id="r-2", traceparent="00-a", last_node="b", key_id="id", cache_scope="t")
    assert key_of(again) == key_of(request)
    assert keyed(request, "", "request_id").key is None


def test_a_digest_is_the_same_in_every_version() -> None:
    request = GenerationRequest("m", TextPrompt("once"), SamplingParams(max_tokens=2), session_id="s", tenant="t")
    assert key_of(request).name == "d57122da92041d1edc0d6d3ae864e290"
    assert key_of(request).body.hex() == "0100f25c62d057f295b42966156eb76f"


@pytest.mark.parametrize("key", ["k" * (MAX_KEY_CHARS + 1), "ключ", "a\nb"])
def test_what_is_no_key_is_refused_with_its_field_and_bound(key: str) -> None:
    with pytest.raises(RyzansteinError) as refusal:
        key_of(GenerationRequest("m", TextPrompt("x"), SamplingParams()), key)
    assert refusal.value.violations[0].field == "request_id"
    assert str(MAX_KEY_CHARS) in refusal.value.violations[0].description


@pytest.mark.parametrize(
    ("value", "key"),
    [(None, ""), ("abc", "abc"), ('"abc"', "abc"), (' "a\\"b" ', 'a"b'), ('"a\\\\b"', "a\\b"), ("a-b_c/1=", "a-b_c/1=")],
)
def test_a_header_is_quoted_or_bare(value: str | None, key: str) -> None:
    assert key_of_header(value) == key


@pytest.mark.parametrize("value", ["", "  ", '""', '"abc', 'a"b', '"abc";x=1'])
def test_a_torn_header_is_refused(value: str) -> None:
    with pytest.raises(RyzansteinError) as refusal:
        key_of_header(value)
    assert refusal.value.violations[0].field == "Idempotency-Key"
