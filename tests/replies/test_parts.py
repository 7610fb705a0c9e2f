"""Content, calls and the white space between them, collected as they become certain."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ryzanstein.generation.reply_format import ReplyFormat
from ryzanstein.replies.parts import MAX_SPACE_CHARS, CallDelta, Content, Part, Reasoning, Sink, call_id


def sink(names: tuple[str, ...] = ("f", "g"), max_calls: int = 8) -> Sink:
    return Sink(ReplyFormat(tools=names, max_calls=max_calls), "generation", 0)


def content_of(parts: list[Part]) -> str:
    return "".join(part.text for part in parts if isinstance(part, Content))


def test_white_space_at_the_end_waits_for_what_follows() -> None:
    collected = sink()
    collected.content("One \n")
    assert collected.taken() == [Content("One")]
    collected.content("two")
    assert collected.taken() == [Content(" \ntwo")]


def test_white_space_around_a_call_is_layout() -> None:
    collected = sink()
    collected.content("One\n\n")
    collected.begin("f")
    collected.arguments("{")
    collected.arguments("}")
    collected.content("\n")
    collected.end()
    assert collected.taken() == [Content("One"), CallDelta(0, call_id("generation", 0, 0), "f", "{}")]


def test_white_space_at_the_very_end_is_content_where_no_call_came_before() -> None:
    collected = sink()
    collected.content("One \n")
    collected.end()
    assert collected.taken() == [Content("One \n")]


def test_more_white_space_than_a_layout_is_content_and_does_not_wait() -> None:
    collected = sink()
    collected.content(" " * (MAX_SPACE_CHARS - 1))
    assert collected.taken() == []
    collected.content("  ")
    assert content_of(collected.taken()) == " " * MAX_SPACE_CHARS
    collected.begin("f")
    assert content_of(collected.taken()) == "", "the rest was layout before the call"


@given(st.lists(st.integers(1, MAX_SPACE_CHARS * 2), max_size=6), st.booleans())
def test_white_space_of_any_length_comes_out_alike_however_it_was_divided(lengths: list[int], after_call: bool) -> None:
    divided, whole = sink(), sink()
    for collected, pieces in ((divided, lengths), (whole, [sum(lengths)])):
        if after_call:
            collected.begin("f")
        for length in pieces:
            collected.content("\n" * length)
    assert content_of(divided.taken()) == content_of(whole.taken())
    divided.end()
    whole.end()
    assert content_of(divided.taken()) == content_of(whole.taken())


def test_neighbours_of_a_kind_are_joined_and_calls_are_not() -> None:
    collected = sink()
    collected.reasoning("a")
    collected.reasoning("b")
    collected.content("c")
    collected.content("d")
    for _ in range(2):
        collected.begin("g")
        collected.arguments("{}")
    first, second = (call_id("generation", 0, index) for index in range(2))
    assert collected.taken() == [
        Reasoning("ab"),
        Content("cd"),
        CallDelta(0, first, "g", "{}"),
        CallDelta(1, second, "g", "{}"),
    ]
    assert collected.taken() == []


def test_only_offered_functions_are_accepted_and_only_so_many_calls() -> None:
    collected = sink(max_calls=1)
    assert collected.accepts("f")
    assert not collected.accepts("h")
    collected.begin("f")
    assert not collected.accepts("g")


@pytest.mark.parametrize("place", [("other", 0, 0), ("generation", 1, 0), ("generation", 0, 1)])
def test_ids_differ_by_generation_choice_and_number_and_are_the_same_everywhere(place: tuple[str, int, int]) -> None:
    assert call_id("generation", 0, 0) == call_id("generation", 0, 0)
    assert call_id(*place) != call_id("generation", 0, 0)
    assert len(call_id(*place)) == 9
    assert call_id(*place).isalnum()
