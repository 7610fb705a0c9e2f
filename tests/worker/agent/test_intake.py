"""How a conversation is told, where a template does not show its functions or refuses their calls."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import cast

import pytest

from ryzanstein import errors
from ryzanstein.constraints import Constraint, ConstraintKind
from ryzanstein.demo import MODEL_DIR
from ryzanstein.errors import RyzansteinError
from ryzanstein.generation.prompts import ChatPrompt, Message, Role, ToolCall
from ryzanstein.generation.reply_format import ReplyStyle
from ryzanstein.generation.request import Attempt, GenerationRequest, SamplingParams
from ryzanstein.generation.tools import Tool, ToolMode, Tools
from ryzanstein.worker.agent import intake
from ryzanstein.worker.text.calling import instructions
from ryzanstein.worker.text.grammars import enforcing
from ryzanstein.worker.text.grammars.judge import ConstraintJudge
from ryzanstein.worker.text.templates.renderer import LocalRenderer
from ryzanstein.worker.text.tokenizer import TextModel

OFFERED = Tools((Tool("weather", "Of a city."),))
TALK = (
    Message(Role.USER, "is it sunny?"),
    Message(Role.ASSISTANT, "", (ToolCall("1", "weather", "{}"),)),
    Message(Role.TOOL, "sunny", tool_call_id="1"),
)
TURNS = "{% for m in messages %}<|user|>{{ m.content }}<|end|>{% endfor %}"


def model_with(template: str, directory: Path) -> TextModel:
    for path in MODEL_DIR.glob("*.json"):
        (directory / path.name).write_bytes(path.read_bytes())
    config = json.loads((MODEL_DIR / "tokenizer_config.json").read_text())
    (directory / "tokenizer_config.json").write_text(json.dumps({**config, "chat_template": template}))
    return TextModel.load(directory)


@pytest.mark.parametrize(
    "template",
    [
        "{% if tools and documents %}{{ tools }}{% endif %}" + TURNS,
        "{{ tools }}{% for m in messages %}{{ 'x' + 1 if m.tool_calls else '' }}{% endfor %}" + TURNS,
        "{{ tools }}" + TURNS,
    ],
    ids=["shows no tools", "fails on calls", "leaves calls out"],
)
async def test_what_the_template_does_not_show_is_told_in_words(template: str, tmp_path: Path) -> None:
    model = model_with(template, tmp_path)
    assert model.calling.native
    read = await intake.tokenize(ChatPrompt(TALK, tools=OFFERED), model, LocalRenderer())
    text = model.decode(read.token_ids)
    assert instructions(OFFERED) in text
    assert '<tool_call>{"name": "weather", "arguments": {}}</tool_call>' in text
    assert read.calling is not None
    assert not read.calling.native
    assert read.reply is not None
    assert read.reply.calls == "generic"


@pytest.mark.parametrize(
    ("constraint", "tools", "expected"),
    [
        (None, Tools(), ReplyStyle("", True, True)),
        (Constraint.json_object(), Tools(), None),
        (Constraint.regex("<think>"), Tools(), None),
        (Constraint.choice(["a"]), OFFERED, ReplyStyle("generic", False, False)),
        (replace(Constraint.json_object(), after="</think>"), Tools(), ReplyStyle("", True, True)),
        (None, replace(OFFERED, mode=ToolMode.REQUIRED), ReplyStyle("generic", True, True)),
    ],
)
async def test_a_constraint_says_where_the_answer_begins(
    constraint: Constraint | None, tools: Tools, expected: ReplyStyle | None, tmp_path: Path
) -> None:
    """A template that ends with `<think>` makes no reasoning of an answer that has a form from its first token on."""
    model = model_with(TURNS + "<think>\n", tmp_path)
    prompt = ChatPrompt((Message(Role.USER, "hello"),), tools=tools)
    read = await intake.tokenize(prompt, model, LocalRenderer())
    request = GenerationRequest("demo", prompt, SamplingParams(constraint=constraint))
    attempt = enforcing.constrained(Attempt("g", 0, request, ()), read.reply, model)
    assert intake.reply_of(read, attempt) == expected


async def test_functions_are_told_before_the_first_text_where_there_is_no_system_message(tmp_path: Path) -> None:
    refuses = "{% if messages[0].role == 'system' %}{{ raise_exception('System role not supported') }}{% endif %}" + TURNS
    read = await intake.tokenize(ChatPrompt(TALK, tools=OFFERED), model_with(refuses, tmp_path), LocalRenderer())
    text = model_with(refuses, tmp_path).spelled(read.token_ids)
    assert instructions(OFFERED) + "\n\nis it sunny?<|end|>" in text


async def test_the_number_of_a_message_is_that_of_the_request(tmp_path: Path) -> None:
    """With a system message of ours before them, it would be another one's."""
    refuses = "{% for m in messages %}{% if m.role == 'user' %}{{ m.content }}{% endif %}{% endfor %}"
    model = model_with(refuses, tmp_path)
    talk = (Message(Role.USER, "hello"), Message(Role.ASSISTANT, "how are you?"), Message(Role.USER, "bye"))
    for tools, field in ((Tools(), "messages[1]"), (OFFERED, "messages")):
        with pytest.raises(RyzansteinError, match="leaves a part") as caught:
            await intake.tokenize(ChatPrompt(talk, tools=tools), model, LocalRenderer())
        assert caught.value.violations[0].field == field


class Refusing:
    """Judges as a node that cannot enforce grammars."""

    def __init__(self) -> None:
        self.asked: list[Constraint] = []

    async def judge(self, constraint: Constraint, model: TextModel, scope: str = "") -> str:
        self.asked.append(constraint)
        if constraint.kind is ConstraintKind.GRAMMAR:
            error = errors.invalid("sampling.constraint.grammar", "is too large")
            raise replace(error, reason="INVALID_CONSTRAINT")
        return "verdict"

    async def tokens(self, model: TextModel) -> bytes:
        return b""


async def test_a_form_is_alone_where_what_may_be_called_cannot_be_enforced_beside_it(tmp_path: Path) -> None:
    model, judge = model_with(TURNS, tmp_path), Refusing()
    for mode, refused in ((ToolMode.AUTO, False), (ToolMode.REQUIRED, True)):
        prompt = ChatPrompt(TALK[:1], tools=replace(OFFERED, mode=mode))
        form = None if refused else Constraint.json_object()
        attempt = Attempt("g", 0, GenerationRequest("demo", prompt, SamplingParams(constraint=form)), ())
        read = await intake.tokenize(prompt, model, LocalRenderer())
        if refused:
            with pytest.raises(RyzansteinError, match="too large"):
                await enforcing.enforced(attempt, read.reply, model, cast("ConstraintJudge", judge))
        else:
            assert (await enforcing.enforced(attempt, read.reply, model, cast("ConstraintJudge", judge)))[0] is attempt
    kinds = [each.kind for each in judge.asked]
    assert kinds == [ConstraintKind.GRAMMAR, ConstraintKind.JSON_OBJECT, ConstraintKind.GRAMMAR]


@pytest.mark.parametrize(
    ("asked", "least", "usual", "expected"),
    [(None, 0, None, 90), (None, 0, 40, 40), (None, 0, 200, 90), (None, 60, 40, 60), (70, 0, 40, 70), (5, 0, 40, 5)],
)
def test_a_models_own_bound_counts_where_a_request_has_none(
    asked: int | None, least: int, usual: int | None, expected: int
) -> None:
    """And is no bound of others, as vLLM once had it."""
    assert intake._max_tokens(SamplingParams(max_tokens=asked, min_tokens=least), 10, 100, usual) == expected
