"""What a request gives a chat template besides its messages: variables, and where the prompt ends."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from ryzanstein.demo import MODEL_DIR
from ryzanstein.errors import RyzansteinError
from ryzanstein.generation.prompts import ChatPrompt, Message, Role, TemplateOptions
from ryzanstein.worker.text.tokenizer import TextModel

HELLO = (Message(Role.USER, "hello"),)
BEGUN = (*HELLO, Message(Role.ASSISTANT, "  Nice to "))


def prompt(messages: tuple[Message, ...] = HELLO, **options: Any) -> ChatPrompt:
    variables = options.pop("variables", None)
    return ChatPrompt(messages, template=TemplateOptions("" if variables is None else json.dumps(variables), **options))


def test_the_template_sees_the_requests_variables(write_model: Callable[..., Path]) -> None:
    template = "{% if deep %}deep {% endif %}{{ title }} {{ names | join('+') }}</s>"
    model = TextModel.load(write_model("byte_level", tokenizer_config={"chat_template": template}))
    variables = {"deep": True, "title": "a b", "names": ["x", "y"]}
    assert model.decode(model.encode_prompt(prompt(variables=variables))) == "deep a b x+y"


@pytest.mark.parametrize(
    "template",
    ["{{ title }}", "<|{{ title[2:-2] }}|>", "{{ title | upper | lower }}", "{% for c in title %}{{ c }}{% endfor %}"],
)
def test_a_variable_writes_no_control_token(write_model: Callable[..., Path], template: str) -> None:
    model = TextModel.load(write_model("byte_level", tokenizer_config={"chat_template": template + "</s>"}))
    for title in ("<|user|>", "</s>", "a</s>b"):
        ids = model.encode_prompt(prompt(variables={"title": title}))
        assert ids.count(ids[-1]) == 1, "the template's own end and no other"
        assert len(ids) > 2


def test_the_prompt_ends_where_the_request_says() -> None:
    model = TextModel.load(MODEL_DIR)
    usual = model.spelled(model.encode_prompt(prompt()))
    assert usual.endswith("<|assistant|>")
    assert model.spelled(model.encode_prompt(prompt(add_generation_prompt=False))) == usual.removesuffix("<|assistant|>")
    continued = model.spelled(model.encode_prompt(prompt(BEGUN, add_generation_prompt=False, continues=True)))
    assert continued.startswith(usual)
    assert continued.removeprefix(usual).strip() == "Nice to"
    assert "<|end|>" not in continued.removeprefix(usual)


def test_an_empty_message_cannot_be_continued() -> None:
    model = TextModel.load(MODEL_DIR)
    empty = prompt((*HELLO, Message(Role.ASSISTANT, " ")), add_generation_prompt=False, continues=True)
    with pytest.raises(RyzansteinError, match="continue_final_message"):
        model.encode_prompt(empty)


def test_an_effort_has_an_effect_where_the_template_knows_it(write_model: Callable[..., Path]) -> None:
    without = TextModel.load(MODEL_DIR)
    assert without.encode_prompt(prompt(variables={"reasoning_effort": "high"})) == without.encode_prompt(prompt())
    template = "{{ reasoning_effort }}</s>"
    model = TextModel.load(write_model("byte_level", tokenizer_config={"chat_template": template}))
    assert model.decode(model.encode_prompt(prompt(variables={"reasoning_effort": "high"}))) == "high"


@pytest.mark.parametrize(
    "text",
    [
        *("[]", "{", '{"messages":1}', '{"a b":1}', "x" * 5000),
        *('{"a":' + "[" * depth + "]" * depth + "}" for depth in (100, 2000)),
    ],
)
def test_variables_that_are_none_are_refused(text: str) -> None:
    with pytest.raises(RyzansteinError) as failure:
        TemplateOptions(text).validate()
    assert failure.value.violations[0].field.startswith("chat_template_kwargs")


def test_special_tokens_are_spelled_where_that_is_wanted() -> None:
    from ryzanstein.worker.text.choice import ChoiceText, TextOptions

    model = TextModel.load(MODEL_DIR)
    ids = model.encode("1 2<|end|>")
    end = ids[-1]
    for options, text in (
        (TextOptions(), "1 2"),
        (TextOptions(with_special=True), "1 2<|end|>"),
        (TextOptions(with_special=True, ends=frozenset({end})), "1 2"),
        (TextOptions(with_special=True, with_stop=True, ends=frozenset({end})), "1 2<|end|>"),
        (TextOptions(("2",)), "1 "),
        (TextOptions(("2",), with_stop=True), "1 2"),
    ):
        whole, replayed = ChoiceText(model, options), ChoiceText(model, options)
        message = b"".join(_bytes_then_push(whole, token_id)[0] for token_id in ids)
        pieces = ChoiceText(model, options)
        assert "".join(pieces.push(token_id).text for token_id in ids) + pieces.flush() == text
        assert message.decode().startswith(text)
        replayed.replay(ids[:-1])
        assert replayed.next_bytes(end) == (b"<|end|>" if text.endswith("<|end|>") else b"")


def _bytes_then_push(choice: Any, token_id: int) -> tuple[bytes, Any]:
    return choice.next_bytes(token_id), choice.push(token_id)
