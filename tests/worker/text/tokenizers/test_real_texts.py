"""Nasty strings through real tokenizers: the ids are those of transformers, and a stream of them is their text."""

from __future__ import annotations

import random

import pytest

from .conftest import Real

pytestmark = pytest.mark.lab

PIECES = [
    *("the", "and", "Hello", "don't", "I'M", "'LL", "snake_case", "HelloWorld", "x" * 30, "a", "1", "23", "4567"),
    *(" ", "  ", "   ", "\n", "\n\n", "\r\n", "\t", "...", "--", "()", "{}", "\\", "http://x.y/?q=1#z", "<0x41>", "<|", "|>"),
    *(
        "é",
        "e\u0301",
        "ß",
        "İ",
        "中文",
        "日本",
        "한국",
        "🙂",
        "👨\u200d👩\u200d👧",
        "\u200b",
        "\u00a0",
        "\u3000",
        "\u2581",
        "µ",
    ),
    *("العربية", "हिन्दी", "\x01", "\x7f", "\uff21", "\u202e", "\U0010ffff", "<table>", "</h1>", "<unused7>", "[multimodal]"),
]


def nasty(count: int = 300) -> list[str]:
    chance = random.Random(17)
    return ["".join(chance.choice(PIECES) for _ in range(chance.randint(1, 20))) for _ in range(count)]


def test_ids_are_those_of_transformers(real: Real) -> None:
    different = [text for text in nasty() if real.model.encode(text) != real.reference.encode(text)]
    assert different == []


def test_a_stream_is_the_text_of_all_its_ids(real: Real) -> None:
    for text in nasty():
        ids = real.model.encode_bare(text)
        follows = real.model.detokenizer()
        assert "".join(map(follows.push, ids)) + follows.flush() == real.model.decode(ids), text
        assert real.model.decode(ids) == real.reference.decode(
            ids, skip_special_tokens=True, clean_up_tokenization_spaces=False
        ), text


def test_any_ids_stream_to_their_text(real: Real) -> None:
    """Also those that no text has: halves of characters, special tokens, ids that are only padding."""
    chance = random.Random(3)
    for _ in range(200):
        ids = [chance.randrange(real.model.vocab_size) for _ in range(chance.randint(1, 30))]
        follows = real.model.detokenizer()
        assert "".join(map(follows.push, ids)) + follows.flush() == real.model.decode(ids), ids
