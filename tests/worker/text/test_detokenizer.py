from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ryzanstein.worker.text.tokenizer import TextModel

texts = st.text(st.characters(exclude_categories=["Cs"]), max_size=60)


@pytest.fixture(scope="session")
def model(model_dir) -> TextModel:
    return TextModel.load(model_dir)


def pieces(model: TextModel, token_ids: list[int]) -> list[str]:
    detokenizer = model.detokenizer()
    return [*(detokenizer.push(token_id) for token_id in token_ids), detokenizer.flush()]


@given(data=st.data())
@settings(max_examples=400, deadline=None)
def test_the_pieces_of_any_tokens_are_the_whole_text(model, data) -> None:
    token_ids = data.draw(st.lists(st.integers(0, model.vocab_size - 1), max_size=40))
    assert "".join(pieces(model, token_ids)) == model.decode(token_ids)


@given(text=texts)
@settings(max_examples=200, deadline=None)
def test_the_pieces_of_any_text_are_the_text_as_decoded_at_once(model, text) -> None:
    token_ids = model.encode(text)
    assert "".join(pieces(model, token_ids)) == model.decode(token_ids)


@given(text=texts)
@settings(max_examples=100, deadline=None)
def test_no_piece_of_a_whole_text_is_a_broken_character(model, text) -> None:
    text = text.replace("\ufffd", "")
    assert not any("\ufffd" in piece for piece in pieces(model, model.encode(text)))


def test_bytes_that_are_no_text_are_replaced_as_soon_as_it_is_certain(write_model) -> None:
    model = TextModel.load(write_model("byte_level"))
    detokenizer = model.detokenizer()
    # The vocabulary spells byte 0xF0 as one character, byte 0x41 as "A".
    first_of_four, a = (model._tokenizer.token_to_id(token) for token in ("ð", "A"))
    assert detokenizer.push(first_of_four) == ""
    assert detokenizer.push(a) == "\ufffdA"
    assert detokenizer.push(first_of_four) == ""
    assert detokenizer.flush() == "\ufffd"


def test_only_the_first_word_loses_its_space(write_model) -> None:
    model = TextModel.load(write_model("sentencepiece"))
    token_ids = model.encode("the quick fox")
    assert "".join(pieces(model, token_ids)) == "the quick fox"
    assert "".join(pieces(model, token_ids + token_ids)) == "the quick fox the quick fox"


def test_special_tokens_and_padding_of_the_vocabulary_are_skipped(model) -> None:
    token_ids = model.encode("the quick")
    noisy = [i for token_id in token_ids for i in (0, token_id, model.vocab_size - 1, 1)]
    assert "".join(pieces(model, noisy)) == model.decode(token_ids)
