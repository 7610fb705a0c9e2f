"""Events of a generation."""

from __future__ import annotations

from ryzanstein.generation.tokens import Delta, Token


def test_the_text_of_a_delta_is_the_text_of_its_tokens() -> None:
    assert Delta(0, 3, (Token(1, "a"), Token(2, ""), Token(3, "bc")), "node-0").text == "abc"
