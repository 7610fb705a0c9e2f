"""Marks of a prompt's beginnings, and the bounded memory of where they went."""

from __future__ import annotations

from ryzanstein.generation.prompts import ChatPrompt, Message, Role, TextPrompt, TokenPrompt
from ryzanstein.generation.request import GenerationRequest, SamplingParams
from ryzanstein.router.choose.policies import PolicyChoice, PrefixIndex, marks


def chat(*texts: str, system: str = "Be brief.") -> ChatPrompt:
    roles = [Role.SYSTEM] + [Role.USER, Role.ASSISTANT] * len(texts)
    return ChatPrompt(tuple(Message(role, text) for role, text in zip(roles, (system, *texts), strict=False)))


def in_common(one: ChatPrompt, other: ChatPrompt) -> int:
    return len(set(marks(one)) & set(marks(other)))


def test_a_longer_conversation_keeps_the_marks_of_its_beginning() -> None:
    first = chat("a question " * 100)
    later = chat("a question " * 100, "an answer " * 100, "and then?")
    assert marks(later)[: len(marks(first))] == marks(first)
    assert len(marks(later)) > len(marks(first)) > 0


def test_a_document_with_another_question_after_it_begins_alike() -> None:
    document = "Whereas the parties " * 200
    assert in_common(chat(document + "Who?"), chat(document + "When was that, and why?")) == len(marks(chat(document)))


def test_a_shared_system_prompt_is_no_mark_however_long() -> None:
    system = "You are helpful. " * 1000
    assert marks(chat("hi", system=system)) == ()
    assert in_common(chat("x" * 600, system=system), chat("y" * 600, system=system)) == 0


def test_another_system_prompt_is_another_beginning() -> None:
    assert in_common(chat("x" * 600, system="a"), chat("x" * 600, system="b")) == 0


def test_a_prompt_of_a_million_characters_has_a_dozen_marks() -> None:
    assert len(marks(TextPrompt("x" * 1_000_000))) == 12
    assert len(marks(TokenPrompt(tuple(range(1000))))) == 4


def test_the_same_prompt_in_another_cache_scope_has_no_mark_in_common() -> None:
    def found(scope: str) -> tuple[bytes, ...]:
        request = GenerationRequest("m", chat("a question " * 100), SamplingParams(), cache_scope=scope)
        return PolicyChoice().make("prefix").affinity_of(request).marks

    assert found("") == marks(chat("a question " * 100))
    assert len({*found(""), *found("a"), *found("b")}) == 3 * len(found("")) > 0


def test_the_index_finds_the_longest_beginning_first_and_each_node_once() -> None:
    index = PrefixIndex(100)
    index.put((b"1", b"2", b"3"), "a")
    index.put((b"1", b"2"), "b")
    assert list(index.find((b"1", b"2", b"3", b"4"))) == ["a", "b"]
    assert list(index.find((b"9",))) == []


def test_the_index_forgets_what_was_not_placed_for_longest() -> None:
    index = PrefixIndex(1000)
    for number in range(5000):
        index.put((b"hot", number.to_bytes(4, "big")), "a")
    assert len(index) == 1000
    assert list(index.find((b"hot",))) == ["a"]
    assert list(index.find(((1).to_bytes(4, "big"),))) == []
