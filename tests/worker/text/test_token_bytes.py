"""What each token adds to the text, for every kind of vocabulary; transformers decodes for comparison."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from ryzanstein.worker.text.choice import ChoiceText
from ryzanstein.worker.text.tokenizer import TextModel

texts = st.text(st.characters(exclude_categories=["Cs"]), max_size=60)


@pytest.fixture(scope="session")
def model(model_dir: Path) -> TextModel:
    return TextModel.load(model_dir)


@pytest.fixture(scope="session")
def reference(model_dir: Path) -> PreTrainedTokenizerFast:
    return AutoTokenizer.from_pretrained(model_dir)


def added(model: TextModel, token_ids: list[int]) -> list[bytes]:
    """As the tokens of one choice."""
    choice, pieces = ChoiceText(model), []
    for token_id in token_ids:
        pieces.append(choice.next_bytes(token_id))
        choice.push(token_id)
    return pieces


@given(text=texts)
@settings(max_examples=200)
def test_the_bytes_of_all_tokens_are_the_text(model: TextModel, reference: PreTrainedTokenizerFast, text: str) -> None:
    token_ids = model.encode(text)
    decoded = reference.decode(token_ids, skip_special_tokens=True)
    assert b"".join(added(model, token_ids)) == decoded.encode()


@given(data=st.data(), texts=st.lists(texts, min_size=1, max_size=4))
@settings(max_examples=100)
def test_special_tokens_and_padding_add_nothing(model: TextModel, data: st.DataObject, texts: list[str]) -> None:
    token_ids = model.encode("".join(texts))
    skipped = [i for i in range(model.vocab_size) if model.is_skipped(i)]
    places = data.draw(st.lists(st.tuples(st.integers(0, len(token_ids)), st.sampled_from(skipped)), max_size=5))
    mixed = list(token_ids)
    for place, token_id in sorted(places, reverse=True):
        mixed.insert(place, token_id)
    assert b"".join(added(model, mixed)) == b"".join(added(model, token_ids)) == model.decode(mixed).encode()


def test_all_tokens_at_once_add_what_each_adds(model: TextModel) -> None:
    alone = [model.text_bytes(token_id, first=False) for token_id in range(model.vocab_size)]
    assert model.all_text_bytes() == alone


@given(data=st.data())
@settings(max_examples=200)
def test_any_tokens_of_a_byte_level_vocabulary_are_their_bytes(byte_level: TextModel, data: st.DataObject) -> None:
    token_ids = data.draw(st.lists(st.integers(0, byte_level.vocab_size - 1), max_size=40))
    assert b"".join(added(byte_level, token_ids)).decode("utf-8", "replace") == byte_level.decode(token_ids)


@pytest.fixture(scope="session")
def byte_level(write_model: Callable[..., Path]) -> TextModel:
    return TextModel.load(write_model("byte_level"))


@pytest.mark.parametrize(
    ("kind", "tokens"),
    [
        ("byte_level", {"\u00f0": b"\xf0", "\u0120": b" ", "<tool>": b"<tool>", "two words": b"two words", "</s>": b""}),
        ("sentencepiece", {"<0xE4>": b"\xe4", "\u2581": b" ", "e": b"e", "<tool>": b" <tool>", "</s>": b""}),
        ("metaspace", {"\u2581": b" ", "e": b"e", "</s>": b""}),
    ],
)
def test_tokens_by_name(write_model: Callable[..., Path], kind: str, tokens: dict[str, bytes]) -> None:
    model = TextModel.load(write_model(kind))
    ids = {token: model._tokenizer.token_to_id(token) for token in tokens}
    there = {token: want for token, want in tokens.items() if ids[token] is not None}
    assert len(there) >= 2
    assert {token: model.text_bytes(ids[token], first=False) for token in there} == there


def test_only_the_first_piece_of_a_text_loses_its_space(write_model: Callable[..., Path]) -> None:
    model = TextModel.load(write_model("sentencepiece"))
    token_ids = model.encode("the the")
    pieces = added(model, [model._tokenizer.token_to_id("<s>"), *token_ids])
    assert b"".join(pieces) == b"the the"
    assert pieces[0] == b""
