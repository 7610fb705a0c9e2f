"""The committed tokenizer: exact round trips, one token per number, and the chat template."""

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from jinja2 import TemplateError
from tokenizers import Tokenizer

from ryzanstein.demo import MODEL_DIR
from ryzanstein.lab.demo.dialogues import dialogue
from ryzanstein.lab.demo.encoding import encode
from ryzanstein.lab.demo.tokenizer import CHAT_TEMPLATE, END, SPECIAL_TOKENS, VOCAB_SIZE
from ryzanstein.lab.demo.words import Split

TOKENIZER = Tokenizer.from_file(str(MODEL_DIR / "tokenizer.json"))


@pytest.fixture(scope="module")
def chat_tokenizer() -> Any:
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(MODEL_DIR)


@given(st.text().filter(lambda text: not any(token in text for token in SPECIAL_TOKENS)))
def test_any_text_comes_back_exactly(text: str) -> None:
    assert TOKENIZER.decode(TOKENIZER.encode(text).ids) == text


@pytest.mark.parametrize("number", [0, 7, 10, 42, 99, 100, 199, 200])
def test_a_number_up_to_200_is_one_token(number: int) -> None:
    assert len(TOKENIZER.encode(f" {number}").ids) == 1
    assert len(TOKENIZER.encode(f"{number}").ids) == 1


def test_a_larger_number_is_several_tokens_with_the_same_digits() -> None:
    tokens = TOKENIZER.encode(" 4711").tokens
    assert len(tokens) > 1
    assert "".join(tokens) == "Ġ4711"


@pytest.mark.parametrize("number", ["201", "831", "912", "4711", "36195"])
def test_a_larger_number_is_cut_alike_with_and_without_a_space(number: str) -> None:
    assert TOKENIZER.encode(f" {number}").tokens == [
        "Ġ" + TOKENIZER.encode(number).tokens[0],
        *TOKENIZER.encode(number).tokens[1:],
    ]


def test_the_vocabulary_has_the_size_the_model_has() -> None:
    assert TOKENIZER.get_vocab_size() == VOCAB_SIZE == json.loads((MODEL_DIR / "config.json").read_text())["vocab_size"]


def test_the_committed_template_is_the_one_of_the_module() -> None:
    assert json.loads((MODEL_DIR / "tokenizer_config.json").read_text())["chat_template"] == CHAT_TEMPLATE


@pytest.mark.parametrize("seed", range(30))
def test_training_encodes_what_the_template_renders(chat_tokenizer: Any, seed: int) -> None:
    one = dialogue(Split.HELD_OUT, seed)
    rendered = chat_tokenizer.apply_chat_template(one.messages(), tokenize=False)
    assert encode(TOKENIZER, one).ids == TOKENIZER.encode(rendered).ids == chat_tokenizer(rendered).input_ids


def test_answers_are_the_assistants_words_and_the_end_token() -> None:
    one = dialogue(Split.HELD_OUT, 3)
    encoded = encode(TOKENIZER, one)
    answers = [TOKENIZER.decode(encoded.ids[start:stop], skip_special_tokens=False) for start, stop in encoded.answers]
    assert answers == [turn.assistant + END for turn in one.turns]


def test_a_generation_prompt_opens_the_assistants_turn(chat_tokenizer: Any) -> None:
    messages = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": " Hello "}]
    rendered = chat_tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    assert rendered == "<|system|>Be brief.<|end|><|user|>Hello<|end|><|assistant|>"


def test_an_unknown_role_is_refused(chat_tokenizer: Any) -> None:
    with pytest.raises(TemplateError, match="unknown role: tool"):
        chat_tokenizer.apply_chat_template([{"role": "tool", "content": "x"}], tokenize=False)
