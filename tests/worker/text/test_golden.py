"""Each format's golden conversation: it is known by its template, read at every cut, and written back into the prompt."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import get_args

import pytest
from tests.replies.test_replies import pieces_read

from ryzanstein.generation.prompts import ChatPrompt, Message, Role
from ryzanstein.generation.reply_format import ReplyFormat, ReplyStyle
from ryzanstein.replies.families import FAMILIES
from ryzanstein.replies.format import reply_format
from ryzanstein.replies.reader import read_message
from ryzanstein.replies.tags import REASONING
from ryzanstein.tools.conversations import CONVERSATIONS
from ryzanstein.worker.architectures.registry import ARCHITECTURES
from ryzanstein.worker.config import CallFormat, ReasoningTags
from ryzanstein.worker.text.call_grammar import _AROUND
from ryzanstein.worker.text.calling import ENFORCED, Calling
from ryzanstein.worker.text.tokenizer import TextModel

from .golden import CALLS, GOLDEN, NAMES, TOOLS, Golden, asked

PROMPT = ChatPrompt((Message(Role.USER, "Is it sunny in Rome?"),), tools=TOOLS)


def format_of(golden: Golden, *, opened: bool = False) -> ReplyFormat:
    found = reply_format(PROMPT, ReplyStyle(golden.calls, thinking=True, opened=opened, tags=golden.tags))
    assert found is not None
    return found


def called(message: Message) -> list[tuple[str, object]]:
    return [(call.name, json.loads(call.arguments)) for call in message.tool_calls]


@pytest.mark.parametrize("name", GOLDEN)
def test_a_format_is_known_by_its_template(name: str) -> None:
    golden = GOLDEN[name]
    assert Calling.of(golden.template) == Calling(golden.calls, native=True, thinking=True, tags=golden.tags)


@pytest.mark.parametrize("name", GOLDEN)
def test_a_golden_answer_says_what_its_model_means(name: str) -> None:
    golden = GOLDEN[name]
    message = read_message(format_of(golden), "g", 0, golden.answer)
    assert (message.reasoning, message.content) == ("Hm.", golden.content)
    assert called(message) == CALLS


@pytest.mark.parametrize("name", GOLDEN)
def test_a_golden_answer_reads_the_same_at_every_cut(name: str) -> None:
    golden = GOLDEN[name]
    text, format = golden.answer, format_of(golden)
    by_char, whole = pieces_read(format, list(text))
    for cut in range(len(text) + 1):
        (begun, _), end = pieces_read(format, [text[:cut], text[cut:]])
        assert end == whole, f"cut at {cut}"
        assert begun == (by_char[cut - 1] if cut else ()), f"after {cut} characters"


@pytest.mark.parametrize("name", GOLDEN)
def test_functions_that_are_not_offered_are_content(name: str) -> None:
    golden = GOLDEN[name]
    format = ReplyFormat(golden.calls, thinking=True, tags=golden.tags, tools=("other",))
    message = read_message(format, "g", 0, golden.answer)
    assert message.tool_calls == ()
    assert message.reasoning == "Hm."
    assert "weather" in message.content
    assert "Köln" in message.content


@pytest.mark.parametrize("name", GOLDEN)
def test_calls_are_told_back_as_the_model_writes_them(name: str, write_model: Callable[..., Path]) -> None:
    golden = GOLDEN[name]
    model = TextModel.load(
        write_model(tokenizer_config={"chat_template": golden.template}, config={"max_position_embeddings": 4096})
    )
    text = model.spelled(model.encode_prompt(ChatPrompt(asked(), tools=TOOLS)))
    turn = text.split("<|assistant|>")[1].split("</s>")[0]
    message = read_message(format_of(golden), "g", 0, turn)
    assert message.reasoning == "Hm."
    assert called(message) == CALLS


def test_every_format_has_its_golden_conversation() -> None:
    earlier = {"generic", "llama3", "mistral", "deepseek", "gemma"}
    assert {golden.calls for golden in GOLDEN.values()} == FAMILIES.keys() - earlier
    assert {golden.tags for golden in GOLDEN.values()} == set(REASONING)
    assert NAMES == ("weather", "now")


def test_the_table_of_architectures_says_what_is_tried() -> None:
    """Of families that are older than these the conversations are in the laboratory, where the models' own templates are."""
    tried = {(golden.calls, tags) for golden in GOLDEN.values() for tags in (golden.tags, "")}
    earlier = {("llama3", ""), ("mistral", ""), ("generic", "think")}
    assert set(CONVERSATIONS) <= set(ARCHITECTURES)
    assert set(CONVERSATIONS.values()) - tried == earlier


def test_every_format_is_a_setting() -> None:
    assert set(get_args(CallFormat)) == {"auto", *FAMILIES}
    assert set(get_args(ReasoningTags)) == {"auto", "none", *REASONING}
    assert _AROUND.keys() == ENFORCED
