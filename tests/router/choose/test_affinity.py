"""What a request wants to stay near."""

from __future__ import annotations

from dataclasses import replace

import pytest

from ryzanstein.generation.prompts import ChatPrompt, Message, Role, TextPrompt, TokenPrompt
from ryzanstein.generation.request import AdapterRef, GenerationRequest, SamplingParams
from ryzanstein.router.choose import affinity, beginning


def request(*messages: tuple[Role, str]) -> GenerationRequest:
    return GenerationRequest("m", ChatPrompt(tuple(Message(role, text) for role, text in messages)), SamplingParams())


SYSTEM, USER, ASSISTANT = Role.SYSTEM, Role.USER, Role.ASSISTANT


def test_a_session_counts_more_than_a_user_and_a_user_more_than_the_text() -> None:
    plain = request((USER, "hi"))
    user = replace(plain, user="u")
    session = replace(user, session_id="s")
    assert affinity(session).key == b"session:s"
    assert affinity(user).key == b"user:u"
    assert affinity(session).sticky
    assert affinity(user).sticky
    assert not affinity(plain).sticky


def test_a_session_and_a_user_of_one_name_are_different_keys() -> None:
    plain = request((USER, "hi"))
    assert affinity(replace(plain, user="x")).key != affinity(replace(plain, session_id="x")).key


@pytest.mark.parametrize("kind", [{}, {"user": "u"}, {"session_id": "s"}])
def test_what_a_request_stays_near_is_within_its_cache_scope(kind: dict[str, str]) -> None:
    plain = replace(request((SYSTEM, "be brief"), (USER, "hi")), **kind)
    scoped = [replace(plain, cache_scope=scope) for scope in ("a", "b", "group:a")]
    assert len({affinity(each).key for each in (plain, *scoped)}) == 4
    assert affinity(replace(plain, cache_scope="a", tenant="t", key_id="k")).key == affinity(scoped[0]).key
    assert affinity(scoped[0]).sticky == affinity(plain).sticky


def test_an_adapter_is_near_where_it_was_loaded_and_shares_nothing_with_its_model() -> None:
    plain = request((SYSTEM, "be brief"), (USER, "hi"))
    one, two = (replace(plain, adapter=AdapterRef(name, name.encode() * 32)) for name in "ab")
    other_prompt = replace(request((USER, "else")), adapter=one.adapter)
    assert affinity(one).key == affinity(other_prompt).key
    assert len({affinity(each).key for each in (plain, one, two, replace(one, cache_scope="s"))}) == 4
    assert not affinity(one).sticky
    assert affinity(replace(one, session_id="s")).key == b"session:s"
    assert len({beginning(each) for each in (plain, one, two, replace(one, cache_scope="s"))}) == 4


def test_the_keys_of_the_empty_scope_are_those_of_earlier_versions() -> None:
    key = affinity(request((SYSTEM, "be brief"), (USER, "hi"))).key
    assert key.hex() == b"prefix:".hex() + "ef268709d930dda10b370aaf701f1017"


def test_every_turn_of_a_resent_conversation_has_the_same_key() -> None:
    first = request((SYSTEM, "be brief"), (USER, "hi"))
    second = request((SYSTEM, "be brief"), (USER, "hi"), (ASSISTANT, "hello"), (USER, "more"))
    assert affinity(first).key == affinity(second).key


def test_a_shared_system_prompt_does_not_send_everybody_to_one_node() -> None:
    keys = {affinity(request((SYSTEM, "be brief"), (USER, f"question {i}"))).key for i in range(100)}
    assert len(keys) == 100


def test_messages_cannot_be_split_so_that_they_look_like_others() -> None:
    assert affinity(request((SYSTEM, "ab"), (USER, "c"))).key != affinity(request((SYSTEM, "a"), (USER, "bc"))).key


def test_texts_and_token_ids_that_begin_alike_share_a_key() -> None:
    def key(prompt: TextPrompt | TokenPrompt) -> bytes:
        return affinity(GenerationRequest("m", prompt, SamplingParams())).key

    assert key(TextPrompt("a" * 2000 + "x")) == key(TextPrompt("a" * 2000 + "y"))
    assert key(TokenPrompt(tuple(range(300)))) == key(TokenPrompt((*range(300), 7)))
    assert key(TextPrompt("a")) != key(TextPrompt("b"))
    assert key(TokenPrompt((1, 2))) != key(TokenPrompt((12,)))
