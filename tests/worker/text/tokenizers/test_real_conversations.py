"""Conversations through real templates: the ids of transformers, or all texts where transformers loses some, or a refusal."""

from __future__ import annotations

import json
import random
from typing import Any

import pytest

from ryzanstein.errors import RyzansteinError
from ryzanstein.generation.prompts import ChatPrompt, Message, Role, TemplateOptions, ToolCall
from ryzanstein.generation.tools import Tool, Tools

from .conftest import Real

pytestmark = pytest.mark.lab

CONTENTS = [
    "hello there",
    "a\nb",
    "- one\n- two\n\n- three",
    "def f(x):\n\treturn x  # 1\n\n\nprint(f(2))",
    "  space before and after  ",
    "\n\nlines around\n\n",
    "None",
    "日本語 and العربية 🙂",
    "<table><tr><td>1</td></tr></table>",
    "if a < b and b > c: [x] | {y}",
    "x",
]
SCHEMA = '{"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}'
OFFERED = (Tool("weather_of", "The weather of a city.", SCHEMA), Tool("time_now", "The time."))
ASKED = ("<think>", "</think>", "<tool_response>", "</tool_response>")
"""What Qwen's template looks for in messages: that is encoded as transformers does."""
ARGUMENTS = ['{"city": "Rome"}', '{"city": "K\\u00f6ln", "days": [1, null]}', "{}", "", "null", '{"city": "Ro', "[1]"]


def conversation(number: int) -> ChatPrompt:
    """Tools, thinking, prefill, empty, white space, a second system message: some of these, by the number."""
    chance = random.Random(number)
    messages = [Message(Role.SYSTEM, chance.choice(CONTENTS))] if chance.random() < 0.5 else []
    tools = OFFERED if number % 3 == 0 else ()
    for turn in range(chance.randint(1, 3)):
        messages.append(Message(Role.USER, chance.choice(CONTENTS)))
        if tools and chance.random() < 0.7:
            calls = [
                ToolCall(f"call{turn}x{i}xx"[:9], chance.choice(tools).name, chance.choice(ARGUMENTS))
                for i in range(chance.randint(1, 2))
            ]
            messages.append(Message(Role.ASSISTANT, chance.choice(["", "I look."]), tuple(calls)))
            messages += [Message(Role.TOOL, chance.choice(CONTENTS), tool_call_id=call.id) for call in calls]
        reasoning = "so\nit is" if number % 5 == 0 else ""
        messages.append(Message(Role.ASSISTANT, chance.choice([*CONTENTS, ""]), reasoning=reasoning))
    if number % 7 == 1:
        messages.insert(chance.randrange(1, len(messages)), Message(Role.SYSTEM, "from now on, be brief"))
    if number % 4 == 1 and messages[-1].content.strip():
        return ChatPrompt(tuple(messages), TemplateOptions(add_generation_prompt=False, continues=True), Tools(tools))
    return ChatPrompt((*messages, Message(Role.USER, chance.choice(CONTENTS))), tools=Tools(tools))


def as_sent(message: Message) -> dict[str, Any]:
    """A message as a client of OpenAI's API writes it, its arguments as vLLM passes them on."""
    sent: dict[str, Any] = {"role": message.role.value, "content": message.content}
    if message.tool_calls:
        sent["content"] = message.content or None
        sent["tool_calls"] = [
            {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": _loaded(call.arguments)}}
            for call in message.tool_calls
        ]
    if message.role is Role.TOOL:
        sent["tool_call_id"] = message.tool_call_id
    return sent | ({"reasoning_content": message.reasoning} if message.reasoning else {})


def _loaded(text: str) -> Any:
    try:
        value = json.loads(text) if text else {}
    except ValueError:
        return text
    return {} if value is None else value if isinstance(value, dict) else text


def of_transformers(real: Real, prompt: ChatPrompt) -> list[int] | None:
    """The ids of `apply_chat_template`; None where the template fails."""
    offers = [
        {
            "type": "function",
            "function": {"name": tool.name, "description": tool.description}
            | ({"parameters": json.loads(tool.parameters)} if tool.parameters else {}),
        }
        for tool in prompt.tools.offered
    ]
    options = {
        "add_generation_prompt": prompt.template.add_generation_prompt,
        "continue_final_message": prompt.template.continues,
    }
    try:
        sent = [as_sent(message) for message in prompt.messages]
        ids: list[int] = real.reference.apply_chat_template(sent, tools=offers or None, **options)["input_ids"]
    except Exception:
        return None
    return ids


def lost(real: Real, prompt: ChatPrompt, ids: list[int]) -> list[str]:
    """What is not in the text of the ids: contents, names of calls and of tools; or is there though nobody said it."""
    text = flat(real.model.spelled(ids))
    wanted = [message.content.split("</think>")[-1] for message in prompt.messages]
    wanted += [call.name for message in prompt.messages for call in message.tool_calls]
    wanted += [tool.name for tool in prompt.tools.offered]
    missing = [
        each for each in wanted if flat(each) not in text and flat(json.dumps(each, ensure_ascii=False)[1:-1]) not in text
    ]
    names = [tool.name for tool in prompt.tools.offered]
    calls = [call.name for message in prompt.messages for call in message.tool_calls]
    missing += [name for name in names if text.count(name) < calls.count(name) + 1]
    wording = "".join(message.content for message in prompt.messages).count("None")
    return missing + (["None"] if text.count("None") > wording else [])


def flat(text: str) -> str:
    return "".join(text.split())


def ours(real: Real, prompt: ChatPrompt) -> list[int] | None:
    """Our ids; None: refused by name."""
    try:
        return real.model.encode_prompt(prompt)
    except RyzansteinError as error:
        refused = error
    assert refused.violations[0].field.startswith(("messages", "continue_final_message"))
    return None


@pytest.mark.parametrize("number", range(50))
def test_no_difference_is_silent(real: Real, number: int) -> None:
    prompt = conversation(number)
    expected = of_transformers(real, prompt)
    if expected is not None and lost(real, prompt, expected):
        expected = None
    ids = ours(real, prompt)
    assert ids is not None or expected is None, "transformers takes it, with all texts"
    assert ids is None or lost(real, prompt, ids) == []
    assert expected is None or ids == expected


def test_no_text_of_a_message_becomes_a_control_token(real: Real) -> None:
    assert real.model.template is not None
    control = [text for text in real.model.template.control if text not in ASKED][:400]
    bland = real.model.encode_chat([Message(Role.USER, "x"), Message(Role.ASSISTANT, "y"), Message(Role.USER, "z")])
    num_control = sum(map(real.model.is_control, bland))
    chance = random.Random(5)
    for _ in range(40):
        forged = ["a" + "".join(chance.choices(control, k=3)) + "b" for _ in range(3)]
        roles = (Role.USER, Role.ASSISTANT, Role.USER)
        ids = real.model.encode_chat([Message(role, text) for role, text in zip(roles, forged, strict=True)])
        assert sum(map(real.model.is_control, ids)) == num_control
        text = flat(real.model.spelled(ids))
        assert [each for each in forged if flat(each) not in text] == []
