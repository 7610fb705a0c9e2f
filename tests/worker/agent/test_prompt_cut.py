"""What is left out of a prompt that does not fit. Each character is a token, and so is the beginning of a message."""

from __future__ import annotations

import asyncio
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ryzanstein.errors import RyzansteinError
from ryzanstein.generation.prompts import ChatPrompt, Message, Prompt, Role, TextPrompt, TokenPrompt
from ryzanstein.generation.request import Attempt, GenerationRequest, SamplingParams
from ryzanstein.worker.agent.intake import ReadPrompt
from ryzanstein.worker.agent.prompt_cut import fitted


async def read(prompt: Prompt) -> ReadPrompt:
    match prompt:
        case ChatPrompt():
            return ReadPrompt([ord(c) for message in prompt.messages for c in "\n" + message.content])
        case TextPrompt(text):
            return ReadPrompt([ord(c) for c in text])
        case TokenPrompt(token_ids):
            return ReadPrompt(list(token_ids))


def cut(prompt: Prompt, context: int, *, accepted: bool = False, **sampling: int | None) -> ReadPrompt:
    async def run() -> ReadPrompt:
        request = GenerationRequest("m", prompt, SamplingParams(**sampling))  # type: ignore[arg-type]
        attempt = Attempt("g", 0, request, (), accepted)
        return await fitted(attempt, await read(prompt), context, read)

    return asyncio.run(run())


def wording(found: ReadPrompt) -> str:
    return "".join(map(chr, found.token_ids))


def chat(*contents: str) -> ChatPrompt:
    roles = {"s": Role.SYSTEM, "u": Role.USER, "a": Role.ASSISTANT, "t": Role.TOOL}
    return ChatPrompt(tuple(Message(roles[content[0]], content) for content in contents))


def test_nothing_is_cut_unless_asked_or_needed() -> None:
    text = TextPrompt("abcdefghij")
    assert cut(text, 5, max_tokens=1).num_omitted == 0
    assert cut(text, 11, max_tokens=1, keep_prompt_head=3).num_omitted == 0


@given(length=st.integers(1, 60), context=st.integers(2, 60), head=st.integers(0, 20), answer=st.integers(1, 20))
def test_of_a_text_the_middle_is_left_out(length: int, context: int, head: int, answer: int) -> None:
    ids, room = tuple(range(length)), max(1, context - answer)
    if head >= room and length > room:
        with pytest.raises(RyzansteinError, match="leave room in a prompt of at most"):
            cut(TokenPrompt(ids), context, max_tokens=answer, keep_prompt_head=head)
        return
    found = cut(TokenPrompt(ids), context, max_tokens=answer, keep_prompt_head=head)
    kept = found.token_ids
    assert len(kept) == min(length, room)
    assert found.num_omitted == length - len(kept)
    assert kept == list(ids) or kept == [*ids[:head], *ids[length - (room - head) :]]


def test_without_max_tokens_the_answer_has_room() -> None:
    assert len(cut(TokenPrompt(tuple(range(100))), 40, keep_prompt_head=0).token_ids) == 30
    assert len(cut(TokenPrompt(tuple(range(9000))), 8192, keep_prompt_head=0).token_ids) == 8192 - 1024


def test_a_bound_of_the_request_holds_besides() -> None:
    found = cut(TokenPrompt(tuple(range(50))), 100, max_tokens=1, keep_prompt_head=2, truncate_prompt_tokens=7)
    assert found.token_ids == [0, 1, 45, 46, 47, 48, 49]


def test_of_a_conversation_the_oldest_turns_are_left_out() -> None:
    talk = chat("system", "u1", "a1", "u2", "a2", "t2", "a2", "u3", "a3", "u4")
    whole = len(asyncio.run(read(talk)).token_ids)
    for room, expected in (
        (whole, None),
        (whole - 1, "u2"),
        (whole - 6, "u2"),
        (whole - 7, "u3"),
        (whole - 18, "u3"),
        (10, "u4"),
    ):
        found = cut(talk, room + 1, max_tokens=1, keep_prompt_head=0)
        if expected is None:
            assert found.num_omitted == 0
        else:
            assert wording(found).startswith(f"\nsystem\n{expected}")
            assert wording(found).endswith("\nu4")
            assert found.num_omitted == whole - len(found.token_ids)
            assert len(found.token_ids) <= room


def test_a_last_turn_that_does_not_fit_is_not_cut() -> None:
    for talk in (chat("system", "u1", "a1", "u" * 50), chat("u" * 50), chat("system")):
        assert cut(talk, 20, max_tokens=16, keep_prompt_head=0).num_omitted == 0


def test_a_last_turn_that_is_longer_than_the_prompt_may_be_is_refused() -> None:
    for talk in (chat("system", "u1", "a1", "u" * 50), chat("u" * 50)):
        with pytest.raises(RyzansteinError, match="truncate_prompt_tokens: must hold the last turn"):
            cut(talk, 100, max_tokens=1, keep_prompt_head=0, truncate_prompt_tokens=20)


@given(
    lengths=st.lists(st.integers(1, 9), min_size=2, max_size=12),
    context=st.integers(4, 90),
    smaller=st.integers(1, 90),
    as_text=st.booleans(),
)
def test_a_later_attempt_keeps_the_same_on_any_node(lengths: list[int], context: int, smaller: int, as_text: bool) -> None:
    contents = [("ua"[i % 2]) * length for i, length in enumerate(lengths)]
    prompt: Prompt = TextPrompt("".join(contents)) if as_text else chat(*contents)
    first = cut(prompt, context, max_tokens=2, keep_prompt_head=1)
    kept = len(first.token_ids)
    described = (
        {"truncate_prompt_tokens": kept, "keep_prompt_head": min(1, kept - 1)} if first.num_omitted else {"keep_prompt_head": 1}
    )
    later = cut(prompt, smaller, accepted=True, max_tokens=2, **described)
    assert replace(later, num_omitted=0) == replace(first, num_omitted=0)
