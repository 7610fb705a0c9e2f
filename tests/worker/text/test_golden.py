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
from ryzanstein.generation.tools import Tool, Tools
from ryzanstein.replies.families import FAMILIES
from ryzanstein.replies.format import reply_format
from ryzanstein.replies.reader import read_message
from ryzanstein.replies.tags import REASONING
from ryzanstein.tools.conversations import CONVERSATIONS
from ryzanstein.wire import events
from ryzanstein.wire.events import reply_from_wire, style_from_wire, style_to_wire
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


@pytest.mark.parametrize("name", GOLDEN)
def test_a_format_crosses_the_wire(name: str) -> None:
    """An earlier peer is not told of tags that it does not know: it would take an opened answer for reasoning."""
    for opened in (False, True):
        style = ReplyStyle(GOLDEN[name].calls, thinking=True, opened=opened, tags=GOLDEN[name].tags)
        format = format_of(GOLDEN[name], opened=opened)
        assert style_from_wire(style_to_wire(style)) == style
        assert reply_from_wire(events.reply_to_wire(format)) == format  # type: ignore[arg-type]
        assert style_to_wire(style).thinking is (style.tags == "think")


def test_what_only_a_newer_node_knows_is_content() -> None:
    newer = reply_format(PROMPT, ReplyStyle("newer", thinking=True, tags="newer"))
    assert newer is None
    assert reply_format(PROMPT, ReplyStyle("glm", thinking=True, tags="newer")) == ReplyFormat(
        "glm", tools=NAMES, tags="newer", texts=("weather:city", "weather:code"), nullable=("weather:code",)
    )


@pytest.mark.parametrize(
    ("schema", "text", "nullable"),
    [
        ({"type": "string"}, True, False),
        ({"type": ["string", "null"]}, True, True),
        ({"type": ["string", "integer"]}, False, False),
        ({"$ref": "#/$defs/t"}, True, False),
        ({"$ref": "#"}, False, False),
        ({"enum": ["a", None]}, True, True),
        ({"enum": ["a", 1]}, False, False),
        ({"const": "a"}, True, False),
        ({"oneOf": [{"type": "string"}, {"$ref": "#/$defs/t"}]}, True, False),
        ({}, False, False),
        (True, False, False),
    ],
)
def test_which_arguments_are_texts_is_said_by_their_schema(schema: object, text: bool, nullable: bool) -> None:
    parameters = {"type": "object", "properties": {"a": schema}, "$defs": {"t": {"type": "string"}}}
    prompt = ChatPrompt(PROMPT.messages, tools=Tools((Tool("f", "", json.dumps(parameters)),)))
    found = reply_format(prompt, ReplyStyle("glm"))
    assert found is not None
    assert (found.texts, found.nullable) == (("f:a",) * text, ("f:a",) * nullable)


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
